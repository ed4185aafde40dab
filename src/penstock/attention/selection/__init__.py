"""Selective attention: decode steps of long sequences read only some tokens."""
