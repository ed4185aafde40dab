"""Parts that are found by entry points, and that no other part imports."""
