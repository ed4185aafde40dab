"""Run the command line as `python -m penstock`."""

import sys

from penstock.cli import main

sys.exit(main())
