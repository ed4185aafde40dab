"""The engine's side of cold tiers: writes blocks, and restores them."""
