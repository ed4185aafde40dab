"""The penstock command line; its commands are in `commands`."""

from penstock.cli.entry import main as main
