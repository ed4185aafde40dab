"""Keys and values: segments, tails, recurrent states and codecs."""
