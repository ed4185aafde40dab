"""Keys and values: segments, tails, codecs, and attention over them where they lie."""
