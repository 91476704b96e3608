"""LocalAnswerer: answers from a model in this process; its engine runs in a thread."""

import asyncio
import json
import time
import uuid
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Self

from faser.api.requests.chat_template import ChatTemplate
from faser.cli.chat.answerer import AnswerLimits, Message
from faser.cli.console.progress import ProgressReporter
from faser.cli.serve.generation import sampling_defaults
from faser.config.engine import EngineConfig
from faser.config.environment import cache_dir
from faser.config.server import ServerConfig
from faser.engine.checkpoints.source import resolve
from faser.engine.client.async_engine import AsyncEngine
from faser.engine.client.output_stream import OutputStream
from faser.engine.text.tokenizer import load_tokenizer
from faser.errors import ConfigError
from faser.types import Request, RequestOutput, SamplingParams, StructuredOutput, StructureKind


class LocalAnswerer:
    """Loads the model on entry. The event loop runs only while an answer is awaited."""

    def __init__(self, config: EngineConfig, limits: AnswerLimits) -> None:
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

    async def _submit(self, request: Request) -> OutputStream:
        return self._engine.submit(request)


async def _next(stream: OutputStream) -> RequestOutput | None:
    return await anext(stream, None)


def _sampling(defaults: dict[str, float], limits: AnswerLimits) -> SamplingParams:
    """The model's defaults, overridden by the limits."""
    fields: dict[str, Any] = {"max_tokens": None, **defaults}
    if limits.max_tokens is not None:
        fields["max_tokens"] = limits.max_tokens
    if limits.temperature is not None:
        fields["temperature"] = limits.temperature
    if limits.json_schema is not None:
        fields["structured_output"] = StructuredOutput(
            kind=StructureKind.JSON, text=json.dumps(limits.json_schema), param="--json-schema"
        )
    return SamplingParams(**fields)
