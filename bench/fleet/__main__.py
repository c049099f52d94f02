"""`python -m bench.fleet`."""

import sys

from bench.fleet.command import main

if __name__ == "__main__":
    sys.exit(main())
