"""Recording and checking with the real scheduler and a scripted executor: what is recorded is what a drafter did.

The target's token at output position p of request n is 100 * n + p + 1; the drafter knows it and errs by a rule.
"""

import time
from collections.abc import Callable, Sequence

import pytest

from benchmarks.simulator.draft_recorder import DraftRecorder
from benchmarks.simulator.live import check_live, run_live
from benchmarks.simulator.record import Session, record
from benchmarks.simulator.trace import Trace, iid_trace
from benchmarks.spec_bench.policy_spec import parse_policy
from faser.cli.bench.prompts import BenchPrompt
from faser.config.speculation import SpeculationConfig
from faser.engine.contract.drafts import Drafts
from faser.engine.contract.plan import (
    DrafterCheck,
    DraftPlan,
    DraftRequest,
    LaunchedStep,
    SequenceRows,
    SequenceStart,
    StepPlan,
    StepResult,
)
from faser.engine.contract.step_times import StepTimes
from faser.engine.control.clock import SimulatedClock
from faser.engine.control.kv_cache import KvManager
from faser.engine.control.scheduler import Scheduler
from faser.engine.control.speculation.control import SpeculationControl
from faser.engine.control.step_cost import CostModel
from faser.engine.engine import Engine
from faser.engine.execution.drafting.drafter import Drafter, Proposals, by_slot, drafts_of
from faser.engine.gap_timer import GapTimer
from faser.errors import ConfigError
from faser.types.arrays import Ints
from faser.types.sampling import SamplingParams
from tests.benchmarks.simulator.running import machine
from tests.engine.execution.draft_lines import DraftLine, committed, table_with
from tests.fakes import SequenceOutcome, step_result
from tests.native_acceptance import make_native

CAP = 4
EOS = 7


def right_tokens(position: int) -> int:
    """Leading tokens of the draft at an output position that are right."""
    return position % (CAP + 1)


class KnowingDrafter:
    """Knows the output, and errs where right_tokens says."""

    drafts_overlapped = True

    def __init__(self) -> None:
        self.known: dict[int, list[int]] = {}
        self.prompt_len: dict[int, int] = {}

    def start(self, start: SequenceStart) -> None:
        self.known[start.slot] = list(start.token_ids)
        self.prompt_len[start.slot] = start.prompt_len

    def propose(self, plan: DraftPlan, _until: Callable[[], bool] | None = None, /) -> Proposals:
        return Proposals(
            table=table_with([self.draft(wish.slot, wish.max_tokens) for wish in plan.requests], plan.width)
        )

    def draft(self, slot: int, max_tokens: int) -> DraftLine:
        number, position = self.known[slot][0], self.position(slot)
        tokens = [target(number, position + i) for i in range(max_tokens)]
        right = right_tokens(position)
        return DraftLine(
            slot=slot,
            method="ngram",
            token_ids=(*tokens[:right], *(-token for token in tokens[right:])),
            confidences=(2.0,) * max_tokens,
        )

    def position(self, slot: int) -> int:
        return len(self.known[slot]) - self.prompt_len[slot]

    def commit(self, slots: Sequence[int], counts: Sequence[int], token_ids: Sequence[int]) -> None:
        for slot, tokens in by_slot(slots, counts, token_ids):
            self.known[slot] += tokens

    def release(self, slot: int) -> None:
        del self.known[slot], self.prompt_len[slot]


def target(number: int, position: int) -> int:
    return 100 * number + position + 1


