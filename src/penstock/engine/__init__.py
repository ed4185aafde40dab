"""Inference engine: requests, scheduling and steps of many sequences within one memory limit."""
