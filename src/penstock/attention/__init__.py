"""Attention over the KV in segments and tails."""
