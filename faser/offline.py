"""LLM, the offline API: `LLM(model).generate(prompts, SamplingParams(...))`, without a server.

The engine runs in a thread of this process; the same AsyncEngine serves HTTP.
"""

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from rich.progress import Progress

from faser.api.requests.chat_template import ChatTemplate
from faser.config.engine import EngineConfig
from faser.config.environment import cache_dir
from faser.engine.checkpoints.source import resolve
from faser.engine.client.async_engine import AsyncEngine
from faser.engine.text.tokenizer import Tokenizer, load_tokenizer
from faser.errors import ConfigError, RequestError
from faser.types import (
    DEFAULT_CLASS,
    FinishReason,
    ModelInfo,
    OutputDelta,
    PositionLogprobs,
    Request,
    SamplingParams,
    SpeculationSummary,
)

_log = logging.getLogger("faser")

_T = TypeVar("_T")

Prompt = str | Sequence[int]
Message = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Sample:
    """One answer. logprobs: one entry per token, if requested. speculation: None without a drafter."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    speculation: SpeculationSummary | None = None

    def _add(self, delta: OutputDelta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        self.speculation = delta.speculation


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The result for one prompt: SamplingParams.n samples."""

    prompt_token_ids: tuple[int, ...]
    samples: tuple[Sample, ...]
    num_cached_tokens: int
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None

    @property
    def text(self) -> str:
        """Text of the first sample."""
        return self.samples[0].text


class LLM:
    """A loaded model. model: a directory, a GGUF file, a hub id, or None for the embedded model.

    options: fields of EngineConfig. speculative_config is a dict with vLLM's keys; speculative_policy="off"
    disables speculation. Close it, or use it in a `with`, to free the model.
    Raises ConfigError if the model cannot be served.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self._config = EngineConfig(model=model, **options)
        self._speculation = self._config.speculation
        self._warn()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="faser-offline", daemon=True)
        self._thread.start()
        self._closed = False
        try:
            directory = resolve(model, cache_dir(), revision=self._config.revision, progress=_no_progress)
            self.tokenizer: Tokenizer = load_tokenizer(Path(self._config.tokenizer or directory))
            self._engine = AsyncEngine(self._config, directory, self.tokenizer, transport="thread")
            self._await(self._engine.start())
            self.info: ModelInfo = self._await(self._engine.wait_ready())
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Generation]:
        """Answer all prompts as one batch; results have the order of the prompts.

        sampling: one for all, or one per prompt. progress: show a progress bar.
        Raises RequestError if a prompt or its parameters cannot be served.
        """
        batch = _as_batch(prompts)
        each = (
            [sampling or SamplingParams()] * len(batch) if not isinstance(sampling, Sequence) else list(sampling)
        )
        if len(each) != len(batch):
            raise RequestError(
                f"{len(each)} sampling parameters for {len(batch)} prompts; give one, or one per prompt"
            )
        token_ids = [self.tokenizer.encode(p) if isinstance(p, str) else list(p) for p in batch]
        return self._await(self._generate_all(token_ids, each, progress))

    def chat(
        self,
        conversations: Sequence[Sequence[Message]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Generation]:
        """Answer conversations, lists of {"role", "content"} messages, with the model's chat template."""
        source = self.tokenizer.chat_template
        if not isinstance(source, str):
            raise ConfigError("this model has no chat template; use generate()")
        template = ChatTemplate(source, bos_token=self.tokenizer.bos_token, eos_token=self.tokenizer.eos_token)
        prompts = [
            self.tokenizer.encode(
                template.render(
                    list(messages), add_generation_prompt=True, continue_final_message=False, extra={}
                ),
                add_special_tokens=False,
            )
            for messages in conversations
        ]
        return self.generate(prompts, sampling, progress=progress)

    def close(self) -> None:
        """Free the model. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if hasattr(self, "_engine"):
            self._await(self._engine.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _warn(self) -> None:
        for warning in self._config.speculation_warnings:
            _log.warning("speculative_config: %s", warning)
        if self._speculation.synthetic:
            _log.warning("SYNTHETIC ACCEPTANCE: drafts are accepted by given rates; answers are not the model's")

    def _await(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _generate_all(
        self, prompts: list[list[int]], sampling: list[SamplingParams], progress: bool
    ) -> list[Generation]:
        with Progress(disable=not progress) as bar:
            task = bar.add_task("prompts", total=len(prompts))
            room = self._config.max_num_seqs + self._config.max_num_queued_reqs
            free, turn = asyncio.Semaphore(room), asyncio.Lock()

            async def answer(prompt: list[int], params: SamplingParams) -> Generation:
                num_samples = min(params.n, room)  # more are refused by the engine
                async with turn:
                    for _ in range(num_samples):
                        await free.acquire()
                try:
                    generation = await self._generate(prompt, params)
                finally:
                    for _ in range(num_samples):
                        free.release()
                bar.advance(task)
                return generation

            work = [answer(prompt, params) for prompt, params in zip(prompts, sampling, strict=True)]
            return list(await asyncio.gather(*work))

    async def _generate(self, prompt: list[int], sampling: SamplingParams) -> Generation:
        request = Request(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            arrival_s=time.monotonic(),
            speculation=self._speculation.params_of(DEFAULT_CLASS),
        )
        samples = tuple(Sample(index=index) for index in range(sampling.n))
        num_cached_tokens = 0
        prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
        async with self._engine.submit(request) as stream:
            async for output in stream:
                num_cached_tokens = max(num_cached_tokens, output.num_cached_tokens)
                prompt_logprobs = output.prompt_logprobs or prompt_logprobs
                for delta in output.deltas:
                    samples[delta.index]._add(delta)
        return Generation(
            prompt_token_ids=request.prompt_token_ids,
            samples=samples,
            num_cached_tokens=num_cached_tokens,
            prompt_logprobs=prompt_logprobs,
        )


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _no_progress(_stage: str, _done: int, _total: int) -> None:
    """Loading shows no progress."""
