"""Simulation: the real scheduler and a policy serve a workload on a simulated clock.

Owns the loop, the clock and the counts. A step has the engine's order: propose, draft, plan, run, commit; or plan,
propose, run both, commit. The executor knows the true costs and acceptance; a policy learns its own estimates.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.simulator.co_run import InterferenceTable
from benchmarks.simulator.executor import SimulatedExecutor
from benchmarks.simulator.trace import Trace
from benchmarks.simulator.workload import Arrival
from faser.engine.client.admission import Admission
from faser.engine.contract.drafts import Drafts
from faser.engine.contract.plan import DraftPlan, SequenceDelta, StepPlan, StepResult, StepSpan
from faser.engine.control.clock import SimulatedClock
from faser.engine.control.kv_cache import KvManager
from faser.engine.control.pace import PaceFit
from faser.engine.control.scheduler import Scheduler
from faser.engine.control.speculation.control import SpeculationControl
from faser.engine.control.step_cost import CostModel
from faser.errors import ConfigError, TargetError
from faser.types.request import DEFAULT_CLASS, NO_TARGETS, Request, Slo, SpeculationParams
from faser.types.sampling import SamplingParams
from faser.types.statistics import SpeculationStats

MakeControl = Callable[[CostModel, SimulatedClock], SpeculationControl | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The serving machine. costs: the true times. kv_tokens: size of the KV cache; None: enough for every slot.

    step_overhead_s: between any two steps. draft_overhead_s: additional, in a step with a draft request. noise:
    sigma of the logarithm of every step's time. lanes: slowdowns of overlapped drafting, by share; empty: it never
    overlaps. draft_share: see SimulatedExecutor.
    """

    costs: CostModel
    lanes: tuple[InterferenceTable, ...] = ()
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 256
    block_size: int = 16
    max_model_len: int = 8192
    kv_tokens: int | None = None
    step_overhead_s: float = 0.0002
    draft_overhead_s: float = 0.0002
    noise: float = 0.0
    draft_share: float = 1.0

    @property
    def num_blocks(self) -> int:
        whole = -(-self.max_model_len // self.block_size)
        return whole * self.max_num_seqs if self.kv_tokens is None else self.kv_tokens // self.block_size


@dataclass(slots=True, kw_only=True)
class Served:
    """One request. Seconds of the simulated clock; number: its place in the order of arrival."""

    number: int
    arrival_s: float
    prompt_len: int
    first_s: float = 0.0
    finished_s: float = 0.0
    num_tokens: int = 0
    class_name: str = DEFAULT_CLASS
    slo: Slo = NO_TARGETS  # that it was sent with, whatever became of it

    @property
    def tpot_s(self) -> float:
        """Time per token after the first one; with one token only there is none."""
        return (self.finished_s - self.first_s) / (self.num_tokens - 1)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The result of a run. Seconds are simulated.

    refused: by admission.
    window_tokens: output tokens within the duration, all of them without a duration. busy_s: drafting, steps and
    overheads. turns: decoding sequences, summed over steps. drafted, verified, accepted: tokens.
    """

    served: list[Served] = field(default_factory=list)
    refused: list[Served] = field(default_factory=list)
    elapsed_s: float = 0.0
    busy_s: float = 0.0
    draft_s: float = 0.0
    num_steps: int = 0
    window_tokens: int = 0
    turns: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    num_preemptions: int = 0
    speculation: SpeculationStats | None = None


class Simulation:
    """One machine and one policy, from an empty engine to the last answer.

    make_control: makes the control of speculation; gets a copy of the costs, which it corrects by itself. The
    attribute `pace` is fitted to the steps from another copy.
    model_trace: what the model drafts of the same requests, where the control plane chooses between it and drafts
    from text, those of trace. classes: which the requests have in turn, each a tenant of its own; none: all have
    slo. admission: decides about them, as in front of a live engine. steers: False: targets weigh drafts and
    nothing else. announces: requests say how long their answers will be. An instance serves one run.
    """

    def __init__(
        self,
        trace: Trace,
        machine: Machine,
        make_control: MakeControl,
        *,
        slo: Slo | None = None,
        seed: int = 0,
        model_trace: Trace | None = None,
        classes: Sequence[SpeculationParams] = (),
        admission: Admission | None = None,
        steers: bool = True,
        announces: bool = False,
    ) -> None:
        self._classes, self._admission, self._announces = classes, admission, announces
        self._pace_due_s = 0.0
        self._trace = trace
        self._model_trace = model_trace
        self._machine = machine
        self._speculation_params = SpeculationParams() if slo is None else SpeculationParams(slo=slo)
        self.clock = SimulatedClock()
        self.executor = SimulatedExecutor(
            trace,
            machine.costs,
            lanes=machine.lanes,
            noise=machine.noise,
            seed=seed,
            model_methods=() if model_trace is None else model_trace.methods,
            draft_share=machine.draft_share,
        )
        self.pace = PaceFit(
            copy.deepcopy(machine.costs),
            num_slots=machine.max_num_seqs,
            most_rows=machine.max_num_batched_tokens,
        )
        self.scheduler = Scheduler(
            kv=KvManager(machine.num_blocks, machine.block_size, enable_prefix_caching=False),
            max_num_seqs=machine.max_num_seqs,
            max_num_batched_tokens=machine.max_num_batched_tokens,
            max_model_len=machine.max_model_len,
            eos_token_ids=(),
            seed=seed,
            clock=self.clock,
            speculation=make_control(copy.deepcopy(machine.costs), self.clock),
            pace=self.pace if steers else None,
        )
        self._open: dict[str, Served] = {}
        self._outcome = Outcome()
        self._began_s: float | None = None  # the step before, if it left something to do

    def run(
        self,
        arrivals: Iterator[Arrival],
        *,
        clients: int | None,
        duration_s: float | None,
        progress: Callable[[float, int], None] = lambda _now_s, _served: None,
    ) -> Outcome:
        """Serve all arrivals. clients: number in a closed workload, whose requests arrive until duration_s.

        progress: called with the simulated time and the number of answers, after every answer.
        """
        waiting = next(arrivals, None)
        while waiting is not None or self.scheduler.has_work():
            while waiting is not None and self._is_due(waiting, clients, duration_s):
                self._add(waiting)
                waiting = next(arrivals, None)
            if self.scheduler.has_work():
                answered = len(self._outcome.served)
                self.step(duration_s)
                if len(self._outcome.served) > answered:
                    progress(self.clock.now(), len(self._outcome.served))
            elif waiting is not None and waiting.at_s is not None:
                self.clock.advance(max(waiting.at_s - self.clock.now(), 0.0))
            else:
                break  # a closed workload whose time is over
        outcome, stats = self._outcome, self.scheduler.stats()
        outcome.elapsed_s = self.clock.now()
        outcome.num_preemptions = stats.num_preemptions
        outcome.speculation = stats.speculation
        return outcome

    def step(self, duration_s: float | None = None) -> None:
        """One step of the engine. Needs work."""
        before_s = self.clock.now()
        last = None if self._began_s is None else StepSpan(before_s - self._began_s, 0.0)
        self._draft()
        plan = self.scheduler.plan()
        assert plan is not None, "work, but nothing to compute"
        overlapped_plan = self.scheduler.drafts.propose_overlapped(plan)
        if overlapped_plan is None:
            result = self.executor.run(plan)
        else:
            result, made = self.executor.run_overlapped(plan, overlapped_plan)
            drafts = self.scheduler.drafts.drafted(made)
            while isinstance(drafts, DraftPlan):
                drafts = self.scheduler.drafts.drafted(self.executor.draft(drafts))
            self._outcome.drafted += int(drafts.table.lengths.sum())
            self.clock.advance(self._machine.draft_overhead_s)
        self.clock.advance(result.run_s + self._machine.step_overhead_s)
        self._count(plan, result)
        for delta in self.scheduler.commit(plan, result, last=last):
            self._hear(delta, duration_s)
        self._restore()
        self._began_s = before_s if self.scheduler.has_work() else None
        self._outcome.busy_s += self.clock.now() - before_s

    def _draft(self) -> Drafts | None:
        """The drafts of the next step: in one round or, from text and by a model, in two."""
        drafts: DraftPlan | Drafts | None = self.scheduler.drafts.propose()
        if drafts is None:
            return None
        while isinstance(drafts, DraftPlan):
            found = self.executor.draft(drafts)
            self._outcome.draft_s += found.run_s
            self.clock.advance(found.run_s)
            drafts = self.scheduler.drafts.drafted(found)
        self._outcome.drafted += int(drafts.table.lengths.sum())
        self.clock.advance(self._machine.draft_overhead_s)
        return drafts

    def _is_due(self, arrival: Arrival, clients: int | None, duration_s: float | None) -> bool:
        if arrival.at_s is not None:
            return arrival.at_s <= self.clock.now()
        assert clients is not None, "arrivals without a time need clients"
        return len(self._open) < clients and (duration_s is None or self.clock.now() < duration_s)

    def _add(self, arrival: Arrival) -> None:
        number = len(self._outcome.served) + len(self._open) + len(self._outcome.refused)
        longest = min(self._machine.max_model_len, self._machine.num_blocks * self._machine.block_size)
        if arrival.prompt_len + arrival.output_len > longest:
            raise ConfigError(
                f"request {number} has {arrival.prompt_len} + {arrival.output_len} tokens; the longest that this "
                f"machine can serve is {longest} (--max-model-len, --kv-tokens, or --scale-tokens below 1)"
            )
        arrival_s = self.clock.now() if arrival.at_s is None else arrival.at_s
        by_model = None if self._model_trace is None else self._model_trace.requests[arrival.trace]
        self.executor.expect(number, self._trace.requests[arrival.trace], by_model)
        asked = self._classes[number % len(self._classes)] if self._classes else self._speculation_params
        served = Served(
            number=number,
            arrival_s=arrival_s,
            prompt_len=arrival.prompt_len,
            class_name=asked.class_name,
            slo=asked.slo,
        )
        request = Request(
            request_id=str(number),
            prompt_token_ids=(number, *(0,) * (arrival.prompt_len - 1)),
            sampling=SamplingParams(max_tokens=arrival.output_len, ignore_eos=True),
            arrival_s=arrival_s,
            speculation=asked,
            tenant=asked.class_name if self._classes else "",
            expected_tokens=arrival.output_len if self._announces else None,
        )
        if self._admission is not None:
            try:
                request = self._admit(request)
            except TargetError:
                self._outcome.refused.append(served)
                self.executor.forget(number)
                return
        self._open[str(number)] = served
        self.scheduler.add(request)

    def _admit(self, request: Request) -> Request:
        """Admit as a front-end does: the engine has said its pace within the last second. Raises TargetError."""
        assert self._admission is not None
        now_s = self.clock.now()
        if now_s >= self._pace_due_s:
            self._pace_due_s = now_s + 1.0
            self._admission.pace = self.pace.pace()
            self._admission.begun(self.scheduler.uncomputed_prompts())
        return self._admission.admit(request, now_s)

    def _restore(self) -> None:
        """Do what a front-end does after every step."""
        if self._admission is not None:
            for request in self._admission.restore(self.clock.now()):
                self.scheduler.reclassify(request)

    def _count(self, plan: StepPlan, result: StepResult) -> None:
        outcome = self._outcome
        outcome.num_steps += 1
        rows = plan.rows
        columns = zip(rows.samples, rows.counts, rows.num_drafts, result.counts, strict=True)
        for samples, num_rows, num_drafts, num_tokens in columns:
            if samples and num_rows == num_drafts + 1:
                outcome.turns += 1
                outcome.verified += num_drafts
                outcome.accepted += num_tokens - 1

    def _hear(self, delta: SequenceDelta, duration_s: float | None) -> None:
        now_s, served = self.clock.now(), self._open[delta.request_id]
        if not served.num_tokens:
            served.first_s = now_s
            if self._admission is not None:
                self._admission.first_token(delta.request_id, now_s)
        served.num_tokens += len(delta.token_ids)
        if duration_s is None or now_s <= duration_s:
            self._outcome.window_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            assert delta.error is None, delta.error
            served.finished_s = now_s
            if self._admission is not None:
                tpot_s = served.tpot_s if served.num_tokens > 1 else None
                self._admission.end(delta.request_id, num_tokens=served.num_tokens, tpot_s=tpot_s)
            self._outcome.served.append(self._open.pop(delta.request_id))
            self.executor.forget(served.number)
