"""Speculative decoding with a draft model, within the engine's memory limit."""
