"""Native estimates. Oracle: PythonAcceptance, given the same random steps; then whole simulated engines.

Planted bugs that these tests have caught: a cut token that is not compared with the bonus token; a draft not taken
that teaches beyond the sampled tokens; requests that sample without their shift; one that does not teach in the
curve; the offset of the slot before; the last of equal drafts is taken; what is held of a released slot is kept; a
tie in worth that goes to the later sequence; one more token than the best number is verified; the price of a
row is ignored; where no token exceeds it the first draft is taken.
"""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks.exactness.decisions_hash import Condition, Kind, scenario_hash
from faser.config.speculation import PASS_METHODS
from faser.engine.contract.drafts import DraftTable
from faser.engine.contract.native_acceptance import SampledStep
from faser.engine.control.speculation.acceptance import Acceptance
from faser.engine.control.speculation.draft_lengths import best_prefixes
from faser.engine.control.speculation.step_drafts import StepDrafts
from faser.kernels.cpu.acceptance import CompiledAcceptance
from faser.kernels.cpu.text_index import text_library
from faser.types.arrays import Ints
from tests.engine.control.speculation.building import answer, step_drafts
from tests.engine.control.speculation.python_acceptance import PythonAcceptance

CAP, NUM_SLOTS, VOCAB = 6, 12, 3
ARRAYS = ("offset", "precision", "shift", "shift_precision", "own", "all")


