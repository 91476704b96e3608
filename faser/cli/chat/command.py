"""`faser chat`: a conversation on the terminal, with a server or with a model in this process.

Owns the conversation and what is typed; where answers come from is behind `Answerer`. When input is no
terminal, every line is a message and every answer ends with a newline, so that scripts can talk.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import TextIO, cast

from faser.cli.chat.answerer import Answerer, AnswerLimits, Message
from faser.cli.flags.parser import CommandParser, parse
from faser.cli.flags.sources import SETTINGS, add_environment, settle
from faser.config.declaration import settings_of
from faser.config.engine import EngineConfig
from faser.config.environment import flag_environment
from faser.config.server import ServerConfig
from faser.errors import FaserError

PROG = "faser chat"

_HELP = """usage: faser chat [MODEL] [flags]

Talk to a served model, or with --in-process to one loaded here.

  MODEL                   the name to ask the server for [its first]; with --in-process, the model to
                          load: a directory, .gguf file or hub id [the embedded SmolLM2-135M-Instruct]
  --url URL               the server [http://127.0.0.1:8000]
  --api-key KEY           its key [the variable FASER_API_KEY]
  --in-process            load the model here; the model and engine flags of faser serve may follow
  --system-prompt TEXT    what the model is told first
  --quick TEXT            ask this, print the answer, leave
  --max-tokens N          longest answer [what is left of the context]
  --temperature X         0 always takes the likeliest token [the model's default]

In the conversation: /reset forgets it, /exit ends it, Ctrl-C stops an answer."""


def chat(arguments: Sequence[str]) -> int:
    """Talk until the input ends; returns the exit status."""
    own, engine_arguments = _own_parser().parse_known_args(arguments)
    if own.help:
        print(_HELP)
        return 0
    engine_config = _engine_config(engine_arguments, in_process=own.in_process)
    limits = AnswerLimits(max_tokens=own.max_tokens, temperature=own.temperature)
    with _answerer(engine_config, limits, own.url, own.api_key, in_process=own.in_process) as answerer:
        conversation = Conversation(answerer, system_prompt=own.system_prompt)
        if own.quick is not None:
            return 0 if conversation.ask(own.quick, sys.stdout) else 1
        return talk(conversation, sys.stdin, sys.stdout)


class Conversation:
    """What was said so far. A question that got no full answer is forgotten again, unless it was stopped."""

    def __init__(self, answerer: Answerer, *, system_prompt: str | None = None) -> None:
        self._answerer = answerer
        self._first: list[Message] = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self.messages = list(self._first)

    def reset(self) -> None:
        self.messages = list(self._first)

    def ask(self, question: str, out: TextIO) -> bool:
        """Print the answer to a question as it comes. False: there was none, and the reason is on stderr."""
        messages = [*self.messages, {"role": "user", "content": question}]
        answer = ""
        pieces = self._answerer.answer(messages)
        try:
            for piece in pieces:
                answer += piece
                print(piece, end="", flush=True, file=out)
        except KeyboardInterrupt:
            print(" [stopped]", end="", file=out)
        except FaserError as error:
            print(f"{PROG}: {error}", file=sys.stderr)
            return False
        finally:
            pieces.close()
        print(file=out)
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        return True


def talk(conversation: Conversation, source: TextIO, out: TextIO) -> int:
    """Answer lines until there are no more. From a script, a question without an answer makes the status 1."""
    interactive = source.isatty()
    failed = False
    for line in _typed() if interactive else source:
        match line.strip():
            case "":
                continue
            case "/exit" | "/quit":
                break
            case "/reset":
                conversation.reset()
            case command if command.startswith("/") and interactive:
                print(f"{PROG}: unknown command {command}; there are /reset and /exit", file=sys.stderr)
            case question:
                failed |= not conversation.ask(question, out)
    return 1 if failed and not interactive else 0


def _typed() -> Iterator[str]:
    """Lines from the terminal, with editing and history. Ctrl-C drops a line, Ctrl-D ends."""
    import readline  # its import changes what input() does, so only a terminal pays for it

    readline.set_auto_history(True)
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return


def _own_parser() -> CommandParser:
    parser = CommandParser(PROG)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key")
    parser.add_argument("--in-process", action="store_true")
    parser.add_argument("--system-prompt", "--system")
    parser.add_argument("--quick", "-q")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--help", "-h", action="store_true")
    return parser


def _engine_config(arguments: Sequence[str], *, in_process: bool) -> EngineConfig:
    """The engine's settings; without --in-process only the model's name may be given."""
    settings = settings_of(EngineConfig)
    parsed = parse(PROG, arguments, settings)
    findings = parsed.findings
    if parsed.config_file is not None:
        findings.problems.append(f"--config is {parsed.config_file}; only faser serve reads a config file")
    if in_process:
        add_environment(findings, SETTINGS)
    else:
        labels = [given.label for name, given in findings.given.items() if name != "model"]
        findings.problems += [f"{label} needs --in-process; a server has its own settings" for label in labels]
    (config,) = settle(findings, (EngineConfig,))
    return cast(EngineConfig, config)


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
