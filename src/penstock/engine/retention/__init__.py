"""Retention of prefixes: window layers and the codecs of nodes."""