class ScriptedTarget:
    """An executor without a model; calls its drafter as the real one does. step_s: a step's time on the clock."""

    def __init__(self, drafter: Drafter, clock: SimulatedClock, *, eos_at: int | None, step_s: float) -> None:
        self.drafter = drafter
        self.clock = clock
        self.eos_at = eos_at
        self.step_s = step_s
        self.prompts: dict[int, tuple[int, int]] = {}

    def draft(self, plan: DraftPlan, *, during: StepPlan | None = None) -> Drafts:  # noqa: ARG002
        return drafts_of(plan, self.drafter.propose(plan), 0.0, 0.0)

    def rebuild(self, check: DrafterCheck) -> bool:
        raise AssertionError(f"no drafter of this executor has a state: {check}")

    def run_overlapped(self, plan: StepPlan, draft_plan: DraftPlan) -> tuple[StepResult, Drafts]:
        raise AssertionError(f"no draft is requested during step {plan.step}: {draft_plan.requests}")

    def launch(self, plan: StepPlan) -> LaunchedStep:
        raise AssertionError(f"step {plan.step} need not be launched ahead")

    def collect(self, launched: LaunchedStep) -> StepResult:
        raise AssertionError(f"step {launched.plan.step} was not launched")

    drafts_ahead = False

    def draft_ahead(self, plan: DraftPlan) -> bool:
        raise AssertionError(f"no step is in flight that drafts could follow: {plan.requests}")

    def end_drafts(self) -> Ints:
        raise AssertionError("no drafts were launched ahead")

    def run(self, plan: StepPlan) -> StepResult:
        for slot in plan.released:
            self.drafter.release(slot)
        for start in plan.started:
            self.prompts[start.slot] = (start.token_ids[0], start.prompt_len)
            self.drafter.start(start)
        sampled = [self.verify(rows) for rows in plan.rows]
        self.clock.advance(self.step_s)
        pairs = zip(plan.rows.slots, sampled, strict=True)
        self.drafter.commit(*committed({slot: token_ids for slot, token_ids in pairs if token_ids}))
        outcomes = [SequenceOutcome(token_ids=token_ids) for token_ids in sampled]
        return step_result(plan.step, *outcomes, run_s=0.001)

    def verify(self, rows: SequenceRows) -> tuple[int, ...]:
        if not rows.samples:
            return ()
        number, prompt_len = self.prompts[rows.slot]
        draft = rows.token_ids[len(rows.token_ids) - rows.num_drafts :]
        position = rows.start + len(rows.token_ids) - rows.num_drafts - prompt_len
        tokens = [self.token(number, position)]
        for drafted in draft:
            if drafted != tokens[-1]:
                break
            position += 1
            tokens.append(self.token(number, position))
        return tuple(tokens)

    def token(self, number: int, position: int) -> int:
        return EOS if position == self.eos_at else target(number, position)


def engine_of(
    drafter: Drafter,
    *,
    eos_at: int | None = None,
    num_blocks: int = 64,
    step_s: float = 0.0,
    clock: SimulatedClock | None = None,
) -> Engine:
    clock = clock or SimulatedClock()
    config = SpeculationConfig(method="ngram", policy="fixed", num_speculative_tokens=CAP)
    costs = CostModel(StepTimes.proportional(step_s=0.001, text_s=0.0))
    scheduler = Scheduler(
        kv=KvManager(num_blocks, 4, enable_prefix_caching=False),
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=128,
        eos_token_ids=(EOS,),
        clock=clock,
        speculation=SpeculationControl(config, costs, make_native=make_native, num_slots=4, clock=clock),
    )
    return Engine(scheduler, ScriptedTarget(drafter, clock, eos_at=eos_at, step_s=step_s))


PROMPTS = [BenchPrompt(token_ids=(number, 0, 0), category=f"kind {number}") for number in range(1, 7)]
SESSION = Session(model="m", drafter="ngram", max_tokens=CAP, output_tokens=20, seed=3)


def recorded(*, eos_at: int | None = None) -> tuple[Trace, KnowingDrafter]:
    drafter = KnowingDrafter()
    recorder = DraftRecorder(drafter)
    return record(engine_of(recorder, eos_at=eos_at), lambda: recorder.recordings, PROMPTS, SESSION), drafter


def test_every_position_has_its_draft_and_its_run() -> None:
    """Oracle: the drafter's own rule. There is no draft at position 0, whose token comes with the prompt."""
    trace, _ = recorded()
    assert len(trace.requests) == len(PROMPTS)
    for each, prompt in zip(trace.requests, PROMPTS, strict=True):
        assert each.runs == (0, *(right_tokens(position) for position in range(1, 20)))
        assert each.lengths == (0, *[CAP] * 19)
        assert each.confidences[1] == (2.0,) * CAP
        assert (each.category, each.prompt_token_ids) == (prompt.category, prompt.token_ids)
        assert each.output_token_ids == tuple(target(prompt.token_ids[0], position) for position in range(20))
    assert [each.seed for each in trace.requests] == [3, 4, 5, 6, 7, 8]
    assert trace.methods == ("ngram",)


