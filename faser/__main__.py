"""`python -m faser` is `faser`."""

import sys

from faser.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
