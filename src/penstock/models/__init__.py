"""Models and their tokenizers, taken from mlx-lm, and the embedded model."""
