"""Loaded before any test module: the BLAS must be there before one of them imports mlx."""

import penstock  # noqa: F401 - the import is what loads it
