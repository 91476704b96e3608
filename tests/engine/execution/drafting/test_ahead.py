"""Drafts that are launched behind steps in flight, on an emulated device: the same answers, and no waits.

Oracle: the same requests on an engine that reads every step before it drafts. Products of other numbers of rows
may round another way, so nearly all answers have to be the same; a wrong step would change nearly all of them.
"""

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from faser.config.speculation import SpeculationConfig
from faser.engine.contract.step_times import StepTimes
from faser.engine.control.clock import SimulatedClock
from faser.engine.control.kv_cache import KvManager
from faser.engine.control.scheduler import Scheduler
from faser.engine.control.speculation.control import SpeculationControl
from faser.engine.control.step_cost import CostModel
from faser.engine.engine import Engine
from faser.engine.execution.drafting.draft_model import DraftKvCache
from faser.engine.execution.drafting.registry import DrafterParts, DraftModelParts, make_drafter
from faser.engine.execution.model_executor import ModelExecutor, SpeculativeExecution
from faser.engine.execution.runner.batch import BlockTable
from faser.engine.execution.runner.graph_runner import GraphRunner
from faser.engine.execution.runner.graph_sizes import GraphSizes
from faser.engine.execution.sampling.sampler import Sampler
from faser.engine.execution.sampling.verify import make_verifier
from faser.kernels.cuda.flashinfer.backend import FlashInferBackend
from faser.kernels.cuda.triton.drafting import advance, match
from faser.types.request import Request
from faser.types.sampling import SamplingParams
from tests.checkpoints import VOCAB_SIZE
from tests.engine.execution.runner.test_graph_runner import (
    BLOCK_SIZE,
    MAX_LOGIT_ROWS,
    MAX_ROWS,
    NUM_BLOCKS,
    WIDTH,
    Side,
    write_heads_of_64,
)
from tests.kernels.cuda.fake_device import FakeAccelerator, FakeGraphRecorder
from tests.kernels.cuda.fake_graph import fake_kernels
from tests.kernels.cuda.flashinfer.fake_flashinfer import FakeFlashInfer
from tests.native_acceptance import make_native

SLOTS, CAP = 4, 3
TARGET_SIZES = GraphSizes(rows=(4, 8, 16), max_sequences=SLOTS, max_blocks_each=WIDTH)
DRAFT_SIZES = GraphSizes(rows=(1, 2, 4, 8), max_sequences=2 * SLOTS, max_blocks_each=WIDTH)


@dataclass
class Watched(FakeAccelerator):
    """log: replays by their recorder, and waits (None) for work that was not known to be done, with its number."""

    log: list[tuple[object, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.on_replay = self._replayed

    def _replayed(self, recorder: FakeGraphRecorder) -> None:
        self.log.append((recorder, self.given))

    def reach(self, number: int) -> None:
        if number > self.done:
            self.log.append((None, number))
        super().reach(number)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    accelerator: Watched
    target: GraphRunner
    drafter: GraphRunner


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """With Triton's own `match` and `advance`, in its interpreter."""
    accelerator = Watched()
    kernels = replace(
        fake_kernels(accelerator),
        match=lambda step: accelerator.launch(partial(match, step)),
        advance=lambda *given: accelerator.launch(partial(advance, *given)),
    )
    backend = FlashInferBackend(accelerator, FakeFlashInfer(accelerator), kernels)
    target: Path = write_heads_of_64(tmp_path_factory.mktemp("target"))
    drafter = write_heads_of_64(tmp_path_factory.mktemp("drafter"), noise=0.01)
    return World(
        accelerator=accelerator,
        target=Side(target, backend).graph_runner(TARGET_SIZES),
        drafter=Side(drafter, backend.concurrent_instance()).graph_runner(DRAFT_SIZES, drafts=True),
    )


def engine_of(
    world: World, *, ahead: bool, policy: str = "fixed", num_blocks: int = NUM_BLOCKS, **config: Any
) -> Engine:
    speculation = SpeculationConfig(
        model="beside", method="draft_model", policy=policy, num_speculative_tokens=CAP, **config
    )
    table = BlockTable(SLOTS, WIDTH)
    sampler = Sampler(SLOTS, VOCAB_SIZE, (2,), world.target.sampling_kernels)
    kv = DraftKvCache(table, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    model = DraftModelParts(runner=world.drafter, kv=kv, max_positions=BLOCK_SIZE * WIDTH)
    parts = DrafterParts(
        table=table, sampling=sampler.state, max_rows=MAX_ROWS, model=model, samples_in_runner=True
    )
    control = SpeculationControl(
        speculation,
        CostModel(StepTimes.proportional(step_s=0.01, pass_s=1e-5, text_s=1e-7)),
        make_native=make_native,
        num_slots=SLOTS,
        clock=SimulatedClock(),
    )
    executor = ModelExecutor(
        world.target,
        sampler,
        table,
        max_logit_rows=MAX_LOGIT_ROWS,
        speculation=SpeculativeExecution(
            drafter=make_drafter(speculation, parts), verifier=make_verifier(speculation, sampler), draft_kv=kv
        ),
        samples_in_runner=True,
    )
    scheduler = Scheduler(
        kv=KvManager(num_blocks, BLOCK_SIZE),
        max_num_seqs=SLOTS,
        max_num_batched_tokens=MAX_ROWS,
        max_model_len=BLOCK_SIZE * WIDTH,
        eos_token_ids=(2,),
        clock=SimulatedClock(),
        speculation=control,
    )
    return Engine(scheduler, executor, schedules_async=ahead)


def requests(seed: int, count: int, *, common: int) -> Iterator[Request]:
    """Of several lengths, some of them drawn, some that end at a token. common: tokens that half begin with."""
    rng = random.Random(seed)
    for i in range(count):
        prompt = [*range(5, 5 + rng.choice((0, common))), *rng.choices(range(VOCAB_SIZE), k=rng.randint(1, 5))]
        yield Request(
            request_id=str(i),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(
                temperature=0.7 * (i % 3 == 0),
                max_tokens=rng.randint(1, 30),
                ignore_eos=rng.random() < 0.5,
                stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), 6)) if rng.random() < 0.4 else (),
                seed=i,
            ),
            arrival_s=float(i),
        )