def test_an_output_that_ends_by_itself_is_recorded_to_its_end() -> None:
    """What was drafted beyond the end counts as wrong."""
    trace, _ = recorded(eos_at=9)
    (first, *_) = trace.requests
    assert first.output_len == 10
    assert first.output_token_ids[-1] == EOS
    assert first.runs[6:] == (1, 2, 1, 0)  # right_tokens would be 1, 2, 3, 4, but 9 is the end's own


def test_a_recorder_never_drafts_overlapped() -> None:
    recorder = DraftRecorder(KnowingDrafter())
    recorder.start(SequenceStart(slot=0, sampling=SamplingParams(), seed=0, prompt_len=1, token_ids=(1,)))
    wish = DraftRequest(slot=0, max_tokens=2, new_blocks=(), unverified=(5,))

    assert not recorder.drafts_overlapped
    with pytest.raises(AssertionError, match="slot 0: a recorder never drafts overlapped"):
        recorder.propose(DraftPlan(step=1, width=2, requests=(wish,)))


def test_what_was_recorded_in_a_crowded_cache_is_true_as_far_as_it_goes() -> None:
    """20 blocks of 4 tokens hold two of four sequences. Where no room was left to draft, a recording ends."""
    recorder = DraftRecorder(KnowingDrafter())
    engine = engine_of(recorder, num_blocks=20)
    trace = record(engine, lambda: recorder.recordings, PROMPTS, SESSION)
    assert engine.stats().num_preemptions > 0
    assert 0 < len(trace.requests) <= len(PROMPTS)
    for each in trace.requests:
        assert each.output_token_ids == tuple(target(each.prompt_token_ids[0], p) for p in range(each.output_len))
        assert each.runs == (0, *(right_tokens(position) for position in range(1, each.output_len)))


def test_outputs_that_are_too_short_make_no_trace() -> None:
    drafter = KnowingDrafter()
    recorder = DraftRecorder(drafter)
    with pytest.raises(ConfigError, match="long enough"):
        record(engine_of(recorder, eos_at=0), lambda: recorder.recordings, PROMPTS, SESSION)


@pytest.mark.parametrize("policy", ["off", "fixed:1", "fixed:4", "goodput", "faser"])
def test_a_live_run_and_its_simulation_take_the_same_steps(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One client, so that no time decides who shares a step with whom. An exact trace holds for any policy.

    Time is simulated: policies that measure their steps would see a busy machine's.
    """
    clock = SimulatedClock()
    monkeypatch.setattr(time, "perf_counter", clock.now)
    monkeypatch.setattr("faser.engine.engine.GapTimer", lambda: GapTimer(clock.now))
    trace, _ = recorded()
    live = engine_of(KnowingDrafter(), step_s=0.001, clock=clock)
    serving = machine(step_s=0.001, row_s=0.0, pass_s=None, text_s=0.0)
    (check,) = check_live(live, trace, serving, [parse_policy(policy, cap=CAP)], clients=1, rounds=1)
    assert check.different == 0
    if policy in ("off", "fixed:1", "fixed:4"):
        assert check.simulated_steps == check.live_steps
    assert check.simulated_steps == pytest.approx(check.live_steps, rel=0.1)


def test_speed_ups_are_over_the_first_policy() -> None:
    """Oracle: the trace's own steps, which all take 1 ms here."""
    trace, _ = recorded()
    specs = [parse_policy(each, cap=CAP) for each in ("off", "fixed:4")]
    serving = machine(step_s=0.001, row_s=0.0, pass_s=None, text_s=0.0)
    off, fixed = check_live(engine_of(KnowingDrafter()), trace, serving, specs, clients=1, rounds=1)
    assert (off.live_speedup, off.simulated_speedup) == (1.0, 1.0)
    assert fixed.simulated_speedup == pytest.approx(off.simulated_steps / fixed.simulated_steps)
    assert fixed.live_speedup == pytest.approx(fixed.live_tokens_per_s / off.live_tokens_per_s)


def test_a_live_run_that_says_something_else_is_noticed() -> None:
    trace, _ = recorded()
    live = engine_of(KnowingDrafter(), eos_at=5)
    assert run_live(live, trace, 2, label="x").different == len(PROMPTS)


def test_a_made_up_trace_cannot_be_run_live() -> None:
    with pytest.raises(ConfigError, match="no prompts"):
        check_live(engine_of(KnowingDrafter()), iid_trace(0.5), machine(), [], clients=1)
