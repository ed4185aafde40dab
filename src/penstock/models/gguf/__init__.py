"""Models in GGUF files: header, config, weights and tokenizer in mlx-lm's form.

Nothing here imports mlx-lm; `penstock.models.mlx_lm` puts the parts together.
"""
