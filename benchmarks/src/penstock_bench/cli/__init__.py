"""Commands that this package adds to `penstock`, by the entry points `penstock.commands`."""
