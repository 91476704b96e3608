"""`faser chat`: a conversation on the terminal, with a server or with a model in this process.

If the input is not a terminal, every line is a question and every answer ends with a newline, for scripts. The
modules that a model needs are imported only for one.
"""

import asyncio
import json
import sys
import time
import uuid
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TextIO

import httpx

from faser.config.declaration import settings_of
from faser.config.engine import EngineConfig
from faser.config.environment import cache_dir, flag_environment
from faser.config.server import ServerConfig
from faser.config.sources import CommandParser, UsageError, engine_config, engine_flags, engine_settings
from faser.errors import ConfigError, EngineError, FaserError, RequestError
from faser.optional import given, maybe
from faser.types.answer import RequestOutput
from faser.types.request import Request
from faser.types.sampling import SamplingParams, StructuredOutput, StructureKind

if TYPE_CHECKING:
    from faser.engine.client.output_stream import OutputStream

PROG = "faser chat"

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

Message = dict[str, str]
_CONNECT_TIMEOUT_S = 5.0


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
    engine_config: EngineConfig, limits: "AnswerLimits", url: str, api_key: str | None, *, in_process: bool
) -> "Answerer":
    if in_process:
        return LocalAnswerer(engine_config, limits)

    if api_key is None:
        variables, _ = flag_environment([each for each in settings_of(ServerConfig) if each.name == "api_key"])
        api_key = variables["api_key"][1] if "api_key" in variables else None
    return RemoteAnswerer(url, limits, model=engine_config.model, api_key=api_key)


class Conversation:
    """The messages so far. A question whose answer failed is forgotten; a stopped answer is kept."""

    def __init__(self, answerer: "Answerer", *, system_prompt: str | None = None) -> None:
        self._answerer = answerer
        self._initial: list[Message] = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self.messages = list(self._initial)

    def reset(self) -> None:
        self.messages = list(self._initial)

    def ask(self, question: str, out: TextIO) -> bool:
        """Print the answer to a question as it arrives. False: it failed, and stderr has the reason."""
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
    """Answer each line of the input; returns the exit status: 1 if a question of a script failed."""
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
                print(f"{PROG}: unknown command {command}; known are /reset and /exit", file=sys.stderr)
            case question:
                failed |= not conversation.ask(question, out)
    return 1 if failed and not interactive else 0


def _typed() -> Iterator[str]:
    """Lines from the terminal, with editing and history. Ctrl-C drops a line, Ctrl-D ends the input."""
    import readline  # importing it changes input(), so only a terminal imports it

    readline.set_auto_history(True)
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerLimits:
    """Limits of each answer. None: the model's default. json_schema: the answer matches it; None: free text."""

    max_tokens: int | None = None
    temperature: float | None = None
    json_schema: dict[str, Any] | None = None


class Answerer(Protocol):
    """A source of answers. Its context is entered before the first question and exited after the last."""

    def answer(self, messages: Sequence[Message]) -> Generator[str, None, None]:
        """The answer's text in pieces; closing the generator aborts the answer. Raises FaserError."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class RemoteAnswerer:
    """url: of the server, with or without /v1. model: None: the first that the server serves."""

    def __init__(
        self,
        url: str,
        limits: "AnswerLimits",
        *,
        model: str | None = None,
        api_key: str | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._fields: dict[str, Any] = {"stream": True, "model": model}
        self._fields |= {"max_tokens": limits.max_tokens, "temperature": limits.temperature}
        if limits.json_schema is not None:
            wrapped = {"name": "answer", "schema": limits.json_schema, "strict": True}
            self._fields["response_format"] = {"type": "json_schema", "json_schema": wrapped}
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),
            transport=transport,
        )

    def answer(self, messages: Sequence[Message]) -> Generator[str, None, None]:
        """Raises RequestError for a refused request, EngineError for an incomplete answer."""
        body = {**given(self._fields), "messages": list(messages)}
        try:
            with self._client.stream("POST", f"{self._url}/v1/chat/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    response.read()
                    raise RequestError(f"{response.status_code}: {_error_text(response.text)}")
                yield from _pieces(_lines(response.iter_text()))
        except httpx.HTTPError as error:
            raise EngineError(f"{self._url}: {error or type(error).__name__}") from None

    def __enter__(self) -> Self:
        """Raises ConfigError if no server answers at the URL."""
        try:
            self._client.get(f"{self._url}/health")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            self._client.close()
            raise ConfigError(
                f"--url is {self._url}; no server answers there: {error}. Start faser serve, or use --in-process."
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()


def _lines(texts: Iterator[str]) -> Iterator[str]:
    """Lines that end with a line feed. httpx's iter_lines also ends one at U+2028, which JSON may hold."""
    rest = ""
    for text in texts:
        *lines, rest = (rest + text).split("\n")
        yield from lines
    yield rest


