"""An engine on a graph runner with asynchronous scheduling, on the emulated device of test_graph_runner.

Oracle: the same requests on an eager runner, a step at a time. Products of other numbers of rows may round another
way, and a token may then be another one, as on a real device. So nearly all of the answers have to be the same: a
wrong step would change nearly all of them.
"""

from pathlib import Path

import pytest

from faser.engine.control.clock import WallClock
from faser.engine.control.kv_cache import KvManager
from faser.engine.control.scheduler import Scheduler
from faser.engine.engine import Engine
from faser.engine.execution.model_executor import ModelExecutor
from faser.engine.execution.runner.batch import BlockTable
from faser.engine.execution.runner.graph_sizes import GraphSizes
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.sampler import Sampler
from faser.types import Request, SamplingParams
from tests.checkpoints import VOCAB_SIZE
from tests.engine.execution.runner.test_graph_runner import (
    BLOCK_SIZE,
    MAX_LOGIT_ROWS,
    MAX_ROWS,
    NUM_BLOCKS,
    WIDTH,
    Side,
    write_heads_of_64,
    write_recurrent,
)

SLOTS, NUM_TOKENS = 4, 14
SIZES = GraphSizes(rows=(2, 4, 8), max_sequences=SLOTS, max_blocks_each=WIDTH)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_heads_of_64(tmp_path_factory.mktemp("heads-of-64"))


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with gated delta nets."""
    return write_recurrent(tmp_path_factory.mktemp("recurrent"))


def engine_over(side: Side, runner: Runner, *, schedules_async: bool) -> Engine:
    sampler = Sampler(SLOTS, VOCAB_SIZE, (2,), side.backend.sampling_kernels)
    executor = ModelExecutor(
        runner, sampler, BlockTable(SLOTS, WIDTH), max_logit_rows=MAX_LOGIT_ROWS, samples_in_runner=schedules_async
    )
    scheduler = Scheduler(
        kv=KvManager(NUM_BLOCKS, BLOCK_SIZE, enable_prefix_caching=not side.decoder.spec.has_states),
        max_num_seqs=SLOTS,
        max_num_batched_tokens=MAX_ROWS,
        max_model_len=BLOCK_SIZE * WIDTH,
        eos_token_ids=(2,),
        clock=WallClock(),
    )
    return Engine(scheduler, executor, schedules_async=schedules_async)


def answers(engine: Engine, count: int = 9, num_tokens: int = NUM_TOKENS) -> dict[str, list[int]]:
    """Of more requests than there are slots; every third one draws, every fourth is penalised and has to wait."""
    for i in range(count):
        engine.add(
            Request(
                request_id=str(i),
                prompt_token_ids=tuple(range(5 + i, 12 + 2 * i)),
                sampling=SamplingParams(
                    temperature=0.7 * (i % 3 == 0),
                    top_k=20 * (i % 2),
                    presence_penalty=0.5 * (i % 4 == 3),
                    max_tokens=num_tokens,
                    ignore_eos=True,
                    seed=i,
                ),
                arrival_s=float(i),
            )
        )
    said: dict[str, list[int]] = {}
    while engine.has_work():
        for delta in engine.step():
            assert delta.error is None, delta.error
            said.setdefault(delta.request_id, []).extend(delta.token_ids)
    assert engine.stats().kv_usage == 0.0
    return said


@pytest.mark.parametrize("model", ["checkpoint", "recurrent"])
def test_answers_are_those_of_an_engine_that_calls_kernel_after_kernel(
    model: str, request: pytest.FixtureRequest
) -> None:
    checkpoint: Path = request.getfixturevalue(model)
    eager, replayed = Side(checkpoint), Side(checkpoint)
    wanted = answers(engine_over(eager, eager.eager(), schedules_async=False))

    found = answers(engine_over(replayed, replayed.graph_runner(SIZES), schedules_async=True))

    assert {name: len(token_ids) for name, token_ids in found.items()} == dict.fromkeys(wanted, NUM_TOKENS)
    assert sum(found[name] == wanted[name] for name in wanted) >= len(wanted) - 2
