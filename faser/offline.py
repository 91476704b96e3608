"""LLM, the offline API: `LLM(model).generate(prompts, SamplingParams(...))`, without a server.

Names and results are those of vLLM's LLM, so that a script written for it runs after a change of the import.
The engine runs in a thread of this process; the same AsyncEngine serves HTTP.
"""

import asyncio
import logging
import sys
import threading
import time
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar

from rich.console import Console
from rich.progress import Progress

from faser.api.requests.chat_renderer import ChatRenderer
from faser.config.environment import cache_dir
from faser.config.server import ServerConfig
from faser.config.sources import engine_options
from faser.engine.checkpoints.adapter import read_adapter
from faser.engine.checkpoints.source import resolve, resolve_adapter
from faser.engine.client.async_engine import AsyncEngine
from faser.engine.text.tokenizer import Tokenizer, load_tokenizer
from faser.errors import ModelError, RequestError
from faser.optional import maybe
from faser.sampling_params import SamplingParams
from faser.types.adapter import Adapter
from faser.types.answer import FinishReason, OutputDelta, PositionLogprobs, SpeculationSummary
from faser.types.engine import ModelInfo
from faser.types.request import DEFAULT_CLASS, Request
from faser.types.sampling import SamplingParams as EngineSamplingParams

_log = logging.getLogger("faser")

_T = TypeVar("_T")

