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
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar

import numpy as np
from rich.console import Console
from rich.progress import Progress

from faser.api.requests.chat_renderer import ChatRenderer
from faser.api.requests.embedding import NO_DRAFTS, Floats, compare, params_of, unit, vector_size
from faser.api.requests.prompts import Source, TokenizationRules, tokenize_all
from faser.config.environment import cache_dir
from faser.config.server import ServerConfig
from faser.config.sources import engine_options
from faser.engine.checkpoints.adapter import read_adapter
from faser.engine.checkpoints.source import resolve, resolve_adapter
from faser.engine.client.async_engine import AsyncEngine
from faser.engine.text.tokenizer import Tokenizer, load_tokenizer
from faser.errors import ModelError, RequestError
from faser.optional import maybe, or_else
from faser.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    Logprob,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    by_token,
)
from faser.sampling_params import PoolingParams, SamplingParams
from faser.types.adapter import Adapter
from faser.types.answer import PositionLogprobs
from faser.types.engine import ModelInfo
from faser.types.pooling import Pooling
from faser.types.request import DEFAULT_CLASS, Request
from faser.types.sampling import SamplingParams as EngineSamplingParams

_log = logging.getLogger("faser")

_T = TypeVar("_T")

Sampling = SamplingParams | EngineSamplingParams
Prompt = Any  # text, token ids, {"prompt": text} or {"prompt_token_ids": ids}
Message = Mapping[str, Any]


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

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        lora_request: Lora = None,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """Return the vector of each prompt, of length 1 unless the checkpoint or use_activation says otherwise.

        truncate_prompt_tokens: as in PoolingParams. The other arguments are those of `generate`.
        Raises RequestError if a prompt or its parameters cannot be served.
        """
        found = self.encode(
            prompts,
            pooling_params,
            truncate_prompt_tokens=truncate_prompt_tokens,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
        )
        return [each.with_outputs(EmbeddingOutput(embedding=each.outputs.data.tolist())) for each in found]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        lora_request: Lora = None,
        pooling_task: str | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the vectors that `embed` returns, as arrays. pooling_task: "embed", the only one."""
        if pooling_task not in (None, "embed"):
            raise RequestError(
                f"pooling_task is {pooling_task!r}; FASER makes one vector of a text: embed", param="pooling_task"
            )
        params, embedder = pooling_params or PoolingParams(), self.info.embedder
        size = vector_size(embedder, self.info.hidden_size, params.dimensions)
        truncate = or_else(truncate_prompt_tokens, params.truncate_prompt_tokens)
        sources = [_source(each) for each in _as_batch(prompts)]
        found = self._pool(sources, Pooling(kind=embedder.kind), truncate, use_tqdm, lora_request)
        if not found:
            return []
        vectors = np.stack([each.outputs for each in found])[:, :size]
        if or_else(params.use_activation, embedder.normalises):
            vectors = unit(vectors)
        return [each.with_outputs(PoolingOutput(data=vector)) for each, vector in zip(found, vectors, strict=True)]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        lora_request: Lora = None,
        chat_template: str | None = None,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """Return how well each text of data_2 fits data_1, which is one text, or one for each of data_2.

        The score is the probability that a model that judges says yes, and for other models the cosine of two
        vectors. chat_template: of the prompt of a judge. The other arguments are those of `embed`.
        """
        params = pooling_params or PoolingParams()
        if params.dimensions is not None:
            raise RequestError("dimensions is for embed and encode; scores compare whole vectors")
        first, second = ([each] if isinstance(each, str) else list(each) for each in (data_1, data_2))
        if len(first) not in (1, len(second)):
            raise RequestError(
                f"data_1 has {len(first)} texts and data_2 {len(second)}; data_1 must be one text, or as many"
            )
        if not second:
            return []
        truncate = or_else(truncate_prompt_tokens, params.truncate_prompt_tokens)
        renderer = ChatRenderer(self.tokenizer, chat_template)
        compared = compare(self.info.embedder, renderer, first, second, truncate=truncate)
        special = compared.adds_special_tokens
        found = self._pool(
            compared.texts, compared.pooling, truncate, use_tqdm, lora_request, add_special_tokens=special
        )
        vectors = np.stack([each.outputs for each in found])
        scores = compared.scores(vectors, activated=params.use_activation is not False)
        outputs = [ScoringOutput(score=score) for score in scores.tolist()]
        if compared.judges:
            return [each.with_outputs(output) for each, output in zip(found, outputs, strict=True)]
        queries = found[: len(first)] * (len(second) if len(first) == 1 else 1)
        pairs = zip(queries, found[len(first) :], outputs, strict=True)
        return [
            replace(
                document.with_outputs(output),
                prompt_token_ids=query.prompt_token_ids + document.prompt_token_ids,
                num_cached_tokens=query.num_cached_tokens + document.num_cached_tokens,
            )
            for query, document, output in pairs
        ]

    def classify(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse vLLM's classification by name."""
        raise RequestError("LLM.classify is not supported: FASER has no classifiers; score compares texts")

    def reward(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse vLLM's reward models by name."""
        raise RequestError("LLM.reward is not supported: FASER has no reward models")

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
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return running.result()
        finally:
            running.cancel()  # after Ctrl-C it would go on

    def _read(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The text, if there is one, and its token ids."""
        text, ids = _parts(prompt)
        return text, self.tokenizer.encode(text or "") if ids is None else ids

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
        sampling = self._sampling(sampling_params, len(prompts))
        priorities = [0] * len(prompts) if priority is None else priority
        if len(priorities) != len(prompts):
            raise RequestError(f"{len(priorities)} priorities for {len(prompts)} prompts; give one per prompt")
        adapters = self._adapters_of(lora_request, len(prompts))
        works = [
            partial(self._generate, *prompt, params, adapter, level)
            for prompt, params, adapter, level in zip(prompts, sampling, adapters, priorities, strict=True)
        ]
        return self._await(self._all(works, [params.n for params in sampling], use_tqdm))

    def _adapters_of(self, lora_request: Lora, count: int) -> list[Adapter | None]:
        """Return the adapter of each prompt."""
        several = [lora_request] * count if isinstance(lora_request, LoRARequest | None) else lora_request
        if len(several) != count:
            raise RequestError(f"{len(several)} adapters for {count} prompts; give one, or one per prompt")
        return [maybe(self._adapter, each) for each in several]

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

    async def _all(
        self, works: Sequence[Callable[[], Awaitable[_T]]], num_samples: Sequence[int], use_tqdm: bool
    ) -> list[_T]:
        """Do all works, as many at a time as the engine has room for. num_samples: of the request of each work."""
        with Progress(console=Console(stderr=True), disable=not (use_tqdm and sys.stderr.isatty())) as bar:
            task = bar.add_task("prompts", total=len(works))
            room = self._config.max_num_seqs + self._config.max_num_queued_reqs
            free, turn = asyncio.Semaphore(room), asyncio.Lock()

            async def answer(work: Callable[[], Awaitable[_T]], needed: int) -> _T:
                needed = min(needed, room)  # more are refused by the engine
                async with turn:
                    for _ in range(needed):
                        await free.acquire()
                try:
                    answered = await work()
                finally:
                    for _ in range(needed):
                        free.release()
                bar.advance(task)
                return answered

            answers = [asyncio.ensure_future(each) for each in map(answer, works, num_samples)]
            try:
                return list(await asyncio.gather(*answers))
            finally:
                for each in answers:  # where one fails the others would go on
                    each.cancel()

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
                    outputs[delta.index].add(delta, self.tokenizer)
        return RequestOutput(
            request_id=request.request_id,
            prompt=text,
            prompt_token_ids=prompt,
            outputs=outputs,
            num_cached_tokens=num_cached_tokens,
            prompt_logprobs=maybe(self._by_tokens, prompt_logprobs),
        )

    def _by_tokens(self, positions: Sequence[PositionLogprobs | None]) -> list[dict[int, Logprob] | None]:
        return [maybe(lambda each: by_token(each, self.tokenizer), position) for position in positions]

    def _pool(
        self,
        sources: Sequence[Source],
        pooling: Pooling,
        truncate: int | None,
        use_tqdm: bool,
        lora_request: Lora,
        *,
        add_special_tokens: bool = True,
    ) -> list[PoolingRequestOutput[Floats]]:
        """Return the vector of each text, as the engine computes it."""
        limit = self.info.max_model_len
        rules = TokenizationRules(
            limit=limit,
            field="prompts",
            add_special_tokens=add_special_tokens,
            truncate=limit if truncate == -1 else truncate,
            keeps_start=True,
        )
        prompts = tokenize_all(sources, self.tokenizer, rules)
        works = [
            partial(self._pool_one, prompt.token_ids, params_of(pooling, prompt.second_from), adapter)
            for prompt, adapter in zip(prompts, self._adapters_of(lora_request, len(prompts)), strict=True)
        ]
        return self._await(self._all(works, [1] * len(works), use_tqdm))

    async def _pool_one(
        self, token_ids: tuple[int, ...], sampling: EngineSamplingParams, adapter: Adapter | None
    ) -> PoolingRequestOutput[Floats]:
        request = Request(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=token_ids,
            sampling=sampling,
            arrival_s=time.monotonic(),
            adapter=adapter,
            speculation=NO_DRAFTS,
        )
        vector, num_cached_tokens = b"", 0
        async with self._engine.submit(request) as stream:
            async for output in stream:
                num_cached_tokens = max(num_cached_tokens, output.num_cached_tokens)
                vector = output.pooled or vector
        return PoolingRequestOutput(
            request_id=request.request_id,
            outputs=np.frombuffer(vector, np.float32),
            prompt_token_ids=list(token_ids),
            num_cached_tokens=num_cached_tokens,
        )


def _parts(prompt: Prompt) -> tuple[str | None, list[int] | None]:
    """Return the text and the token ids of a prompt; the token ids count where both are there."""
    if not isinstance(prompt, Mapping):
        return (prompt, None) if isinstance(prompt, str) else (None, list(prompt))
    if unknown := sorted(set(prompt) - {"prompt", "prompt_token_ids"}):
        raise RequestError(f"the prompt has the key {unknown[0]!r}; FASER reads prompt and prompt_token_ids")
    if not prompt:
        raise RequestError("the prompt is an empty dict; it needs the key prompt or prompt_token_ids")
    return prompt.get("prompt"), maybe(list, prompt.get("prompt_token_ids"))


def _source(prompt: Prompt) -> str | list[int]:
    text, token_ids = _parts(prompt)
    return or_else(token_ids, text or "")


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping) or (prompts and isinstance(prompts[0], int)):
        return [prompts]
    return list(prompts)


def _no_progress(_stage: str, _done: int, _total: int) -> None:
    """Loading shows no progress."""
