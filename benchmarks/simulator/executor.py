"""SimulatedExecutor: times come from a cost model, drafts and acceptance from recorded traces.

Owns which trace each slot follows and how far it is. A request's first prompt token is its number; its output is
1, 2, 3, … whatever is drafted, and a wrong drafted token is 0. So the scheduler's own checks hold.

    output position p        0   1   2   3   4
    output token             1   2   3   4   5
    draft at p = 1, run 2        2   3   0   0       two accepted and the recovered token: 2, 3, 4
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from benchmarks.simulator.co_run import InterferenceTable
from benchmarks.simulator.trace import RequestTrace, Trace
from faser.config.speculation import PASS_METHODS
from faser.engine.contract.drafts import METHOD_IDS, Drafts, empty_table
from faser.engine.contract.plan import DrafterCheck, DraftPlan, SequenceRows, StepPlan, StepResult, StopRule
from faser.engine.contract.step_times import Role
from faser.engine.control.step_cost import CostModel

WRONG = 0
_CATCHES_UP = "draft_model"  # the only one with a KV cache of its own


@dataclass(slots=True)
class _Playback:
    """A slot's request. num_tokens: known tokens. covered: known tokens in the draft KV cache.

    seen: tokens in the draft KV cache, drafted ones included; 0 without a draft. by_model: what the model drafts,
    where trace is of drafts from text; None: trace is of all drafts.
    """

    trace: RequestTrace
    prompt_len: int
    num_tokens: int
    by_model: RequestTrace | None = None
    covered: int = 0
    seen: int = 0

    @property
    def position(self) -> int:
        """Output tokens so far, in the trace. After its end the trace repeats from 1: 0 comes with the prompt."""
        done, recorded = self.num_tokens - self.prompt_len, self.trace.output_len
        return done if done < recorded else min(1, recorded - 1) + (done - recorded) % max(recorded - 1, 1)

    def continued(self, num_unverified: int) -> "_Playback":
        """Continue with num_unverified more known tokens; those that the draft model drafted are in its cache."""
        if not num_unverified:
            return self
        known = self.num_tokens + num_unverified
        return replace(self, num_tokens=known, covered=min(max(self.seen, self.covered), known - 1))

    def modelled(self) -> "_Playback":
        """Return the same place in the trace of what the model drafts."""
        assert self.by_model is not None, "there is no trace of what the model drafts"
        return replace(self, trace=self.by_model)


class SimulatedExecutor:
    """costs: the true times. noise: sigma of the logarithm of every time's factor.

    lanes: how concurrent steps and drafting slow each other down, by share. model_methods: of the traces of what a
    model drafts, where plans say which drafts are from text. draft_share: of a mixture: a draft row reads as many
    new experts as this share of a row of another sequence.
    """

    def __init__(
        self,
        trace: Trace,
        costs: CostModel,
        *,
        lanes: tuple[InterferenceTable, ...] = (),
        noise: float = 0.0,
        seed: int = 0,
        model_methods: tuple[str, ...] = (),
        draft_share: float = 1.0,
    ) -> None:
        self._model_methods = model_methods
        self._lanes = {each.share: each for each in lanes}
        self._methods = trace.methods
        self._costs = costs
        self._draft_share = draft_share
        self._noise = noise
        self._random = np.random.default_rng(seed)
        self._expected: dict[int, tuple[RequestTrace, RequestTrace | None]] = {}
        self._slots: dict[int, _Playback] = {}

    def expect(self, number: int, trace: RequestTrace, by_model: RequestTrace | None = None) -> None:
        """The request whose first prompt token is `number` behaves like this one. by_model: see _Playback."""
        self._expected[number] = trace, by_model

    def num_right(self, slot: int) -> int:
        """Return how many of the tokens that this slot would draft next continue its output."""
        state = self._slots[slot]
        return state.trace.runs[state.position]

    def forget(self, number: int) -> None:
        """That request has ended."""
        del self._expected[number]

    def draft(self, plan: DraftPlan, *, during: StepPlan | None = None) -> Drafts:  # noqa: ARG002
        """Drafts that continue unverified tokens follow the trace if those tokens are right."""
        slots = [self._slots[request.slot] for request in plan.requests]
        states = [
            slot.continued(len(request.unverified)) for slot, request in zip(slots, plan.requests, strict=True)
        ]
        names = self._methods
        if self._model_methods and not plan.from_text:
            names, states = self._model_methods, [each.modelled() for each in states]
        methods = [names[each.trace.methods[each.position]] for each in states]
        lengths = [
            min(request.max_tokens, state.trace.lengths[state.position])
            for request, state in zip(plan.requests, states, strict=True)
        ]
        by_passes = [i for i, method in enumerate(methods) if method in PASS_METHODS and lengths[i] > 0]
        run_s = self._costs.text_s(sum(method not in PASS_METHODS for method in methods))
        passes, caught_up = 0, 0
        if by_passes:
            rows = sum(_first_pass_rows(states[i], methods[i]) for i in by_passes)
            caught_up = rows - len(by_passes)
            most = np.array([lengths[i] for i in by_passes])
            output = _draft_output(plan.stop, [states[i] for i in by_passes], most)
            for i, length, fed in zip(by_passes, output.lengths.tolist(), output.fed.tolist(), strict=True):
                lengths[i] = length
                slots[i].seen = states[i].num_tokens + fed
            passes = len(output.rows) + 1
            run_s += sum(self._costs.pass_s(count) for count in (rows, *output.rows))
        table = empty_table([request.slot for request in plan.requests], names[0], plan.width)
        table.methods[:] = [METHOD_IDS[method] for method in methods]
        table.lengths[:] = lengths
        for at, (request, state, length) in enumerate(zip(plan.requests, states, lengths, strict=True)):
            table.token_ids[at, :length] = _drafted(state, length, request.unverified)
            table.confidences[at, :length] = state.trace.confidences[state.position][:length]
        return Drafts(
            step=plan.step,
            table=table,
            run_s=self._noisy(run_s),
            passes=passes,
            catchup_tokens=caught_up,
        )

    def rebuild(self, check: DrafterCheck) -> bool:  # noqa: ARG002
        return False

    def run_overlapped(self, plan: StepPlan, draft_plan: DraftPlan) -> tuple[StepResult, Drafts]:
        """Both begin at 0 and end with the slower one."""
        assert draft_plan.share is not None, "overlapped drafting needs a share of the processors"
        drafts = self.draft(draft_plan)
        result = self.run(plan)
        context = plan.kv_tokens / max(len(plan.rows), 1)
        both_s = self._lanes[draft_plan.share].one(result.run_s, drafts.run_s, rows=plan.num_rows, context=context)
        return replace(result, run_s=both_s), replace(drafts, run_s=min(drafts.run_s, both_s))

    def run(self, plan: StepPlan) -> StepResult:
        for slot in plan.released:
            self._slots.pop(slot, None)
        for start in plan.started:
            trace, by_model = self._expected[start.token_ids[0]]
            self._slots[start.slot] = _Playback(
                trace=trace,
                by_model=by_model,
                prompt_len=start.prompt_len,
                num_tokens=len(start.token_ids),
            )
        run_s = self._costs.step_s(plan.num_rows, plan.kv_tokens, plan.kv_row_tokens)
        read, less_s = self._experts(plan)
        run_s -= less_s
        sampled = [self._verify(rows) for rows in plan.rows]
        return StepResult(
            step=plan.step,
            counts=[*map(len, sampled)],
            token_ids=[*chain.from_iterable(sampled)],
            run_s=self._noisy(run_s),
            experts=read,
        )

    def _experts(self, plan: StepPlan) -> tuple[int, float]:
        """The experts that the step reads, and seconds for those of the costs that it does not."""
        costs = self._costs.tables[Role.STEP].experts
        if costs is None:
            return 0, 0.0
        others, drafts = plan.num_rows - plan.num_drafts - 1, plan.num_drafts
        read = round(costs.read(costs.row_share * (others + self._draft_share * drafts)))
        return read, costs.expert_s * (costs.read(costs.row_share * (others + drafts)) - read)

    def _verify(self, rows: SequenceRows) -> range:
        """The tokens that the step samples for one sequence."""
        if not rows.samples:
            return range(0)
        slot = self._slots[rows.slot]
        first = slot.num_tokens - slot.prompt_len + 1
        draft = rows.token_ids[len(rows.token_ids) - rows.num_drafts :]
        accepted = 0
        while accepted < len(draft) and draft[accepted] == first + accepted:
            accepted += 1
        slot.num_tokens += accepted + 1
        if slot.seen:
            slot.covered = min(slot.seen, slot.num_tokens - 1)
            slot.seen = slot.seen if slot.seen > slot.num_tokens and accepted == len(draft) else 0
        return range(first, first + accepted + 1)

    def _noisy(self, seconds: float) -> float:
        if not self._noise or not seconds:
            return seconds
        return seconds * float(self._random.lognormal(0.0, self._noise))


@dataclass(frozen=True, slots=True, kw_only=True)
class _DraftOutput:
    """lengths: [S] tokens drafted. fed: [S] of them that were rows of a pass. rows: of each later pass."""

    lengths: NDArray[np.int64]
    fed: NDArray[np.int64]
    rows: list[int]


def _draft_output(stop: StopRule | None, slots: list[_Playback], most: NDArray[np.int64]) -> _DraftOutput:
    """Pass by pass, the drafts that continue. most: [S] most tokens of each draft, at least 1."""
    if stop is None:
        rows = [int((most > depth).sum()) for depth in range(1, int(most.max()))]
        return _DraftOutput(lengths=most, fed=most - 1, rows=rows)
    survivals = _survival(stop, [slot.trace.confidences[slot.position] for slot in slots], int(most.max()))
    lengths, fed = np.zeros((2, len(slots)), dtype=np.int64)
    going = np.arange(len(slots))
    rows = []
    for depth in range(int(most.max())):
        going = going[survivals[going, depth] > stop.row_price]
        lengths[going] = depth + 1
        going = going[most[going] > depth + 1]
        excess = (survivals[going, depth] - stop.row_price).sum()
        if not len(going) or excess <= stop.pass_prices[len(going) - 1]:
            break
        fed[going] += 1
        rows.append(len(going))
    return _DraftOutput(lengths=lengths, fed=fed, rows=rows)


def _survival(stop: StopRule, confidences: Iterable[tuple[float, ...]], depth: int) -> NDArray[np.float64]:
    """Return the probability [S, depth] that all drafted tokens up to a depth are accepted; 0 beyond a draft."""
    padded = np.array([[*row[:depth], *[-np.inf] * (depth - len(row))] for row in confidences])
    return (1 / (1 + np.exp(-np.clip(stop.intercept + stop.slope * padded, -500, 500)))).cumprod(axis=1)


def _first_pass_rows(slot: _Playback, method: str) -> int:
    """Rows of its first pass: all tokens missing in the draft KV cache, at least the last known one."""
    return slot.num_tokens - slot.covered if method == _CATCHES_UP else 1


def _drafted(slot: _Playback, length: int, unverified: tuple[int, ...]) -> list[int]:
    right = 0 if WRONG in unverified else min(slot.trace.runs[slot.position], length)
    first = slot.num_tokens - slot.prompt_len + 1
    return [*range(first, first + right), *[WRONG] * (length - right)]
