"""Models in GGUF files: header, config, weights and tokenizer, as mlx-lm wants them.

Nothing here imports mlx-lm; `penstock.models.mlx_lm` puts the parts together.
"""
