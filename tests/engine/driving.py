"""Drives a Scheduler over a ScriptedExecutor, and says what every sample must come to without either."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b

from faser.config.speculation import SpeculationConfig
from faser.engine.contract.plan import DraftPlan, SequenceDelta, StepPlan
from faser.engine.contract.step_times import StepTimes
from faser.engine.control.adapters import AdapterSlots
from faser.engine.control.clock import SimulatedClock
from faser.engine.control.kv_cache import KvManager
from faser.engine.control.kv_disk import KvDisk
from faser.engine.control.pace import PaceFit
from faser.engine.control.scheduler import Scheduler
from faser.engine.control.sequence import sample_seed
from faser.engine.control.speculation.control import SpeculationControl
from faser.engine.control.speculation.overlap import OverlapOptions
from faser.engine.control.speculation.policy import Policy
from faser.engine.control.state_snapshots import StateSnapshots
from faser.engine.control.step_cost import CostModel
from faser.types.adapter import Adapter
from faser.types.answer import FinishReason, PositionLogprobs
from faser.types.request import Request
from faser.types.sampling import SamplingParams
from tests.fakes import ScriptedExecutor, extend, first_history, next_token, scripted_logprobs
from tests.native_acceptance import make_native

BLOCK_SIZE = 4
CHUNK = 2  # tokens after which recurrent states are kept
DRAFT_CAP = 6
EOS = 7

MakeDisk = Callable[[ScriptedExecutor, KvManager, StateSnapshots | None], KvDisk]
Ending = tuple[list[int], FinishReason, int | None]


def request(
    request_id: str, prompt: list[int], *, priority: int = 0, at_s: float = 0.0, **sampling: object
) -> Request:
    """A request with seed 1 that ends at max_tokens only, unless sampling says otherwise."""
    given = {"seed": 1, "ignore_eos": True, "max_tokens": 4} | sampling
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(**given),  # type: ignore[arg-type]
        priority=priority,
        arrival_s=at_s,
    )


def expected(request: Request, index: int, *, max_model_len: int) -> Ending:
    """Oracle: one sample alone, token by token, with no scheduler: tokens, finish reason, stop reason."""
    sampling = request.sampling
    assert sampling.seed is not None
    seed = sample_seed(sampling.seed, index)
    history = _first_history(request)
    for token_id in request.prompt_token_ids:
        history = extend(history, token_id)
    room = max_model_len - len(request.prompt_token_ids)
    most = room if sampling.max_tokens is None else sampling.max_tokens
    output: list[int] = []
    while len(output) < most:
        token_id = next_token(history, seed)
        history = extend(history, token_id)
        output.append(token_id)
        if token_id == EOS and sampling.structured_output is not None:
            return output, FinishReason.STOP, None
        if len(output) <= sampling.min_tokens:
            continue
        if token_id == EOS and not sampling.ignore_eos:
            return output, FinishReason.STOP, None
        if token_id in sampling.stop_token_ids:
            return output, FinishReason.STOP, token_id
    return output, FinishReason.LENGTH, None


def expected_prompt_logprobs(request: Request) -> tuple[PositionLogprobs | None, ...]:
    history = _first_history(request)
    scores: list[PositionLogprobs | None] = []
    for token_id in request.prompt_token_ids:
        scores.append(scripted_logprobs(history, token_id) if scores else None)
        history = extend(history, token_id)
    return tuple(scores)


def _first_history(request: Request) -> int:
    return first_history(None if request.adapter is None else request.adapter.digest)


def adapter(name: str) -> Adapter:
    """An adapter whose digest is that of its name."""
    return Adapter(name=name, path=name, digest=blake2b(name.encode(), digest_size=8).hexdigest())


@dataclass
class Sample:
    """What has been heard of one sample."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
    last: SequenceDelta | None = None

    @property
    def ending(self) -> Ending:
        assert self.last is not None
        assert self.last.finish_reason is not None
        return self.token_ids, self.last.finish_reason, self.last.stop_reason

    def hear(self, delta: SequenceDelta) -> None:
        assert self.last is None or self.last.finish_reason is None, "nothing is heard after the end"
        self.last = delta
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            assert len(delta.logprobs) == len(delta.token_ids)
            self.logprobs += delta.logprobs
        if delta.prompt_logprobs is not None:
            assert self.prompt_logprobs is None, "the prompt's scores come once"
            self.prompt_logprobs = delta.prompt_logprobs


def _speculation(
    num_slots: int,
    policy: Policy,
    clock: SimulatedClock,
    costs: CostModel | None,
    *,
    ahead: bool,
    looks: bool,
    follows: bool,
) -> SpeculationControl:
    """A policy of the test's own over the real bookkeeping. ahead: it drafts during steps, for a while.

    costs: the host's gaps in it stay as they are; None: by looks, and gaps are measured. looks: drafts cost a
    look-up, and no passes. follows: a draft model makes them.
    """
    config = SpeculationConfig(method="suffix", num_speculative_tokens=DRAFT_CAP)
    if follows:
        config = SpeculationConfig(model="beside", method="draft_model", num_speculative_tokens=DRAFT_CAP)
    return SpeculationControl(
        config,
        costs or CostModel(StepTimes.proportional(step_s=0.01, text_s=0.0001, pass_s=None if looks else 0.001)),
        make_native=make_native,
        num_slots=num_slots,
        clock=clock,
        policy=policy,
        overlap=OverlapOptions(name="lanes", share=0.5, mode="on", every=3) if ahead else None,
        times_itself=costs is None,
    )


