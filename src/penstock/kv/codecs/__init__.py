"""Codecs: KV in fewer bits, and attention products on codes."""
