"""Slower tiers that hold blocks evicted from memory: records, stores and their threads."""
