"""Decisions of the engine: sequences, admission, the memory budget and its estimates."""
