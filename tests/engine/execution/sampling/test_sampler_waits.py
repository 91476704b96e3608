"""How often a step with edits asks, and so waits for, a device on which its tokens are chosen.

Oracle: the same rows sampled one by one. Bugs these tests have been seen to catch: rows looked at
before they are edited, two questions for greedy and random rows, a row that a mask hides, reasons that were mixed
up.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from faser.engine.contract.plan import SequenceStart
from faser.engine.execution.sampling.kernels import TorchSamplingKernels
from faser.engine.execution.sampling.sampler import Sampler
from faser.kernels.interface.sampling import SamplingMetadata
from faser.types.answer import SequenceError
from faser.types.arrays import Floats, Ints, Words
from faser.types.sampling import SamplingParams
from tests.engine.execution.sampling.sampled import outcomes, plain_rows, sample

WIDTH = 30
READS = {Tensor.tolist, Tensor.item, Tensor.numpy, Tensor.cpu, Tensor.__bool__, Tensor.__int__, Tensor.__float__}
ASKED = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, top_k=4, presence_penalty=0.5),
    SamplingParams(temperature=0.0, logit_bias=((3, 5.0),), logprobs=2),
    SamplingParams(temperature=1.2, allowed_token_ids=(3, 9, 11)),
    SamplingParams(temperature=0.0, allowed_token_ids=(4,), min_tokens=5, stop_token_ids=(4,)),
    SamplingParams(temperature=0.7, repetition_penalty=1.4, logprobs=0),
)


class Reads(TorchFunctionMode):
    """names: of what brought a tensor's values to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in READS:
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Asked:
    """SamplingKernels that counts questions, whatever the answer takes."""

    def __init__(self) -> None:
        self.questions: list[str] = []
        self._choice = TorchSamplingKernels()

    def best(self, logits: Tensor) -> Ints:
        self.questions.append("best")
        return self._choice.best(logits)

    def best_and_margin(self, logits: Tensor) -> tuple[Ints, Floats]:
        self.questions.append("best_and_margin")
        return self._choice.best_and_margin(logits)

    def take(self, logits: Tensor, metadata: SamplingMetadata, noise: Words) -> Ints:
        self.questions.append("take")
        return self._choice.take(logits, metadata, noise)

    def draw(self, logits: Tensor, rows: Ints, best: Ints, metadata: SamplingMetadata, noise: Words) -> Ints:
        self.questions.append("draw")
        return self._choice.draw(logits, rows, best, metadata, noise)

    def predict(
        self,
        logits: Tensor,
        rows: Ints,
        best: Ints,
        metadata: SamplingMetadata,
        noise: Words,
        token_ids: Ints | None = None,
    ) -> tuple[Ints, Floats]:
        self.questions.append("predict")
        return self._choice.predict(logits, rows, best, metadata, noise, token_ids)

    def fixed_point_probs(self, logits: Tensor, rows: Ints, best: Ints, metadata: SamplingMetadata) -> None:
        self.questions.append("fixed_point_probs")
        self._choice.fixed_point_probs(logits, rows, best, metadata)

    def philox(self, counters: Words, keys: Words) -> Words:
        return self._choice.philox(counters, keys)


def started(sampler: Sampler) -> Sampler:
    for slot, sampling in enumerate(ASKED):
        start = SequenceStart(slot=slot, sampling=sampling, seed=slot, prompt_len=3, token_ids=(5, 6, 9))
        sampler.start(start)
    return sampler


def some_logits(seed: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((len(ASKED), WIDTH))).float()


SLOTS, POSITIONS = range(len(ASKED)), [3] * len(ASKED)


def test_nothing_is_read_while_rows_are_edited() -> None:
    choice = Asked()
    sampler = started(Sampler(len(ASKED), WIDTH, (), choice))
    with Reads() as reads:
        sampler.rows(some_logits(0), plain_rows(SLOTS, POSITIONS))
    assert (reads.names, choice.questions) == ([], [])


def test_greedy_and_random_rows_with_edits_are_one_question() -> None:
    choice = Asked()
    sampler = started(Sampler(len(ASKED), WIDTH, (), choice))
    sample(sampler, some_logits(1), SLOTS, POSITIONS)
    assert choice.questions == ["take"]


def test_tokens_and_errors_are_those_of_rows_that_are_sampled_one_by_one() -> None:
    """Rows that are no numbers among them: those that an edit would hide, and one that asks for none."""
    bad = (torch.nan, torch.inf, -torch.inf)
    for seed in range(24):
        logits = some_logits(seed)
        row = seed % len(ASKED)
        logits[row, 7 if seed % 4 < 2 else slice(None)] = bad[seed % 3]
        sampler = started(Sampler(len(ASKED), WIDTH, ()))
        found = sample(sampler, logits.clone(), SLOTS, POSITIONS)
        for slot in SLOTS:
            rows = sampler.rows(logits[slot : slot + 1].clone(), plain_rows([slot], [3]))
            at = np.zeros(1, dtype=np.int64)
            (alone,) = outcomes(rows.results(at, rows.tokens_of(at)))
            assert found[slot].error == alone.error
            assert alone.token_ids == (() if alone.error else (found[slot].token_id,))
        is_bad = not bool(logits[row].amax().isfinite())
        assert (found[row].error is SequenceError.NOT_FINITE) == is_bad
        assert found[4].error is SequenceError.NONE_ALLOWED or (row == 4 and is_bad)
