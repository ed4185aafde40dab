"""The penstock command line; its entry point is in `commands`."""

from penstock.cli.commands import app as app
from penstock.cli.commands import main as main
