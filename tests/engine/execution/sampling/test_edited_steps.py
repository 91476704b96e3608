"""Engines on the emulated device of test_graphs whose requests ask for more than their logits.

Oracle: the same engine without kernels for that, whose sampler edits and whose verifier judges by tensors. Both
replay the same recordings, so the answers are the same, token by token. Planted bugs that these tests have caught:
kernels that are not asked, of the sampler and of the verifier; a request's seed forgotten.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from faser.config.speculation import SpeculationConfig
from faser.engine.contract.plan import SequenceDelta
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
from faser.engine.execution.runner.graphs import GraphSizes
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.sampler import Sampler
from faser.engine.execution.verifiers.factory import make_verifier
from faser.kernels.interface.sampling.logits_processor_kernels import LogitsProcessorKernels
from faser.kernels.interface.sampling.rejection_kernels import RejectionKernels
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
)
from tests.kernels.cuda.fake_graph import FakeLogitsProcessorKernels, FakeRejectionKernels

SLOTS, NUM_TOKENS, EOS = 4, 7, (2,)
SIZES = GraphSizes(rows=(4, 12), max_sequences=SLOTS, max_blocks_each=WIDTH)
FEATURES: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logprobs": 2},
    {"presence_penalty": 0.6, "temperature": 0.0},
    {
        "logit_bias": ((40, 4.0), (41, -3.0)),
        "allowed_token_ids": tuple(range(20, 300, 3)),
        "bad_words": ((41,), (44, 47)),
    },
    {"min_tokens": 5, "stop_token_ids": tuple(range(3, 300)), "ignore_eos": False},
)
SAMPLED = SpeculationConfig(
    policy="fixed",
    method="draft_model",
    model="beside",
    num_speculative_tokens=3,
    draft_sample_method="probabilistic",
)

GREEDY = pytest.param(replace(SAMPLED, draft_sample_method="greedy"), marks=pytest.mark.slow)


@dataclass(frozen=True)
class Device:
    side: Side
    runner: GraphRunner
    drafter: Runner


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Device:
    checkpoint = write_heads_of_64(tmp_path_factory.mktemp("heads-of-64"))
    side = Side(checkpoint)
    return Device(side, side.graph_runner(SIZES), Side(checkpoint).eager())


def engine_on(
    device: Device,
    config: SpeculationConfig | None,
    edits: LogitsProcessorKernels | None,
    verdicts: RejectionKernels | None,
) -> Engine:
    """edits, verdicts: None: by tensor operations."""
    table, clock = BlockTable(SLOTS, WIDTH), SimulatedClock()
    sampler = Sampler(SLOTS, VOCAB_SIZE, EOS, "cpu", device.side.backend.sampling_kernels, edits)
    speculation = control = None
    if config is not None:
        model = DraftModelParts(
            runner=device.drafter,
            kv=DraftKvCache(table, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE),
            max_positions=BLOCK_SIZE * WIDTH,
        )
        parts = DrafterParts(table=table, sampling=sampler.state, max_rows=MAX_ROWS, model=model)
        verifier = make_verifier(config, sampler, verdicts)
        speculation = SpeculativeExecution(drafter=make_drafter(config, parts), verifier=verifier)
        costs = CostModel(StepTimes.proportional(step_s=0.01, pass_s=1e-5, text_s=1e-7))
        control = SpeculationControl(config, costs, num_slots=SLOTS, clock=clock)
    executor = ModelExecutor(
        device.runner,
        sampler,
        table,
        max_logit_rows=MAX_LOGIT_ROWS,
        speculation=speculation,
        samples_in_runner=True,
    )
    scheduler = Scheduler(
        kv=KvManager(NUM_BLOCKS, BLOCK_SIZE),
        max_num_seqs=SLOTS,
        max_num_batched_tokens=MAX_ROWS,
        max_model_len=BLOCK_SIZE * WIDTH,
        eos_token_ids=EOS,
        clock=clock,
        speculation=control,
    )
    return Engine(scheduler, executor, schedules_async=True)


def answers(engine: Engine) -> dict[str, list[object]]:
    """One request for each feature, and one that asks for nothing."""
    for i, features in enumerate((*FEATURES, {})):
        sampling = SamplingParams(**{"max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": i} | features)
        prompt = tuple(range(5 + i, 12 + 2 * i))
        engine.add(Request(request_id=str(i), prompt_token_ids=prompt, sampling=sampling, arrival_s=float(i)))
    said: dict[str, list[object]] = {}
    for delta in steps(engine):
        assert delta.error is None, delta.error
        said.setdefault(delta.request_id, []).extend(
            zip(delta.token_ids, delta.logprobs or delta.token_ids, strict=True)
        )
    return said


def steps(engine: Engine) -> Iterator[SequenceDelta]:
    while engine.has_work():
        yield from engine.step()
    assert engine.stats().kv_usage == 0.0


@pytest.mark.parametrize("config", [None, SAMPLED, GREEDY], ids=("plain", "sampled", "greedy"))
def test_answers_are_those_of_an_engine_that_works_by_tensor_operations(
    device: Device, config: SpeculationConfig | None
) -> None:
    fake = device.side.backend.logits_processor_kernels
    verdicts = device.side.backend.rejection_kernels
    assert isinstance(fake, FakeLogitsProcessorKernels)
    assert isinstance(verdicts, FakeRejectionKernels)
    fake.calls = verdicts.calls = 0
    plain = engine_on(device, config, None, None)
    wanted = answers(plain)
    assert (fake.calls, verdicts.calls) == (0, 0)

    engine = engine_on(device, config, fake, verdicts)
    found = answers(engine)

    assert found == wanted
    assert fake.calls > 0
    if config is not None:
        speculated = engine.stats().speculation
        assert speculated is not None
        assert sum(each.accepted for each in speculated.methods) > 0
        assert (verdicts.calls > 0) == (config.draft_sample_method == "probabilistic")
