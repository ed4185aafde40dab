"""Execution of the model: forward passes, sampling, grammars and text."""
