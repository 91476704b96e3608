"""What the control plane learns in whole runs of the real scheduler, on a simulated clock with measured row costs.

Oracles: the same requests without what would teach something wrong. Planted bugs that these tests have caught: the
first token that is cut counts as predicted, not as verified; a request that edits logits teaches all others.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest

from benchmarks.simulator.simulation import Machine, Outcome, Simulation
from benchmarks.simulator.trace import Trace, iid_trace
from benchmarks.simulator.workload import Arrival
from faser.config.speculation import SpeculationConfig
from faser.engine.contract.step_times import CostTable, Role, StepTimes
from faser.engine.control.speculation.control import SpeculationControl
from faser.engine.control.step_cost import CostModel
from faser.types.answer import SpeculationSummary
from faser.types.request import Request, SpeculationParams
from faser.types.sampling import SamplingParams
from tests.native_acceptance import make_native

CAP, TOKENS = 16, 64
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 256)
MILLISECONDS = (12.4, 14.1, 14.6, 17.6, 19.3, 24.9, 29.3, 41.2, 53.5, 103.8, 208.0)  # two cores, 135M parameters
STEP = CostTable(rows=ROWS, seconds=tuple(each / 1000 for each in MILLISECONDS))
TEXT = CostTable(rows=(1, 2), seconds=(3e-5, 6e-5))
BANNED = SamplingParams(max_tokens=TOKENS, ignore_eos=True, logit_bias=((7, -100.0),))
SILENT = SpeculationParams(enabled=False)


class TextSimulation(Simulation):
    """Drafts from text, one part of the requests after the other: (acceptance, requests) each.

    edited: numbers of requests that edit logits. silent: numbers of requests that do not draft.
    """

    def __init__(
        self,
        parts: tuple[tuple[float, int], ...],
        *,
        edited: frozenset[int] = frozenset(),
        silent: frozenset[int] = frozenset(),
    ) -> None:
        traces = [
            iid_trace(chance, max_tokens=CAP, num_requests=count, output_len=TOKENS, method="suffix", seed=seed)
            for seed, (chance, count) in enumerate(parts)
        ]
        machine = Machine(
            costs=CostModel(StepTimes(tables={Role.STEP: STEP, Role.TEXT: TEXT})), draft_overhead_s=0.0
        )
        config = SpeculationConfig(method="suffix")
        super().__init__(
            _alike(traces),
            machine,
            lambda costs, clock: SpeculationControl(
                config, costs, make_native=make_native, num_slots=64, clock=clock, times_itself=False
            ),
        )
        self._edited, self._silent = edited, silent
        self.summaries: dict[int, SpeculationSummary] = {}
        self._add_to_scheduler = self.scheduler.add
        self.scheduler.add = self._add_request  # type: ignore[method-assign]

    def serve(self, clients: int) -> Outcome:
        arrivals: Iterator[Arrival] = (
            Arrival(at_s=None, prompt_len=64, output_len=TOKENS, trace=number)
            for number in range(len(self._trace.requests))
        )
        return self.run(arrivals, clients=clients, duration_s=None)

    def gamma(self, numbers: Iterable[int]) -> float:
        """Mean verified draft tokens of a step of these requests."""
        chosen = [self.summaries[number] for number in numbers]
        return sum(each.verified for each in chosen) / sum(each.steps for each in chosen)

    def _add_request(self, request: Request) -> None:
        number = int(request.request_id)
        if number in self._edited:
            request = replace(request, sampling=BANNED)
        if number in self._silent:
            request = replace(request, speculation=SILENT)
        self._add_to_scheduler(request)

    def _hear(self, delta, duration_s) -> None:  # type: ignore[no-untyped-def]
        if delta.speculation is not None and delta.finish_reason is not None:
            self.summaries[int(delta.request_id)] = delta.speculation
        super()._hear(delta, duration_s)


def _alike(traces: list[Trace]) -> Trace:
    """One trace after the other. All confidences are equal: they tell nothing."""
    requests = [
        replace(request, confidences=((0.6,) * CAP,) * request.output_len)
        for trace in traces
        for request in trace.requests
    ]
    return replace(traces[0], requests=tuple(requests))


def rate_of(outcome: Outcome, first: int) -> float:
    """Tokens a second of the requests from number `first` on."""
    late = [each for each in outcome.served if each.number >= first]
    seconds = max(each.finished_s for each in late) - min(each.first_s for each in late)
    return sum(each.num_tokens for each in late) / seconds


@pytest.mark.parametrize("clients", [4, 16])
def test_a_bad_phase_does_not_lock_good_drafts_out(clients: int) -> None:
    """Drafts are left out then, but for a step now and then, in which acceptance is learned anew."""
    bad, good = (0.1, 64), (0.9, 160)
    always_good = rate_of(TextSimulation((good,)).serve(clients), 0)
    assert rate_of(TextSimulation((bad, good)).serve(clients), bad[1]) >= 0.93 * always_good


def test_requests_that_edit_logits_do_not_change_the_drafts_of_others() -> None:
    """Every fourth request edits logits, and none of its draft tokens is accepted."""
    count, clients = 96, 8
    edits = frozenset(range(1, count, 4))
    parts = tuple((0.0 if number in edits else 0.8, 1) for number in range(count))
    edited, silent = TextSimulation(parts, edited=edits), TextSimulation(parts, silent=edits)
    edited.serve(clients)
    silent.serve(clients)
    others = [number for number in range(16, count) if number not in edits]
    assert silent.gamma(others) > 1.0
    assert edited.gamma(others) == pytest.approx(silent.gamma(others), rel=0.1)
