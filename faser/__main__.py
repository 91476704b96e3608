"""`python -m faser`, and the program `faser`. Ctrl-C ends it well even while its modules are imported."""

import sys


def main() -> int:
    """Run the command line; returns the exit status."""
    try:
        from faser.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        sys.stderr.write("faser: interrupted\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
