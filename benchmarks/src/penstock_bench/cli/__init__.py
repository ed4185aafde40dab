"""Commands that this package adds to `penstock` by the entry point group `penstock.commands`."""
