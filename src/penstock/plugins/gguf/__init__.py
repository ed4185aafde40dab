"""Loading of GGUF files: header, config, weights and tokenizer are converted for mlx-lm."""
