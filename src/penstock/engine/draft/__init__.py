"""A draft model: a small model whose tokens are proposed, inside the engine's memory limit."""
