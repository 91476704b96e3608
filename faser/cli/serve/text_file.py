"""Reads the text files that settings name."""

from pathlib import Path

from faser.config.sources import UsageError


def read_text(named: str, path: str) -> str:
    """The text in a file. named: what messages call the setting.

    Raises UsageError for a file that is not UTF-8 or cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError([f"{named} is {path}; it is not UTF-8: {error.reason}"]) from None
    except OSError as error:
        raise UsageError([f"{named} is {path}; it cannot be read: {error.strerror}"]) from None
