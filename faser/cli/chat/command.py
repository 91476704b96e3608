"""`faser chat`: reads the flags, and starts a conversation with a server or with a model in this process."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from faser.cli.chat.answerer import Answerer, AnswerLimits
from faser.cli.chat.conversation import PROG, Conversation, talk
from faser.config.declaration import settings_of
from faser.config.engine import EngineConfig
from faser.config.environment import flag_environment
from faser.config.server import ServerConfig
from faser.config.sources import CommandParser, UsageError, engine_config, engine_flags, engine_settings

_HELP = """usage: faser chat [MODEL] [flags]

Talk to a served model, or with --in-process to one loaded here.

  MODEL                   the model to ask the server for [its first]; with --in-process, the model to
                          load: a directory, .gguf file or hub id [the embedded SmolLM2-135M-Instruct]
  --url URL               the server [http://127.0.0.1:8000]
  --api-key KEY           its key [the variable FASER_API_KEY]
  --in-process            load the model here; the model and engine flags of faser serve may follow
  --system-prompt TEXT    text of the system message
  --quick TEXT            ask this one question, print the answer, and exit
  --max-tokens N          longest answer [the rest of the context]
  --temperature X         0 always takes the most likely token [the model's default]
  --json-schema FILE      answers are JSON that matches the schema in this file

In the conversation: /reset forgets it, /exit ends it, Ctrl-C stops an answer."""


def chat(arguments: Sequence[str]) -> int:
    """Answer until the input ends; returns the exit status."""
    own, engine_arguments = _own_parser().parse_known_args(arguments)
    if own.help:
        print(_HELP)
        return 0
    engine_config = _engine_config(engine_arguments, in_process=own.in_process)
    limits = AnswerLimits(
        max_tokens=own.max_tokens, temperature=own.temperature, json_schema=_schema(own.json_schema)
    )
    with _answerer(engine_config, limits, own.url, own.api_key, in_process=own.in_process) as answerer:
        conversation = Conversation(answerer, system_prompt=own.system_prompt)
        if own.quick is not None:
            return 0 if conversation.ask(own.quick, sys.stdout) else 1
        return talk(conversation, sys.stdin, sys.stdout)


def _own_parser() -> CommandParser:
    parser = CommandParser(PROG)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key")
    parser.add_argument("--in-process", action="store_true")
    parser.add_argument("--system-prompt", "--system")
    parser.add_argument("--quick", "-q")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--json-schema")
    parser.add_argument("--help", "-h", action="store_true")
    return parser


def _schema(path: str | None) -> dict[str, Any] | None:
    """The JSON schema in a file. Raises UsageError for a file that has none."""
    if path is None:
        return None
    try:
        schema = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError([f"--json-schema is {path}; it cannot be read as JSON: {error}"]) from None
    if not isinstance(schema, dict):
        raise UsageError([f"--json-schema is {path}; the file must hold a JSON object"])
    return schema


def _engine_config(arguments: Sequence[str], *, in_process: bool) -> EngineConfig:
    """The engine's settings. Without --in-process only the model's name is allowed."""
    if in_process:
        return engine_config(engine_settings(PROG, arguments))
    findings = engine_flags(PROG, arguments)
    labels = [given.label for name, given in findings.given.items() if name != "model"]
    findings.problems += [f"{label} needs --in-process; a server has its own settings" for label in labels]
    return engine_config(findings)


def _answerer(
    engine_config: EngineConfig, limits: AnswerLimits, url: str, api_key: str | None, *, in_process: bool
) -> Answerer:
    if in_process:
        from faser.cli.chat.local import LocalAnswerer

        return LocalAnswerer(engine_config, limits)
    from faser.cli.chat.remote import RemoteAnswerer

    if api_key is None:
        variables, _ = flag_environment([each for each in settings_of(ServerConfig) if each.name == "api_key"])
        api_key = variables["api_key"][1] if "api_key" in variables else None
    return RemoteAnswerer(url, limits, model=engine_config.model, api_key=api_key)
