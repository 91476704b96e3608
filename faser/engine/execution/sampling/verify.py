"""Verification: which draft tokens are accepted, and the token that follows them, given the target's logits.

Sample and match, for drafts that are point masses and for greedy requests: every row's token is sampled with the
noise of its position, as it would be without speculation, and the draft is accepted up to the first token that
differs. A draft token x is then accepted with probability p(x), and the token that takes its place has the
distribution p without x, which is rejection sampling (arXiv:2211.17192) against a point mass: the maximal coupling
of the two. Beyond the distribution, the tokens themselves are those of an engine that never drafts: γ, the drafter
and every shortened draft change the time they take and nothing else. The configuration calls it `coupled`.

Drafts that were drawn from distributions are verified in `rejection.py`. Synthetic acceptance is here too.
"""

import logging
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from faser.config.speculation import SpeculationConfig
from faser.engine.execution.sampling.rejection import Block, Rejection
from faser.engine.execution.sampling.rows import DraftLayout, LogitRows, StepTokens
from faser.engine.execution.sampling.sampler import Sampler
from faser.types.answer import SequenceError
from faser.types.arrays import NO_TOKEN, Bools, Ints

_log = logging.getLogger("faser")


class Verifier(Protocol):
    """Accepts or rejects the drafts of a whole step at once."""

    def verify(self, logits: Tensor, layout: DraftLayout, draft_probs: Tensor | None) -> StepTokens:
        """The tokens of every sequence. Leaves the sampler's state as it was; the caller accepts the tokens.

        logits: [R, V] float32; overwritten. draft_probs: [T, V] float64, the distribution each drafted token was
        sampled from; None for point masses.
        """
        ...


def make_verifier(config: SpeculationConfig, sampler: Sampler) -> Verifier:
    """The verifier of rejection_sample_method, for drafts made by draft_sample_method.

    Drafts that are not probabilistic are point masses. Of those, block verification accepts in expectation exactly
    what SampleAndMatch accepts, and only SampleAndMatch leaves the tokens untouched too, so both methods get it.
    """
    method, sampled = config.rejection_sample_method, config.draft_sample_method == "probabilistic"
    match method:
        case "synthetic":
            _log.warning(
                "rejection_sample_method is synthetic: drafted tokens are accepted at rates %s whatever the model "
                "says, so the OUTPUT IS NOT THE MODEL'S; for benchmarks only",
                config.synthetic_acceptance_rates,
            )
            return Synthetic(sampler, config.synthetic_acceptance_rates)
        case "block" if sampled:
            return Block(sampler)
        case "standard" if sampled:
            return Rejection(sampler)
        case "standard" | "block":
            if method == "block":
                _log.info("drafts are greedy, so block verification accepts what the standard method accepts")
            return SampleAndMatch(sampler)
        case _:
            raise AssertionError(f"rejection_sample_method is {method}, which the configuration refuses")


class SampleAndMatch:
    """Verifier of point masses; draft_probs must be None. It samples every step without drafts."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    @torch.inference_mode()
    def verify(self, logits: Tensor, layout: DraftLayout, draft_probs: Tensor | None) -> StepTokens:
        assert draft_probs is None, "sampled drafts are not point masses"
        rows = self._sampler.rows(logits, layout)
        if not rows.layout.num_drafts.any():
            return rows.results(rows.layout.first, rows.tokens())
        token_ids = rows.tokens() if _is_cheap(rows) else _tokens_as_far_as_accepted(rows)
        last = rows.layout.last_reached(accepted(token_ids, rows.layout.drafted))
        return rows.results(last, token_ids[last])


def _is_cheap(rows: LogitRows) -> bool:
    """Return whether sampling all rows at once costs less than sampling some of them in several calls.

    True where all are greedy, and off the CPU, where every call waits for the device.
    """
    return rows.logits.device.type != "cpu" or not rows.is_random.any()


def _tokens_as_far_as_accepted(rows: LogitRows) -> Ints:
    """Return sampled tokens [R]; NO_TOKEN after a rejection, where a token would not be used.

    All first rows are sampled together, then the second rows of the sequences whose first draft token was
    accepted, and so on.
    """
    layout = rows.layout
    token_ids = np.full(len(layout.drafted), NO_TOKEN, dtype=np.int64)
    going = layout.first
    while len(going):
        token_ids[going] = rows.tokens_of(going)
        going = going[accepted(token_ids[going], layout.drafted[going])] + 1
    return token_ids


def accepted(token_ids: Ints, drafted: Ints) -> Bools:
    """Return whether each row's draft token is the sampled one: [R]. A row without a token accepts nothing."""
    same: Bools = (token_ids == drafted) & (drafted != NO_TOKEN)
    return same


def matched(layout: DraftLayout, token_ids: Ints, decided: Bools | None = None) -> StepTokens:
    """Sample and match, from the sampled tokens of all rows, where nothing else is asked for.

    token_ids: [R], NO_TOKEN where logits are not numbers. decided: [R] whether each row's draft token is accepted,
    whatever was sampled there; None: if it is the sampled one.

    drafted     x_1  x_2  x_3
    sampled     x_1  x_2  y    z      the result is the slice of `sampled` that ends with the first token
                first     last        that is not the draft token, or after the whole draft
    """
    last = layout.last_reached(accepted(token_ids, layout.drafted) if decided is None else decided)
    if decided is not None:
        sampled, token_ids = token_ids[last], layout.drafted.copy()
        token_ids[last] = sampled
    failed = token_ids[last] == NO_TOKEN
    counts = last - layout.first + ~failed
    return StepTokens(
        counts=counts.tolist(),
        token_ids=token_ids[layout.depth < counts[layout.sequence]].tolist(),
        errors=dict.fromkeys(failed.nonzero()[0].tolist(), SequenceError.NOT_FINITE),
    )


class Synthetic:
    """Accepts draft tokens at given rates, whatever the logits are: for cost curves. The output is not the
    model's.

    The work is real: the rows run, and the final token of a step is sampled from the target's logits.
    rates: the i-th is the probability that the first i + 1 draft tokens are all accepted; 0 after the last.
    """

    def __init__(self, sampler: Sampler, rates: tuple[float, ...]) -> None:
        self._sampler = sampler
        unconditional = np.array([1.0, *rates, 0.0])
        before = unconditional[:-1]
        self._rates = np.where(before > 0, unconditional[1:] / np.where(before > 0, before, 1.0), 0.0)

    @torch.inference_mode()
    def verify(self, logits: Tensor, layout: DraftLayout, _draft_probs: Tensor | None) -> StepTokens:
        rows = self._sampler.rows(logits, layout)
        last = layout.last_reached(self.decided(layout))
        return rows.results(last, rows.tokens_of(last))

    def decided(self, layout: DraftLayout) -> Bools:
        """Return whether each row's draft token is accepted: [R]. Neither the tokens nor the logits matter."""
        noise = self._sampler.accept_noise(layout)
        found: Bools = noise < self._rates[np.minimum(layout.depth, len(self._rates) - 1)]
        return found


def decided_by(verifier: Verifier, layout: DraftLayout) -> Bools | None:
    """Return as `matched` takes it. A verifier of another kind than these reads more than sampled tokens."""
    return (
        verifier.decided(layout)
        if isinstance(verifier, Synthetic) and len(layout.first) < layout.num_rows
        else None
    )


def needs_only_samples(verifier: Verifier) -> bool:
    """Return whether it verifies drafts by `matched`."""
    return isinstance(verifier, SampleAndMatch | Synthetic)
