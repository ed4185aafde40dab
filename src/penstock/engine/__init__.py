"""Many sequences at once over one tree and one ledger: requests, schedule, steps."""