class Twins:
    """Both, and the random steps that they are given."""

    def __init__(self, seed: int, kernel_cache: Path) -> None:
        self.rng = np.random.default_rng(seed)
        make_native = partial(CompiledAcceptance, text_library(kernel_cache))
        self.native = Acceptance(NUM_SLOTS, CAP, make_native)
        self.python = Acceptance(NUM_SLOTS, CAP, PythonAcceptance)

    def both(self) -> tuple[Acceptance, Acceptance]:
        return self.native, self.python

    def drafts(self, slots: Ints, methods: Ints) -> DraftTable:
        lengths = self.rng.integers(0, CAP + 1, len(slots)) * self.rng.integers(0, 2, len(slots))
        beyond = np.arange(CAP) >= lengths[:, None]
        token_ids = np.where(beyond, -1, self.rng.integers(0, VOCAB, (len(slots), CAP)))
        confidences = self.rng.choice([0.2, 0.5, 0.8, 1.0, 4.0], (len(slots), CAP))
        return DraftTable(slots, methods, lengths, token_ids, np.where(beyond, 0.0, confidences))

    def slots(self) -> Ints:
        return self.rng.permutation(NUM_SLOTS)[: self.rng.integers(1, NUM_SLOTS + 1)]

    def sampled(self, table: DraftTable, kept: Ints) -> SampledStep:
        """What a step could sample: of each draft some verified tokens, then any token. Some sequences fail."""
        slots, counts, token_ids = table.slots.tolist(), [], []
        for at, most in enumerate(kept.tolist()):
            right = int(self.rng.integers(0, most + 1))
            count = 0 if self.rng.random() < 0.1 else right + 1
            counts.append(count)
            token_ids += [*table.token_ids[at, :right].tolist(), int(self.rng.integers(VOCAB))][:count]
        order = self.rng.permutation(len(slots))
        ends = np.cumsum(counts)
        parts = [token_ids[ends[i] - counts[i] : ends[i]] for i in order.tolist()]
        told = [-1 if self.rng.random() < 0.1 else slots[i] for i in order.tolist()]
        return SampledStep(told, [counts[i] for i in order.tolist()], [token for part in parts for token in part])

    def text_step(self) -> None:
        """Look-ups of two methods, some sequences left to a model, and what the step makes of it."""
        slots, num_methods = self.slots(), 2
        count = len(slots)
        methods = np.repeat(np.arange(num_methods) + len(PASS_METHODS), count)
        looked = self.drafts(np.tile(slots, num_methods), methods)
        notes, row_price = bool(self.rng.random() < 0.5), float(self.rng.choice([0.0, 0.4, 0.7, 1.0]))
        limit = self.rng.integers(1, CAP + 1, count)
        asked = step_drafts(looked, limit).candidates
        steps = [StepDrafts(sequences=[], lengths=limit, candidates=asked) for _ in range(2)]
        left = np.where(self.rng.random(count) < 0.2, 1, 0)
        by_model = left.nonzero()[0]
        modelled = self.drafts(slots[by_model], np.zeros(len(by_model), dtype=np.int64))
        kept = self.rng.random(count)
        for step, acceptance in zip(steps, self.both(), strict=True):
            step.take_text(answer(looked), acceptance, notes=notes, row_price=row_price)
            step.by_model = by_model
            for column, of_model in zip(step.table, modelled, strict=True):
                column[by_model] = of_model
            step.kept = (kept * (step.table.lengths + 1)).astype(np.int64)
        native, python = steps
        assert native.taken.tolist() == python.taken.tolist()
        assert native.survival == pytest.approx(python.survival, rel=1e-12)
        for one, other in zip(native.table, python.table, strict=True):
            assert one.tolist() == other.tolist()
        sampled = self.sampled(python.table, python.kept)
        judged = [step.judge(acceptance, sampled) for step, acceptance in zip(steps, self.both(), strict=True)]
        assert judged[0].tolist() == judged[1].tolist()

    def model_step(self) -> None:
        """Drafts of a model, drawn or made during the step before, some of whose rows the step gives up."""
        slots = self.slots()
        drawn, num_decided = bool(self.rng.random() < 0.3), 0
        table = self.drafts(slots, np.zeros(len(slots), dtype=np.int64))
        if not drawn and table.lengths.all():
            num_decided = 1
        kept = self.rng.integers(0, table.lengths - num_decided + 1)
        num_cut = self.rng.integers(0, kept + 1)
        verified = table if not num_decided else table._replace(token_ids=np.roll(table.token_ids, -1, axis=1))
        sampled = self.sampled(verified, kept - num_cut)
        for acceptance in self.both():
            step = step_drafts(table, kept, num_decided=num_decided, is_drawn=drawn)
            step.judge(acceptance, sampled, num_cut)

    def step(self) -> None:
        match int(self.rng.integers(8)):
            case 0:
                slot, teaches, samples = int(self.rng.integers(NUM_SLOTS)), *self.rng.random(2)
                for acceptance in self.both():
                    acceptance.release(slot)
                    acceptance.start(slot, teaches=teaches < 0.7, samples=samples < 0.4)
            case 1:
                for acceptance in self.both():
                    acceptance.learn_held()
            case 2 | 3:
                self.model_step()
            case _:
                self.text_step()

    def check(self) -> None:
        for acceptance in self.both():
            acceptance.learn_held()
        for name in ARRAYS:
            one, other = (getattr(each, f"_{name}") for each in self.both())
            assert one == pytest.approx(other, rel=1e-10, abs=1e-12), name
        for one, other in zip(self.native._curves, self.python._curves, strict=True):
            assert one._weights == pytest.approx(other._weights, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.full(but=("0",))
def test_a_thousand_random_steps_leave_both_with_the_same_choices_and_estimates(
    seed: int, kernel_cache: Path
) -> None:
    twins = Twins(seed, kernel_cache)
    for number in range(1000):
        twins.step()
        if number % 5 == 0:
            twins.check()


@pytest.mark.parametrize("seed", range(40))
def test_as_many_tokens_are_verified_as_python_says(seed: int, kernel_cache: Path) -> None:
    """Few kinds of survival, so that many tokens are worth the same."""
    rng = np.random.default_rng(seed)
    acceptance = Acceptance(NUM_SLOTS, CAP, partial(CompiledAcceptance, text_library(kernel_cache)))
    count = int(rng.integers(1, 20))
    survival = np.cumprod(rng.choice([0.5, 0.8, 1.0], (count, CAP + 1)), axis=1)
    lengths = rng.integers(0, CAP + 1, count)
    least = np.minimum(rng.integers(0, CAP + 1, count), lengths) if seed % 2 else None
    seconds = 1.0 + np.cumsum(rng.choice([0.0, 0.05, 0.3], count * CAP + 1))
    kept, rate = acceptance.native.best_prefixes(survival, least, lengths, seconds, float(count))

    class Given:
        worth = float(count)

        def verify_upto_s(self, most: int) -> object:
            return seconds[: most + 1]

    found = best_prefixes(Given(), survival, lengths, least=least)  # type: ignore[arg-type]
    assert kept.tolist() == found.lengths.tolist()
    assert rate == found.rate


@pytest.mark.parametrize(
    "kind",
    [
        ("suffix", "faser", None, None, "serial"),
        ("auto", "faser", None, 0.05, "serial"),
        ("draft_model", "faser", None, 0.05, "auto"),
        ("auto", "faser", None, 0.05, "on"),
    ],
    ids=str,
)
@pytest.mark.parametrize("condition", [(0.7, 8, 0.5, 0.0), (0.9, 32, 0.5, 0.1)], ids=str)
def test_whole_engines_take_the_same_steps(kind: Kind, condition: Condition, kernel_cache: Path) -> None:
    make_native = partial(CompiledAcceptance, text_library(kernel_cache))
    python = scenario_hash(kind, condition, make_native=PythonAcceptance)
    assert scenario_hash(kind, condition, make_native=make_native) == python
