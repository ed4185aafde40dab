"""The engine's side of cold tiers: writes of blocks, and reads back."""