Sampling = SamplingParams | EngineSamplingParams
Prompt = Any  # text, token ids, {"prompt": text} or {"prompt_token_ids": ids}
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """Log probability of one token, before temperature. rank: 1 is the most likely; None: not known."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One answer to a prompt. logprobs: of each token, by token id. speculation: None without drafts."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    speculation: SpeculationSummary | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None

    def _add(self, delta: OutputDelta, tokenizer: Tokenizer) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        if delta.logprobs:
            self.logprobs = (self.logprobs or []) + [_by_token(each, tokenizer) for each in delta.logprobs]
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + sum(
                each.logprob for each in delta.logprobs
            )
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        self.speculation = delta.speculation


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The answers to one prompt, SamplingParams.n of them. prompt: None where token ids were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    finished: bool = True

    @property
    def text(self) -> str:
        """Text of the first answer."""
        return self.outputs[0].text


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter for the prompts of a call, as in vLLM. lora_path: a folder in PEFT's format, or a GGUF file.

    lora_name: its name in metrics and logs. lora_int_id: vLLM's number of an adapter, which has no meaning here.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str


Lora = LoRARequest | Sequence[LoRARequest | None] | None


class LLM:
    """A loaded model. model: a directory, a GGUF file, a hub id, or None for the default model.

    options: the flags of `faser serve` that concern the engine, vLLM's among them, with dashes as underscores.
    speculative_config is a dict with vLLM's keys; speculative_policy="off" disables speculation. Close it, or use
    it in a `with`, to free the model.
    Raises ConfigError if the model cannot be served.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self._config = engine_options({"model": model, **options})
        self._speculation = self._config.speculation
        self._warn()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="faser-offline", daemon=True)
        self._thread.start()
        self._closed = False
        self._adapters: dict[LoRARequest, Adapter] = {}
        try:
            self._directory = resolve(model, cache_dir(), revision=self._config.revision, progress=_no_progress)
            self.tokenizer: Tokenizer = load_tokenizer(Path(self._config.tokenizer or self._directory))
            self._engine = AsyncEngine(self._config, self._directory, self.tokenizer, transport="thread")
            self._await(self._engine.start())
            self.info: ModelInfo = self._await(self._engine.wait_ready())
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: Lora = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer all prompts as one batch; results have the order of the prompts.

        sampling_params: one for all, or one per prompt; None: the model's own defaults. use_tqdm: show a progress
        bar on a terminal. lora_request: the adapter of all prompts, or of each; it needs LLM(…, enable_lora=True).
        priority: of each prompt; lower ones run first.
        Raises RequestError if a prompt, its parameters or its adapter cannot be served.
        """
        batch = [self._read(each) for each in _as_batch(prompts)]
        return self._answer(batch, sampling_params, lora_request, priority, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: Lora = None,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several, with the model's chat template or another one.

        messages: {"role", "content"} dicts, or lists of them. tools: functions that the template describes to the
        model; calls are in the text. The other arguments are those of the route for chats, and of `generate`.
        """
        renderer = ChatRenderer(self.tokenizer, chat_template)
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        texts = [
            renderer.render(
                [dict(each) for each in conversation],
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_kwargs=chat_template_kwargs,
                template_fields={},
                tools=tools or (),
            )
            for conversation in conversations
        ]
        batch = [(text, self.tokenizer.encode(text, add_special_tokens=False)) for text in texts]
        return self._answer(batch, sampling_params, lora_request, None, use_tqdm)

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer: `encode(text)` gives token ids, `decode(ids)` text."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of a request that names none: those of the model's generation_config.json."""
        from faser.cli.application import sampling_defaults  # imports the parts of a server

        return SamplingParams(**sampling_defaults(self._directory, ServerConfig()))

    def encode(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse vLLM's pooling API by name."""
        raise RequestError(
            "LLM.encode is not supported: FASER has no pooling models; get_tokenizer().encode tokenises"
        )

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

    def _read(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The text, if there is one, and its token ids."""
        if isinstance(prompt, Mapping):
            if unknown := sorted(set(prompt) - {"prompt", "prompt_token_ids"}):
                raise RequestError(
                    f"the prompt has the key {unknown[0]!r}; FASER reads prompt and prompt_token_ids"
                )
            if not prompt:
                raise RequestError("the prompt is an empty dict; it needs the key prompt or prompt_token_ids")
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            return text, self.tokenizer.encode(text or "") if ids is None else list(ids)
        return (prompt, self.tokenizer.encode(prompt)) if isinstance(prompt, str) else (None, list(prompt))

    def _sampling(
        self, given: Sampling | Sequence[Sampling] | None, num_prompts: int
    ) -> list[EngineSamplingParams]:
        """The engine's parameters of each prompt."""
        each = (
            list(given)
            if isinstance(given, Sequence)
            else [given or self.get_default_sampling_params()] * num_prompts
        )
        if len(each) != num_prompts:
            raise RequestError(
                f"{len(each)} sampling parameters for {num_prompts} prompts; give one, or one per prompt"
            )
        limit = self._config.max_logprobs
        return [
            params.resolve(self.tokenizer, max_logprobs=limit) if isinstance(params, SamplingParams) else params
            for params in each
        ]

    def _answer(
        self,
        prompts: Sequence[tuple[str | None, list[int]]],
        sampling_params: Sampling | Sequence[Sampling] | None,
        lora_request: Lora,
        priority: Sequence[int] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        count = len(prompts)
        sampling = self._sampling(sampling_params, count)
        priorities = [0] * count if priority is None else priority
        if len(priorities) != count:
            raise RequestError(f"{len(priorities)} priorities for {count} prompts; give one per prompt")
        several = [lora_request] * count if isinstance(lora_request, LoRARequest | None) else lora_request
        if len(several) != count:
            raise RequestError(f"{len(several)} adapters for {count} prompts; give one, or one per prompt")
        adapters = [maybe(self._adapter, each) for each in several]
        return self._await(self._generate_all(prompts, sampling, adapters, priorities, use_tqdm))

    def _adapter(self, asked: LoRARequest) -> Adapter:
        if not self._config.enable_lora:
            raise RequestError(
                "lora_request needs room for adapters: LLM(…, enable_lora=True)", param="lora_request"
            )
        if asked not in self._adapters:
            try:
                path = resolve_adapter(asked.lora_path, progress=_no_progress)
                self._adapters[asked] = read_adapter(asked.lora_name, path, max_rank=self._config.max_lora_rank)
            except ModelError as error:
                raise RequestError(str(error), param="lora_request") from None
        return self._adapters[asked]

    async def _generate_all(
        self,
        prompts: Sequence[tuple[str | None, list[int]]],
        sampling: Sequence[EngineSamplingParams],
        adapters: Sequence[Adapter | None],
        priorities: Sequence[int],
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        with Progress(console=Console(stderr=True), disable=not (use_tqdm and sys.stderr.isatty())) as bar:
            task = bar.add_task("prompts", total=len(prompts))
            room = self._config.max_num_seqs + self._config.max_num_queued_reqs
            free, turn = asyncio.Semaphore(room), asyncio.Lock()

            async def answer(
                prompt: tuple[str | None, list[int]],
                params: EngineSamplingParams,
                adapter: Adapter | None,
                level: int,
            ) -> RequestOutput:
                num_samples = min(params.n, room)  # more are refused by the engine
                async with turn:
                    for _ in range(num_samples):
                        await free.acquire()
                try:
                    answered = await self._generate(*prompt, params, adapter, level)
                finally:
                    for _ in range(num_samples):
                        free.release()
                bar.advance(task)
                return answered

            return list(await asyncio.gather(*map(answer, prompts, sampling, adapters, priorities)))

    async def _generate(
        self,
        text: str | None,
        prompt: list[int],
        sampling: EngineSamplingParams,
        adapter: Adapter | None,
        priority: int,
    ) -> RequestOutput:
        request = Request(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            priority=priority,
            arrival_s=time.monotonic(),
            adapter=adapter,
            speculation=self._speculation.params_of(DEFAULT_CLASS),
        )
        outputs = [CompletionOutput(index=index) for index in range(sampling.n)]
        num_cached_tokens = 0
        prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
        async with self._engine.submit(request) as stream:
            async for output in stream:
                num_cached_tokens = max(num_cached_tokens, output.num_cached_tokens)
                prompt_logprobs = output.prompt_logprobs or prompt_logprobs
                for delta in output.deltas:
                    outputs[delta.index]._add(delta, self.tokenizer)
        return RequestOutput(
            request_id=request.request_id,
            prompt=text,
            prompt_token_ids=prompt,
            outputs=outputs,
            num_cached_tokens=num_cached_tokens,
            prompt_logprobs=maybe(self._by_tokens, prompt_logprobs),
        )

    def _by_tokens(self, positions: Sequence[PositionLogprobs | None]) -> list[dict[int, Logprob] | None]:
        return [maybe(lambda each: _by_token(each, self.tokenizer), position) for position in positions]


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping) or (prompts and isinstance(prompts[0], int)):
        return [prompts]
    return list(prompts)


def _by_token(found: PositionLogprobs, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """The chosen token, then the likeliest ones."""
    chosen = Logprob(logprob=found.logprob, rank=found.rank, decoded_token=tokenizer.token_text(found.token_id))
    top = {
        token_id: Logprob(logprob=logprob, rank=rank, decoded_token=tokenizer.token_text(token_id))
        for rank, (token_id, logprob) in enumerate(found.top, start=1)
    }
    return {found.token_id: chosen} | top


def _no_progress(_stage: str, _done: int, _total: int) -> None:
    """Loading shows no progress."""
