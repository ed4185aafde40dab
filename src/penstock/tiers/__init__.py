"""Cold tiers: records, stores and worker threads for blocks evicted from memory."""