class Driver:
    """A scheduler and an executor, with the invariants checked after every operation.

    speculates: how; None: not at all. costs: of drafts and steps; None: the usual ones. ahead: drafts are made
    during steps. looks: they are looked up. follows: a draft model makes them, behind steps in flight. control:
    instead of all these.
    kv, executor: None: the usual ones. num_snapshots: of recurrent states; None: the model has none. pace: None:
    sequences with targets get no room from others. disk: makes it; None: no KV is kept on disk. max_loras: adapter
    slots; the adapters of requests are in memory; None: requests have none. adapters: instead.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 32,
        max_logit_rows: int | None = None,
        max_model_len: int = 64,
        policy: str = "fcfs",
        prefix_caching: bool = True,
        speculates: Policy | None = None,
        costs: CostModel | None = None,
        control: SpeculationControl | None = None,
        ahead: bool = False,
        looks: bool = True,
        follows: bool = False,
        kv: KvManager | None = None,
        executor: ScriptedExecutor | None = None,
        num_snapshots: int | None = None,
        pace: PaceFit | None = None,
        disk: MakeDisk | None = None,
        max_loras: int | None = None,
        adapters: AdapterSlots | None = None,
    ) -> None:
        self.max_model_len = max_model_len
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_logit_rows = max_logit_rows or max_num_batched_tokens
        self.clock = SimulatedClock(100.0)
        chunk = None if num_snapshots is None else CHUNK
        follower = random.Random(1) if follows else None
        self.executor = executor or ScriptedExecutor(block_size=BLOCK_SIZE, chunk=chunk, follows=follower)
        shares_prefixes = num_snapshots is None or (num_snapshots > 0 and prefix_caching)
        kv = kv or KvManager(num_blocks, BLOCK_SIZE, enable_prefix_caching=prefix_caching and shares_prefixes)
        self.snapshots = None
        if num_snapshots and shares_prefixes:
            self.snapshots = StateSnapshots(kv, num_snapshots, num_slots=max_num_seqs, chunk=CHUNK)
        self.disk = None if disk is None else disk(self.executor, kv, self.snapshots)
        self.scheduler = Scheduler(
            kv=kv,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_logit_rows=max_logit_rows,
            max_model_len=max_model_len,
            eos_token_ids=(EOS,),
            policy=policy,
            clock=self.clock,
            shares_prefixes=shares_prefixes,
            snapshots=self.snapshots,
            state_chunk=chunk or 0,
            pace=pace,
            disk=self.disk,
            adapters=adapters or (None if max_loras is None else AdapterSlots(max_loras)),
            speculation=control
            if speculates is None
            else _speculation(
                max_num_seqs,
                speculates,
                self.clock,
                costs,
                ahead=ahead,
                looks=looks,
                follows=self.executor.drafts_ahead,
            ),
        )
        self._ahead: DraftPlan | None = None
        self.samples: dict[tuple[str, int], Sample] = {}

    def add(self, *requests: Request) -> None:
        for each in requests:
            self.scheduler.add(each)
            if each.adapter is not None:
                self.executor.load_adapter(each.adapter)
            self.samples |= {(each.request_id, index): Sample() for index in range(each.sampling.n)}
            self.scheduler.check_invariants()

    def abort(self, request_id: str, index: int | None = None) -> None:
        self.scheduler.abort(request_id, index)
        self.scheduler.check_invariants()

    @property
    def overlaps(self) -> bool:
        """Drafts are made during the step that was planned last."""
        return self._ahead is not None

    def plan(self) -> StepPlan | None:
        requests = self.scheduler.drafts.propose()
        self.scheduler.check_invariants()
        if isinstance(requests, DraftPlan):
            self.scheduler.drafts.drafted(self.executor.draft(requests))
        plan = self.scheduler.plan()
        self.scheduler.check_invariants()
        self._ahead = None if plan is None else self.scheduler.drafts.propose_overlapped(plan)
        self.scheduler.check_invariants()
        return plan

    def commit(self, plan: StepPlan) -> list[SequenceDelta]:
        if self._ahead is None:
            result = self.executor.run(plan)
        else:
            result, drafts = self.executor.run_overlapped(plan, self._ahead)
            self.scheduler.drafts.drafted(drafts)
        deltas = list(self.scheduler.commit(plan, result))
        self.scheduler.check_invariants()
        for delta in deltas:
            self.samples[delta.request_id, delta.index].hear(delta)
        return deltas

    def step(self) -> StepPlan:
        """One step, which must exist."""
        plan = self.plan()
        assert plan is not None
        self.commit(plan)
        return plan

    def run(self, *, max_steps: int = 500) -> list[StepPlan]:
        """Step until nothing is left to do; too many steps are a livelock."""
        plans: list[StepPlan] = []
        while self.scheduler.has_work():
            assert len(plans) < max_steps, f"{max_steps} steps have not ended everything"
            if (plan := self.plan()) is not None:
                self.commit(plan)
                plans.append(plan)
            else:
                assert self.disk is not None, "there is work and no plan"
                self.disk.rest()
        assert self.plan() is None
        assert self.scheduler.stats().kv_usage == 0.0
        assert self.scheduler.adapters_in_use() == set()
        return plans

    def check(self, *requests: Request) -> None:
        """Every sample of these requests came to what the oracle says."""
        for each in requests:
            for index in range(each.sampling.n):
                found = self.samples[each.request_id, index].ending
                assert found == expected(each, index, max_model_len=self.max_model_len), (each, index)


def rows_by_slot(plan: StepPlan) -> dict[int, int]:
    return dict(zip(plan.rows.slots, plan.rows.counts, strict=True))