def answers(engine: Engine, asked: list[Request], *, seed: int = 0, aborts: float = 0.0) -> dict[str, list[int]]:
    """They come at random steps; some are aborted at random ones."""
    rng, waiting = random.Random(seed), [*asked]
    said: dict[str, list[int]] = defaultdict(list)
    while waiting or engine.has_work():
        while waiting and (not engine.has_work() or rng.random() < 0.3):
            engine.add(waiting.pop(0))
        for delta in engine.step():
            assert delta.error is None, delta.error
            said[delta.request_id] += delta.token_ids
        if rng.random() < aborts:
            engine.abort(rng.choice(asked).request_id)
    assert engine.stats().kv_usage == 0.0
    return said


def waits_before_drafts(world: World) -> list[int]:
    """Between each verification and the drafts behind it: waits for what was launched with it or since."""
    mine, theirs = (recorder_of(each) for each in (world.target, world.drafter))
    found: list[int] = []
    launched, waits = None, 0
    for recorder, number in world.accelerator.log:
        if recorder is None:
            waits += launched is not None and number > launched
        elif recorder is mine and launched is None:
            launched, waits = number, 0
        elif recorder is theirs and launched is not None:
            found.append(waits)
            launched = None
    return found


def recorder_of(runner: GraphRunner) -> object:
    graphs = runner._graphs
    assert graphs is not None
    return graphs._capture._recorder  # type: ignore[attr-defined]


def accepted(engine: Engine) -> float:
    """Share of the verified draft tokens."""
    stats = engine.stats().speculation
    assert stats is not None
    return sum(each.accepted for each in stats.methods) / sum(each.verified for each in stats.methods)


@pytest.mark.parametrize("policy, common", [("fixed", BLOCK_SIZE + 2), ("faser", BLOCK_SIZE - 6)])
@pytest.mark.full(but=("faser-10",))
def test_answers_are_those_of_an_engine_that_reads_each_step_before_it_drafts(
    world: World, policy: str, common: int
) -> None:
    """Sequences end at tokens, at their length and by aborts, and newcomers take their slots. The drafts are as
    good as if the host had known what they follow."""
    asked = [*requests(1, 7, common=common)]
    reading, following = (engine_of(world, ahead=ahead, policy=policy) for ahead in (False, True))
    wanted, found = answers(reading, asked), answers(following, asked, aborts=0.03)
    matching = [name for name in wanted if found[name] == wanted[name][: len(found[name])]]
    assert len(matching) >= len(wanted) - 1
    assert accepted(following) > 0.8 * accepted(reading) > 0.4


def together(max_tokens: int) -> list[Request]:
    """Two requests that begin at once, one greedy and one drawn."""
    return [
        Request(
            request_id=str(i),
            prompt_token_ids=(5, 6 + i, 7),
            sampling=SamplingParams(temperature=0.7 * i, max_tokens=max_tokens, ignore_eos=True, seed=i),
            arrival_s=float(i),
        )
        for i in range(2)
    ]


def said_together(engine: Engine, asked: list[Request]) -> dict[str, list[int]]:
    for each in asked:
        engine.add(each)
    return answers(engine, asked[:0])


def test_acceptance_at_given_rates_is_that_of_an_engine_that_reads_each_step(world: World) -> None:
    """Draft tokens are then parts of the answer, so these are the same only if all drafts are."""
    config: dict[str, Any] = {
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": (0.8, 0.5, 0.3),
    }
    reading, following = (engine_of(world, ahead=ahead, **config) for ahead in (False, True))
    assert said_together(following, together(40)) == said_together(reading, together(40))
    assert accepted(following) == accepted(reading)


def test_nothing_waits_between_a_verification_and_the_drafts_behind_it(world: World) -> None:
    asked = together(24)
    engine = engine_of(world, ahead=True)
    for each in asked:
        engine.add(each)
    engine.step()
    engine.step()
    world.accelerator.log.clear()
    while engine.has_work():
        engine.step()
    waits = waits_before_drafts(world)
    assert waits == [0] * len(waits)
    assert len(waits) >= 24 // (CAP + 1) - 1

    reading = engine_of(world, ahead=False)
    for each in asked:
        reading.add(each)
    world.accelerator.log.clear()
    while reading.has_work():
        reading.step()
    assert min(waits_before_drafts(world)) > 0


def test_a_draft_that_has_no_room_left_is_made_once_the_step_has_ended(world: World) -> None:
    """A sequence that fills its context, in a pool without a spare block; blocks that are freed are used again."""
    engine = engine_of(world, ahead=True, num_blocks=WIDTH + 2)
    asked = [
        Request(
            request_id=str(i),
            prompt_token_ids=tuple(range(5, 5 + BLOCK_SIZE * (WIDTH - 1) + 2 - 20 * i)),
            sampling=SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True),
            arrival_s=float(i),
        )
        for i in range(2)
    ]
    wanted = answers(engine_of(world, ahead=False, num_blocks=WIDTH + 2), asked)
    assert answers(engine, asked) == wanted
