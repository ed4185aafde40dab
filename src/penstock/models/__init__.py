"""Loading of models and tokenizers through mlx-lm, and the embedded model."""
