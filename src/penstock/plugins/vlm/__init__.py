"""Models of mlx-vlm: model types that mlx-lm lacks, and image inputs. Needs the extra `vlm`."""
