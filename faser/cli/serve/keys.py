"""The API keys of a server: those of the flags or the environment, and those of the key file."""

from faser.cli.serve.text_file import read_text
from faser.config.declaration import Label, flag_label
from faser.config.server import ServerConfig, key_problems
from faser.config.sources import UsageError


def read_api_keys(config: ServerConfig, label: Label = flag_label) -> tuple[str, ...]:
    """All keys that requests may present; spaces around those in the file are dropped.

    label: what messages call a setting.
    Raises UsageError for a key file that cannot be read, has no key, or has one that no client can present.
    """
    path = config.api_key_file
    if path is None:
        return config.api_key
    named = label("api_key_file")
    lines = [line.strip() for line in read_text(named, path).splitlines()]
    if not any(lines):
        raise UsageError([f"{named} is {path}; it contains no key"])
    for number, line in enumerate(lines, start=1):
        if problems := key_problems([line]):
            raise UsageError([f"{named} is {path}; line {number}: {problems[0]}"])
    return config.api_key + tuple(line for line in lines if line)
