"""Models in GGUF files: header, config, weights and tokenizer in mlx-lm's form."""
