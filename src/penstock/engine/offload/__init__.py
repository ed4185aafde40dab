"""Storage of evicted blocks in slower tiers, and their way back."""
