"""Random lives of a scheduler: arrivals, aborts and shortages in every order hypothesis can think of.

Oracles: the executor's memory (every row finds exactly its own prefix, of rows that have been through all layers,
and a recurrent state of exactly its own tokens),
the invariants after every operation, each sample alone without a scheduler (same tokens, same ending), and a bound
on the number of steps.
"""

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from faser.engine.contract.plan import StepPlan
from faser.types.answer import FinishReason
from faser.types.request import Request
from faser.types.sampling import SamplingParams
from tests.engine.driving import BLOCK_SIZE, CHUNK, Driver, expected, expected_prompt_logprobs
from tests.engine.driving import adapter as named
from tests.fakes import RandomPolicy, ScriptedExecutor

NUM_BLOCKS = 8  # of 4 tokens: two or three sequences fill it
MAX_MODEL_LEN = 30

# Prompts are beginnings of two texts, with a tail of their own now and then: much is shared. The second text
# differs in its first block only, so its later blocks have the same tokens behind another beginning.
FIRST = tuple(range(100, 120))
TEXTS = (FIRST, FIRST, (200, 201, 202, 203, *FIRST[4:]))

prompts = st.builds(
    lambda text, length, tail: (*text[:length], *tail),
    st.sampled_from(TEXTS),
    st.integers(1, 18),
    st.lists(st.integers(300, 301), max_size=2),
)
samplings = st.builds(
    SamplingParams,
    n=st.integers(1, 3),
    seed=st.integers(0, 3),
    max_tokens=st.one_of(st.none(), st.integers(0, 10)),
    ignore_eos=st.booleans(),
    stop_token_ids=st.sampled_from([(), (1, 2, 3, 4, 5)]),
    logprobs=st.one_of(st.none(), st.just(0)),
    prompt_logprobs=st.one_of(st.none(), st.just(0)),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Plans and commits alternate; everything else may happen between them, too."""

    num_checked = 0  # answers that were compared, in all examples

    @initialize(
        policy=st.sampled_from(["fcfs", "priority"]),
        prefix_caching=st.booleans(),
        max_num_seqs=st.integers(1, 4),
        extra_tokens=st.integers(0, 8),
        policy_seed=st.one_of(st.none(), st.integers(0, 3)),
        ahead=st.booleans(),
        prune_seed=st.one_of(st.none(), st.integers(0, 3)),
        num_snapshots=st.sampled_from([None, None, 0, 1, 2, 5]),
        max_loras=st.sampled_from([None, 1, 2]),
        extra_logits=st.sampled_from([None, 0, 2, 7]),
    )
    def begin(
        self,
        *,
        policy: str,
        prefix_caching: bool,
        max_num_seqs: int,
        extra_tokens: int,
        policy_seed: int | None,
        ahead: bool,
        prune_seed: int | None,
        num_snapshots: int | None,
        max_loras: int | None,
        extra_logits: int | None,
    ) -> None:
        prunes = None if prune_seed is None else random.Random(prune_seed)
        self.driver = Driver(
            num_blocks=NUM_BLOCKS,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_tokens,
            max_logit_rows=None if extra_logits is None else max_num_seqs + extra_logits,
            max_model_len=MAX_MODEL_LEN,
            policy=policy,
            prefix_caching=prefix_caching,
            speculates=None
            if policy_seed is None
            else RandomPolicy(policy_seed, looks_first=policy_seed % 2 == 1),
            ahead=ahead,
            executor=ScriptedExecutor(
                block_size=BLOCK_SIZE, prunes=prunes, chunk=None if num_snapshots is None else CHUNK
            ),
            num_snapshots=num_snapshots,
            max_loras=max_loras,
        )
        self.has_adapters = max_loras is not None
        self.requests: dict[str, Request] = {}
        self.excused: set[tuple[str, int]] = set()  # aborted, or ended by an error
        self.in_flight: StepPlan | None = None

    @rule(
        prompt=prompts,
        sampling=samplings,
        priority=st.integers(-1, 1),
        salt=st.sampled_from([None, None, "a"]),
        tenant=st.sampled_from("ab"),
        adapter=st.sampled_from([None, "x", "y", "z"]),
    )
    def arrive(
        self,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        priority: int,
        salt: str | None,
        tenant: str,
        adapter: str | None,
    ) -> None:
        request = Request(
            request_id=str(len(self.requests)),
            prompt_token_ids=prompt,
            sampling=sampling,
            priority=priority,
            arrival_s=float(len(self.requests)),
            cache_salt=salt,
            tenant=tenant,
            adapter=None if adapter is None or not self.has_adapters else named(adapter),
        )
        self.requests[request.request_id] = request
        self.driver.add(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), whole=st.booleans())
    def abort(self, data: st.DataObject, whole: bool) -> None:
        request = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        indices = range(request.sampling.n) if whole else [data.draw(st.integers(0, request.sampling.n - 1))]
        self.driver.abort(request.request_id, None if whole else indices[0])
        self.excused |= {(request.request_id, index) for index in indices}

    @precondition(lambda self: self.in_flight is None)
    @rule()
    def plan(self) -> None:
        had_work = self.driver.scheduler.has_work()
        self.in_flight = self.driver.plan()
        assert had_work == (self.in_flight is not None)
        if self.in_flight is not None:
            self.check_plan(self.in_flight)

    @precondition(lambda self: self.in_flight is not None)
    @rule(fails=st.sampled_from([False] * 9 + [True]))
    def commit(self, fails: bool) -> None:
        assert self.in_flight is not None
        if fails:
            self.driver.executor.fail_slots.add(self.in_flight.rows.slots[0])
        for delta in self.driver.commit(self.in_flight):
            if delta.finish_reason is FinishReason.ERROR:
                self.excused.add((delta.request_id, delta.index))
        self.in_flight = None

    @rule(count=st.integers(1, 6))
    def make_steps(self, count: int) -> None:
        for _ in range(count):
            if self.in_flight is None:
                self.plan()
            if self.in_flight is not None:
                self.commit(False)

    def check_plan(self, plan: StepPlan) -> None:
        """The budget is kept; those that want one row come first, then begun prompts, then newcomers."""
        assert plan.num_rows <= self.driver.max_num_batched_tokens
        assert sum(rows.num_drafts + 1 for rows in plan.rows if rows.samples) <= self.driver.max_logit_rows
        assert len({rows.slot for rows in plan.rows}) == len(plan.rows)
        started = {start.slot for start in plan.started}
        assert [rows.slot in started for rows in plan.rows] == sorted(rows.slot in started for rows in plan.rows)
        executor = self.driver.executor
        wanted = [executor.num_known(rows.slot) - rows.start for rows in plan.rows if rows.slot not in started]
        assert [each > 1 for each in wanted] == sorted(each > 1 for each in wanted)

    def teardown(self) -> None:
        """Let everything come to its end, in no more steps than computing each sample alone would take."""
        if not hasattr(self, "driver"):
            return
        if self.in_flight is not None:
            self.commit(False)
        most = sum(MAX_MODEL_LEN * request.sampling.n for request in self.requests.values())
        self.driver.run(max_steps=2 * most + 1)
        for request in self.requests.values():
            for index in range(request.sampling.n):
                if (request.request_id, index) not in self.excused:
                    self.check_sample(request, index)

    def check_sample(self, request: Request, index: int) -> None:
        SchedulerMachine.num_checked += 1
        sample = self.driver.samples[request.request_id, index]
        assert sample.ending == expected(request, index, max_model_len=MAX_MODEL_LEN)
        wants_prompt = index == 0 and request.sampling.prompt_logprobs is not None
        assert sample.prompt_logprobs == (expected_prompt_logprobs(request) if wants_prompt else None)
        wants_logprobs = request.sampling.logprobs is not None
        assert [scores.token_id for scores in sample.logprobs] == (sample.token_ids if wants_logprobs else [])


def test_every_accepted_request_comes_to_the_end_it_would_have_alone() -> None:
    SchedulerMachine.num_checked = 0
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(max_examples=50, stateful_step_count=40, deadline=None, derandomize=True),
    )
    assert SchedulerMachine.num_checked > 50, "every example has an answer to compare, on average"
