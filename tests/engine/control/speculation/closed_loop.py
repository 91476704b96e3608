"""A closed loop around a policy: i.i.d. acceptance, times from a table, everything else the real thing."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from faser.config.speculation import SpeculationConfig
from faser.engine.contract.drafts import METHOD_IDS, DraftTable
from faser.engine.contract.plan import StopRule
from faser.engine.contract.step_times import CostTable, Role, StepTimes
from faser.engine.control.speculation.acceptance import Acceptance, with_dropped
from faser.engine.control.speculation.policies import make_policy
from faser.engine.control.speculation.policy import Candidates
from faser.engine.control.step_cost import CostModel
from faser.types.arrays import Floats, Ints
from tests.engine.control.speculation.building import candidates, full, table
from tests.engine.control.speculation.python_acceptance import outcomes
from tests.native_acceptance import native_acceptance

CAP = 8
RIGHT, WRONG = 0, 1  # token ids: the target always chooses RIGHT
STEPS = {
    "flat": CostTable(rows=(1, 256, 512), seconds=(0.020, 0.021, 0.022)),
    "linear": CostTable(rows=(1, 2), seconds=(0.020, 0.040)),
    "bend": CostTable(rows=(1, 16, 32, 64, 128, 1024), seconds=(0.020, 0.020, 0.022, 0.036, 0.070, 0.56)),
}
PASS = CostTable(rows=(1, 256), seconds=(0.002, 0.004))
TEXT = CostTable(rows=(1, 64), seconds=(1e-5, 2e-4))
CONFIDENCE = {"draft_model": 2.0, "suffix": 0.6}  # the same for every token: it tells nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """rate: tokens a second. lengths: mean drafted tokens a sequence of each step."""

    rate: float
    lengths: Floats


def cost_model(shape: str, method: str) -> CostModel:
    drafting = {Role.PASS: PASS} if method == "draft_model" else {Role.TEXT: TEXT}
    return CostModel(StepTimes(tables={Role.STEP: STEPS[shape], **drafting}))


def fixed_rate(costs: CostModel, alpha: float, count: int, gamma: int) -> float:
    """Tokens a second of a fixed draft length, in closed form."""
    lengths = np.full(count, gamma)
    seconds = costs.step_s(count * (gamma + 1)) + costs.draft_s(lengths, np.zeros_like(lengths))
    return count * sum(alpha**k for k in range(gamma + 1)) / seconds


def run(
    policy_name: str, costs: CostModel, alpha: Callable[[int], float], count: int, *, steps: int, seed: int = 0
) -> Loop:
    """count sequences, alpha(step) the acceptance of every token."""
    method = "draft_model" if costs.has_passes else "suffix"
    by_model = costs.has_passes
    acceptance = native_acceptance(count, CAP)
    policy = make_policy(
        SpeculationConfig(method=method, policy=policy_name, num_speculative_tokens=CAP), costs, acceptance
    )
    rng = np.random.default_rng(seed)
    seconds, tokens, drafted_mean = 0.0, 0, np.zeros(steps)
    all_slots = np.arange(count)
    for step in range(steps):
        before = _candidates(all_slots, acceptance, count, by_model=by_model)
        requested = policy.lengths(before)
        chosen = np.flatnonzero(requested)
        tokens += count
        if not len(chosen):
            seconds += costs.step_s(count)
            continue
        asked = _candidates(chosen, acceptance, count, by_model=by_model)
        lengths = requested[chosen]
        stop = policy.stop_rule(asked, lengths)
        drafted, passes, draft_s = _draft(costs, stop, lengths, CONFIDENCE[method])
        good = (rng.random((len(chosen), CAP)) < alpha(step)).cumprod(axis=1).sum(axis=1)
        drafts = _drafts(chosen, method, drafted, good)
        survival = acceptance.drafted_survival(drafts)
        kept = policy.keep(asked.drafted(drafted, survival), drafted)
        accepted = np.minimum(good, kept)
        seconds += draft_s + costs.step_s(count + int(kept.sum()))
        tokens += int(accepted.sum())
        drafted_mean[step] = drafted.sum() / count
        if stop is None:
            acceptance.note_drafts(chosen, lengths, drafted, survival, by_model=by_model)
        else:
            tried, known = with_dropped(drafted, lengths, survival, passes=passes, row_price=stop.row_price)
            acceptance.note_drafts(chosen, tried, tried, known, by_model=by_model)
        last_ids = np.full_like(accepted, RIGHT)
        acceptance.learn(outcomes(drafts, kept, accepted, last_ids))
    return Loop(rate=tokens / seconds, lengths=drafted_mean)


def _drafts(slots: Ints, method: str, lengths: Ints, good: Ints) -> DraftTable:
    """Drafts whose first `good` tokens are those that the target chooses. lengths, good: [S]."""
    count = len(slots)
    token_ids = np.where(np.arange(CAP) < good[:, None], RIGHT, WRONG)
    confidences = np.full((count, CAP), CONFIDENCE[method])
    return table(slots, full(count, METHOD_IDS[method]), lengths, confidences, token_ids)


def _candidates(slots: Ints, acceptance: Acceptance, count: int, *, by_model: bool) -> Candidates:
    others = count - len(slots)
    return candidates(
        acceptance.survival(slots, by_model=by_model), slots=slots, other_rows=others, other_sequences=others
    )


def _draft(costs: CostModel, stop: StopRule | None, lengths: Ints, margin: float) -> tuple[Ints, int, float]:
    """What a drafter makes of the rule, as StopRule says: tokens of each draft, passes and seconds."""
    if stop is None:
        return lengths, int(lengths.max()), costs.draft_s(lengths, np.zeros_like(lengths))
    drafted, survival = np.zeros_like(lengths), np.ones(len(lengths))
    going, passes, seconds = np.arange(len(lengths)), 0, 0.0
    while len(going):
        passes += 1
        seconds += costs.pass_s(len(going))
        survival[going] /= 1 + np.exp(-(stop.intercept + stop.slope * margin))
        going = going[survival[going] > stop.row_price]
        drafted[going] += 1
        going = going[drafted[going] < lengths[going]]
        if len(going) and (survival[going] - stop.row_price).sum() <= stop.pass_prices[len(going) - 1]:
            break
    return drafted, passes, seconds
