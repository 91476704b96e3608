"""Engines whose steps are launched ahead, with masks that take several steps, over a runner of a few lines.

Oracle: the same engine, each step after the other, whose masks are there at once: token for token, and score for
score. Time is counted in forwards.

Bugs that these tests have been seen to catch: an output one token old (chosen too early, or before the sampler has
accepted), a late sequence that has rows all the same.
"""

import random
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.engine.contract.plan import SequenceStart
from faser.engine.control.clock import WallClock
from faser.engine.control.kv_cache import KvManager
from faser.engine.control.scheduler import Scheduler
from faser.engine.engine import Engine
from faser.engine.execution.model_executor import ModelExecutor
from faser.engine.execution.runner.batch import BlockTable, RowBatch
from faser.engine.execution.runner.runner import ReadyValues, Runner
from faser.engine.execution.sampling.edits import LogitsEdit, LogitsProcessor, ProcessedRows
from faser.engine.execution.sampling.kernels import TorchSamplingKernels
from faser.engine.execution.sampling.processors import make_logits_processors
from faser.engine.execution.sampling.sampler import Sampler
from faser.engine.execution.sampling.tokens import HostTokenSampler, ReadyTokens
from faser.kernels.interface.sampling import SamplingMetadata
from faser.types.request import Request
from faser.types.sampling import StructuredOutput, StructureKind
from tests.engine.driving import request

VOCAB_SIZE, SLOTS, BLOCK_SIZE, WIDTH = 40, 4, 4, 10
REGEX: dict[str, Any] = {"structured_output": StructuredOutput(kind=StructureKind.REGEX, text="a*")}
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"frequency_penalty": 2.0, "repetition_penalty": 1.5, "temperature": 0.0},
    {"bad_words": tuple((a, b) for a in range(20) for b in range(a % 3, 40, 3)), "logprobs": 1},
    {"logprobs": 3, "min_tokens": 3, "ignore_eos": False},
    {"prompt_logprobs": 0},
    REGEX,
    REGEX | {"temperature": 0.0, "presence_penalty": 1.0, "logprobs": 2},
]


@dataclass
class LastTokenRunner:
    """Logits of a row follow from its token alone. num_forwards: so far."""

    num_forwards: int = 0
    experts_read: int = 0
    token_ids: Tensor = field(default_factory=lambda: torch.zeros(0))
    table: Tensor = field(
        default_factory=lambda: 3 * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    )
    sampler: HostTokenSampler = field(default_factory=lambda: HostTokenSampler(TorchSamplingKernels()))

    def forward(self, batch: RowBatch) -> None:
        self.num_forwards += 1
        self.token_ids = batch.token_ids.clone()
        if batch.feedback is not None:
            fed = batch.feedback.tokens[batch.feedback.sources]
            assert (fed >= 0).all(), "a row is fed by a token that was never chosen"
            self.token_ids[torch.from_numpy(batch.feedback.rows)] = fed

    def logits(self, rows: NDArray[np.int64]) -> Tensor:
        return self.table[self.token_ids[[*rows]]]

    def sample(self, rows: NDArray[np.int64], metadata: SamplingMetadata) -> ReadyTokens:
        return self.sample_from(self.logits(rows), metadata)

    def sample_from(self, logits: Tensor, metadata: SamplingMetadata) -> ReadyTokens:
        return self.sampler.take(logits, metadata)

    def read_back(self, values: Tensor) -> ReadyValues:
        return ReadyValues(values)

    def count_experts(self) -> Any:
        return lambda: 0


class SlowMasks(LogitsProcessor[list[int]]):
    """Allows every third token, which ones depends on all tokens of the output.

    takes: how many forwards a mask takes, of these at random. waits: steps in which a sequence got no token.
    """

    reads_output = True

    def __init__(self, runner: LastTokenRunner, takes: tuple[int, ...], seed: int = 0) -> None:
        super().__init__()
        self._runner = runner
        self._takes = takes
        self._random = random.Random(seed)
        self._due: dict[int, int] = {}
        self.waits = 0

    def start(self, start: SequenceStart) -> None:
        if start.sampling.structured_output is not None:
            self._by_slot[start.slot] = [*start.token_ids[start.prompt_len :]]
            self._begin(start.slot)

    def accept(self, slots: Any, token_ids: Any) -> None:
        for slot, token_id in zip(slots, token_ids, strict=True):
            if slot in self._by_slot:
                assert not self.is_late(slot), "a token without a mask"
                self._by_slot[slot].append(token_id)
                self._begin(slot)

    def _begin(self, slot: int) -> None:
        self._due[slot] = self._runner.num_forwards + self._random.choice(self._takes)

    def is_late(self, slot: int) -> bool:
        return slot in self._by_slot and self._runner.num_forwards < self._due[slot]

    def edit(self, rows: ProcessedRows) -> LogitsEdit | None:
        masked = rows.of(self._by_slot)
        self.without_token = {rows.slots[row]: None for row in masked if self.is_late(rows.slots[row])}
        self.waits += len(self.without_token)
        allowed = np.zeros((len(masked), VOCAB_SIZE), dtype=bool)
        for i, row in enumerate(masked):
            output = self._by_slot[rows.slots[row]]
            if rows.slots[row] not in self.without_token:
                allowed[i, (sum(output) + len(output)) % 3 :: 3] = True

        def edit(logits: Tensor) -> None:
            logits[masked] = logits[masked].masked_fill(~torch.from_numpy(allowed), -torch.inf)

        return edit if masked else None


