"""EngineSource: an AnswerSource whose answers come from an engine in this process."""

import asyncio
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from faser.cli.console.progress import ProgressReporter
from faser.config.engine import EngineConfig
from faser.distill.questions import Answer, OnAnswer
from faser.engine.client.async_engine import AsyncEngine
from faser.engine.text.tokenizer import Tokenizer
from faser.types import FinishReason, Request, SamplingParams


class EngineSource:
    """Loads the model on entry, frees it on exit. Prompts wait here beyond what the engine's queue holds."""

    def __init__(
        self, config: EngineConfig, directory: Path, tokenizer: Tokenizer, report: ProgressReporter
    ) -> None:
        self._engine = AsyncEngine(config, directory, tokenizer, transport="thread", on_progress=report)
        self._at_once = config.max_num_seqs + min(config.max_num_queued_reqs, config.max_num_seqs)
        self._runner = asyncio.Runner()
        self._answering: asyncio.Task[list[Answer]] | None = None

    def answer(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams], on_answer: OnAnswer
    ) -> list[Answer]:
        """Raises RequestError for a prompt longer than the context, EngineError if the engine dies."""
        return self._runner.run(self._answer_all(prompts, sampling, on_answer))

    def __enter__(self) -> Self:
        """Raises ConfigError if the model cannot be served."""
        try:
            self._runner.run(self._load())
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        self._runner.run(self._stop())
        self._runner.close()

    async def _stop(self) -> None:
        if self._answering is not None and not self._answering.done():  # SIGTERM has left it behind
            self._answering.cancel()
            await asyncio.gather(self._answering, return_exceptions=True)
        await self._engine.stop()

    async def _load(self) -> None:
        await self._engine.start()
        await self._engine.wait_ready()

    async def _answer_all(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams], on_answer: OnAnswer
    ) -> list[Answer]:
        self._answering = asyncio.current_task()
        free = asyncio.Semaphore(self._at_once)

        async def answer(prompt: Sequence[int], params: SamplingParams) -> Answer:
            async with free:
                found = await self._one(prompt, params)
            on_answer(len(found.token_ids))
            return found

        work = [asyncio.ensure_future(answer(*each)) for each in zip(prompts, sampling, strict=True)]
        try:
            return list(await asyncio.gather(*work))
        finally:
            for each in work:
                each.cancel()
            await asyncio.gather(*work, return_exceptions=True)

    async def _one(self, prompt: Sequence[int], sampling: SamplingParams) -> Answer:
        request = Request(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            arrival_s=time.monotonic(),
        )
        token_ids: list[int] = []
        texts: list[str] = []
        finish = None
        async with self._engine.submit(request) as stream:
            async for output in stream:
                for delta in output.deltas:
                    token_ids += delta.token_ids
                    texts.append(delta.text)
                    finish = delta.finish_reason
        return Answer(token_ids=tuple(token_ids), text="".join(texts), ended=finish is FinishReason.STOP)
