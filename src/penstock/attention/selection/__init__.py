"""Selective attention: long sequences read only some of their tokens in each step."""
