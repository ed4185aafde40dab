"""Language models of mlx-vlm, for model types that mlx-lm lacks: the extra `vlm`."""
