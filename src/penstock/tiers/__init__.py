"""Cold tiers: records, stores and their threads, for blocks evicted from memory."""
