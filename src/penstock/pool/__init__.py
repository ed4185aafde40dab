"""Several models under one ledger, loaded on demand and evicted when memory is short."""