def _pieces(lines: Iterator[str]) -> Iterator[str]:
    """The texts in a stream of server-sent events, up to [DONE]."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise EngineError(str(event["error"].get("message", event["error"])))
        for choice in event["choices"]:
            if text := choice["delta"].get("content"):
                yield text
    raise EngineError("the answer ended early")


def _error_text(body: str) -> str:
    """The message in an error body; the body itself if it has none."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.strip()


class LocalAnswerer:
    """Loads the model on entry. The event loop runs only while an answer is awaited."""

    def __init__(self, config: EngineConfig, limits: "AnswerLimits") -> None:
        self._config = config
        self._limits = limits
        self._runner = asyncio.Runner()

    def answer(self, messages: Sequence[Message]) -> Generator[str, None, None]:
        """Raises RequestError for a conversation longer than the context, EngineError if the engine dies."""
        prompt = self._template.render(
            list(messages), add_generation_prompt=True, continue_final_message=False, extra={}
        )
        request = Request(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=tuple(self._tokenizer.encode(prompt, add_special_tokens=False)),
            sampling=self._sampling,
            arrival_s=time.monotonic(),
        )
        stream = self._runner.run(self._submit(request))
        try:
            while (output := self._runner.run(_next(stream))) is not None:
                yield "".join(delta.text for delta in output.deltas)
        finally:
            stream.close()

    def __enter__(self) -> Self:
        """Raises ConfigError if the model cannot be served or has no chat template."""
        from faser.api.requests.chat_template import ChatTemplate
        from faser.cli.application import sampling_defaults
        from faser.cli.console import ProgressReporter
        from faser.engine.checkpoints.source import resolve
        from faser.engine.client.async_engine import AsyncEngine
        from faser.engine.text.tokenizer import load_tokenizer

        with ProgressReporter() as report:
            directory = resolve(self._config.model, cache_dir(), revision=self._config.revision, progress=report)
            self._tokenizer = load_tokenizer(Path(self._config.tokenizer or directory))
            source = self._tokenizer.chat_template
            if not isinstance(source, str):
                raise ConfigError(f"{directory}: this model has no chat template")
            self._template = ChatTemplate(
                source, bos_token=self._tokenizer.bos_token, eos_token=self._tokenizer.eos_token
            )
            self._sampling = _sampling(sampling_defaults(directory, ServerConfig()), self._limits)
            self._engine = AsyncEngine(
                self._config, directory, self._tokenizer, transport="thread", on_progress=report
            )
            try:
                self._runner.run(self._load())
            except BaseException:
                self.__exit__()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._engine.stop())
        self._runner.close()

    async def _load(self) -> None:
        await self._engine.start()
        await self._engine.wait_ready()

    async def _submit(self, request: Request) -> "OutputStream":
        return self._engine.submit(request)


async def _next(stream: "OutputStream") -> RequestOutput | None:
    return await anext(stream, None)


def _sampling(defaults: dict[str, float], limits: "AnswerLimits") -> SamplingParams:
    """The model's defaults, overridden by the limits."""
    own = {
        "max_tokens": limits.max_tokens,
        "temperature": limits.temperature,
        "structured_output": maybe(_as_structure, limits.json_schema),
    }
    fields: dict[str, Any] = {"max_tokens": None, **defaults, **given(own)}
    return SamplingParams(**fields)


def _as_structure(schema: Any) -> StructuredOutput:
    return StructuredOutput(kind=StructureKind.JSON, text=json.dumps(schema), param="--json-schema")
