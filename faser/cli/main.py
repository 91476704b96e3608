"""`faser COMMAND …`: runs the command, and turns an error into one line and an exit status.

Exit status: 0 success, 1 an error of FASER, 2 an error of the operator (flag, file, model), 130 interrupted.
"""

import os
import sys
from collections.abc import Callable, Sequence

from faser import __version__
from faser.config.declaration import did_you_mean
from faser.config.sources import UsageError
from faser.errors import ConfigError, FaserError

Command = Callable[[Sequence[str]], int]

COMMANDS = {
    "serve": "serve a model over HTTP",
    "chat": "talk to a model, served or in this process",
    "models": "list the models that load, or say whether one does",
    "pull": "fetch a model into the cache",
    "run-batch": "answer a file of requests without a server",
    "distill": "make a head that drafts for a model",
    "bench": "measure speculation on this machine",
    "plan": "estimate the request rate that this machine sustains within its latency targets",
    "env": "show versions, device and backend, for bug reports",
}
_ALIASES = {"collect-env": "env"}
# Of other programs: whose, and what to use here.
_OTHERS_COMMANDS = {
    "complete": ("vLLM", "faser chat, or POST /v1/completions"),
    "run": ("Ollama", "faser chat --in-process MODEL, or faser serve MODEL"),
    "list": (
        "Ollama",
        "faser models, for what can be loaded; fetched models are in ~/.cache/faser and the hub's cache",
    ),
    "ps": ("Ollama", "GET /v1/models of a server, or its page"),
    "show": ("Ollama", "faser models MODEL"),
    "stop": ("Ollama", "Ctrl-C or SIGTERM"),
    "rm": ("Ollama", "rm in ~/.cache/faser or the hub's cache"),
    "create": ("Ollama", "faser serve with flags or --config FILE.yaml"),
    "llama-server": ("llama.cpp", "faser serve"),
    "llama-cli": ("llama.cpp", "faser chat --in-process MODEL"),
    "server": ("llama.cpp", "faser serve"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version", "version"):
        print(f"faser {__version__}")
        return 0
    name = _ALIASES.get(arguments[0], arguments[0])
    try:
        _check_working_directory()
        status = _command(name)(arguments[1:])
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # of a reader that has seen enough, as in `faser models | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        return 0
    except UsageError as error:
        for problem in error.problems:
            print(f"faser {name}: {problem}" if name in COMMANDS else f"faser: {problem}", file=sys.stderr)
        return 2
    except FaserError as error:
        print(f"faser {name}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print(f"faser {name}: interrupted", file=sys.stderr)
        return 130


def _check_working_directory() -> None:
    """Raises ConfigError where it has been removed: libraries that compute look themselves up from there."""
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError(
            f"there is no working directory ({error.strerror}); cd to a folder that exists"
        ) from None


def _command(name: str) -> Command:
    """The command's function. Imported on demand, so that `faser --help` answers at once."""
    match name:
        case "serve":
            from faser.cli.serve import serve

            return serve
        case "chat":
            from faser.cli.chat import chat

            return chat
        case "models":
            from faser.cli.models import models

            return models
        case "pull":
            from faser.cli.tools import pull

            return pull
        case "run-batch":
            from faser.cli.batch.command import run_batch

            return run_batch
        case "distill":
            from faser.cli.distill import distill

            return distill
        case "bench":
            from faser.cli.bench.command import bench

            return bench
        case "plan":
            from faser.cli.plan import plan

            return plan
        case "env":
            from faser.cli.tools import env

            return env
    if name in _OTHERS_COMMANDS:
        origin, instead = _OTHERS_COMMANDS[name]
        raise UsageError([f"'{name}' is known from {origin} but is no command of FASER. Use {instead}."])
    raise UsageError([f"unknown command '{name}'.{did_you_mean(name, COMMANDS)} Commands: {', '.join(COMMANDS)}"])


def _overview() -> str:
    lines = "\n".join(f"  {name:<9} {what}" for name, what in COMMANDS.items())
    return (
        f"usage: faser COMMAND …\n\n{lines}\n\n"
        "Run 'faser COMMAND --help' for details, 'faser --version' for the version."
    )
