"""Codecs: keys and values in fewer bits, and their products without dequantizing."""