def make_engine(
    takes: tuple[int, ...], *, ahead: bool, num_blocks: int = 60, seed: int = 0
) -> tuple[Engine, SlowMasks]:
    runner = LastTokenRunner()
    masks = SlowMasks(runner, takes, seed)
    sampler = Sampler(SLOTS, VOCAB_SIZE, (2,), processors=(*make_logits_processors(VOCAB_SIZE, (2,)), masks))
    executor = ModelExecutor(
        cast("Runner", runner), sampler, BlockTable(SLOTS, WIDTH), max_logit_rows=16, samples_in_runner=ahead
    )
    scheduler = Scheduler(
        kv=KvManager(num_blocks, BLOCK_SIZE),
        max_num_seqs=SLOTS,
        max_num_batched_tokens=12,
        max_model_len=BLOCK_SIZE * WIDTH,
        eos_token_ids=(2,),
        clock=WallClock(),
    )
    return Engine(scheduler, executor, schedules_async=ahead), masks


Heard = dict[str, list[Any]]


def step(engine: Engine, heard: Heard) -> list[str]:
    """Whose tokens came."""
    came = []
    for delta in engine.step():
        assert delta.error is None, delta.error
        scores = delta.logprobs or (None,) * len(delta.token_ids)
        heard.setdefault(delta.request_id, []).extend(zip(delta.token_ids, scores, strict=True))
        came += [delta.request_id] * len(delta.token_ids)
    return came


def run(engine: Engine, asked: list[Request], *, most_steps: int = 3000) -> Heard:
    heard: Heard = {}
    for each in asked:
        engine.add(each)
    for _ in range(most_steps):
        if not engine.has_work():
            return heard
        step(engine, heard)
    raise AssertionError(f"{most_steps} steps have not ended everything")


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.full(but=tuple(map(str, range(6))))
def test_masks_that_take_long_change_no_token_whatever_comes_and_goes(seed: int) -> None:
    rng = random.Random(seed)
    asked = [
        request(
            str(i),
            [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 12))],
            **{"max_tokens": rng.randint(3, 20), "seed": i} | rng.choice(KINDS),
        )
        for i in range(14)
    ]
    wanted = run(make_engine((0,), ahead=False)[0], asked)
    engine, _ = make_engine(rng.choice([(0,), (0, 1), (0, 0, 3), (1, 9)]), ahead=True, num_blocks=18, seed=seed)
    heard: Heard = {}
    gone: set[str] = set()
    waiting = list(asked)
    for _ in range(3000):
        while waiting and rng.random() < 0.3:
            engine.add(waiting.pop(0))
        if not waiting and not engine.has_work():
            break
        step(engine, heard)
        if rng.random() < 0.02 and heard:
            gone.add(rng.choice([*heard]))
            engine.abort([*gone][-1])
    else:
        raise AssertionError("some request never ends")
    for name, tokens in wanted.items():
        found = heard.get(name, [])
        assert found == (tokens[: len(found)] if name in gone else tokens), name


@pytest.mark.parametrize("takes", [0, 1, 4])
def test_a_slow_mask_delays_its_own_sequence_by_what_it_takes_and_others_by_nothing(takes: int) -> None:
    """Two steps more than its mask takes: one that brings no token, and one that computes its row again."""
    num_tokens = 6
    engine, masks = make_engine((takes,), ahead=True)
    heard: Heard = {}
    engine.add(request("plain", [5], max_tokens=37))
    engine.add(request("slow", [6], max_tokens=num_tokens, **REGEX))
    came = [step(engine, heard) for _ in range(num_tokens * (takes + 2))]
    assert [each.count("plain") for each in came[:37]] == [1] * min(37, len(came))
    assert sum(each.count("slow") for each in came) == num_tokens
    assert (masks.waits > 0) == (takes > 0)
    assert masks.waits <= num_tokens, "once a token, since a late sequence has no rows"
