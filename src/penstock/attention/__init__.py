"""Attention over keys and values that lie in segments and tails."""
