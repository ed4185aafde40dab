"""Codecs: quantized formats of KV, and their attention products."""
