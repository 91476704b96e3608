"""Reads the text files that flags name."""

from pathlib import Path

from faser.cli.flags.sources import UsageError


def read_text(flag: str, path: str) -> str:
    """The text in a file. Raises UsageError, which names the flag, for one that is not UTF-8 or cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError([f"{flag} is {path}; it is not UTF-8: {error.reason}"]) from None
    except OSError as error:
        raise UsageError([f"{flag} is {path}; it cannot be read: {error.strerror}"]) from None
