"""GGUF files: header, config, weights and tokenizer converted for mlx-lm."""
