"""A server that refreshes its head, whole: engine, traffic, learner process, swap.

Oracle: the answers before the swap, and those of an engine without drafts.

Planted bug that these tests have caught: the learner is not stopped when a request comes.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from faser.config.engine import EngineConfig
from faser.engine.client.async_engine import AsyncEngine
from faser.engine.client.head_refresh import HeadRefresher, LearnerProcess, RefreshSettings
from faser.engine.contract.messages import Configure, FromLearner, LearningRules
from faser.engine.text.tokenizer import load_tokenizer
from faser.metrics.server import Metrics
from faser.types import Request, SamplingParams
from tests.distill.beginner import markov_target, write_beginner
from tests.engine.client.test_head_refresh import FakeLearner
from tests.engine.test_head_engine import WIDTH

RULES = LearningRules(epochs=6, rows=128, rate=5e-3, warm_up=2)
PROMPTS = [(3 + at, (7 * at) % WIDTH, 5) for at in range(80)]


def write_alphabet(directory: Path) -> None:
    """A tokenizer whose tokens are WIDTH bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:WIDTH]
    core = tokenizers.Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.save(str(directory / "tokenizer.json"))


@asynccontextmanager
async def serving(
    model: Path, metrics: Metrics, refresher: HeadRefresher | None, **settings: Any
) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(
        config(model, **settings),
        model,
        load_tokenizer(model),
        transport="thread",
        metrics=metrics,
        refresher=refresher,
    )
    await engine.start()
    try:
        await engine.wait_ready()
        yield engine
    finally:
        await engine.stop()


def config(model: Path, **settings: Any) -> EngineConfig:
    chosen: dict[str, Any] = {
        "model": str(model),
        "device": "cpu",
        "backend": "torch",
        "num_threads": 1,
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "kv_cache_memory": 4 << 20,
    }
    return EngineConfig(**chosen | settings)


def asked(at: int, salt: str | None = None) -> Request:
    sampling = SamplingParams(temperature=0.7 * (at % 4 == 3), max_tokens=16, ignore_eos=True, seed=at)
    return Request(request_id=uuid.uuid4().hex, prompt_token_ids=PROMPTS[at], sampling=sampling, cache_salt=salt)


async def answers(engine: AsyncEngine, *, salt: str | None = None, count: int = len(PROMPTS)) -> list[list[int]]:
    """Sampled and greedy ones in turn."""

    async def one(at: int) -> list[int]:
        async with engine.submit(asked(at, salt)) as stream:
            return [token async for output in stream for delta in output.deltas for token in delta.token_ids]

    return await asyncio.gather(*(one(at) for at in range(count)))


def accepted_tokens(engine: AsyncEngine) -> int:
    assert engine.stats.speculation is not None
    return sum(each.accepted for each in engine.stats.speculation.methods)


def refreshes(metrics: Metrics) -> float:
    (line,) = (
        each
        for each in metrics.render().decode().splitlines()
        if each.startswith("faser_head_refreshes_total") and 'outcome="accepted"' in each
    )
    return float(line.rpartition(" ")[2])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(240):
        while not condition():
            await asyncio.sleep(0.05)


@pytest.mark.full
def test_a_head_learns_from_traffic_and_drafts_better_for_those_who_share_it(tmp_path: Path) -> None:
    model, target = markov_target(tmp_path)
    write_alphabet(model)
    head = write_beginner(tmp_path / "first", target)
    (tmp_path / "heads").mkdir()
    drafting = {"policy": "fixed", "num_speculative_tokens": 3, "method": "eagle3", "model": str(head)}

    async def scenario() -> None:
        metrics = Metrics(model_name="tiny", max_model_len=128)
        settings = config(model, speculative_config=drafting)
        refresher = HeadRefresher(
            partial(LearnerProcess, Configure(settings, str(model))),
            tmp_path / "heads",
            metrics.head_refresh,
            RefreshSettings(least_tokens=400, moment_s=0.05, rules=RULES),
        )
        async with serving(model, metrics, refresher, speculative_config=drafting) as engine:
            before = await answers(engine)
            first = accepted_tokens(engine)
            await until(lambda: refreshes(metrics) == 1)
            after = await answers(engine)
            second = accepted_tokens(engine) - first
            salted = await answers(engine, salt="mine", count=20)
            third = accepted_tokens(engine) - first - second
        async with serving(model, metrics, None, speculative_config={"policy": "off"}) as engine:
            plain = await answers(engine)
        assert before == after == plain
        assert salted == plain[:20]
        assert second > 2 * first
        assert third < 0.5 * second * 20 / len(PROMPTS), "a salted request is drafted for by the first head"

    asyncio.run(scenario())


def test_the_engine_and_a_learner_never_compute_at_the_same_time(tmp_path: Path) -> None:
    model, target = markov_target(tmp_path)
    write_alphabet(model)
    drafting = {"method": "eagle3", "model": str(write_beginner(tmp_path / "first", target))}
    learners: list[FakeLearner] = []

    def start(take: Callable[[FromLearner], None], lose: Callable[[str], None]) -> FakeLearner:
        learners.append(FakeLearner(take, lose))
        return learners[-1]

    async def scenario() -> None:
        metrics = Metrics(model_name="tiny", max_model_len=128)
        settings = RefreshSettings(least_tokens=1, moment_s=0.05)
        refresher = HeadRefresher(start, tmp_path, metrics.head_refresh, settings)
        async with serving(model, metrics, refresher, speculative_config=drafting) as engine:
            await answers(engine, count=4)
            await until(lambda: bool(learners))
            (learner,) = learners
            assert learner.runs
            async with engine.submit(asked(5)) as stream:
                assert not learner.runs
                async for _ in stream:
                    assert not learner.runs
            await until(lambda: learner.runs)
            engine.submit(asked(6)).close()
            assert not learner.runs, "an aborted request leaves the engine work for a step"
            await until(lambda: learner.runs)
        assert learner.killed

    asyncio.run(scenario())
