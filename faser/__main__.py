"""`python -m faser`, and the program `faser`. Signals end it well even while its modules are imported."""

import signal
import sys


def main() -> int:
    """Run the command line; returns the exit status."""
    if sys.argv[1:2] == ["serve"]:
        # The first process of a container ignores SIGTERM until it has a handler. `serve` replaces this one.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        from faser.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        sys.stderr.write("faser: interrupted\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
