"""The command line of penstock; `commands` has its entry."""

from penstock.cli.commands import app as app
from penstock.cli.commands import main as main
