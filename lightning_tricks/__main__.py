"""`python -m lightning_tricks`, the `lightning-tricks` command."""

import sys

from lightning_tricks.cli import main

if __name__ == "__main__":
    sys.exit(main())
