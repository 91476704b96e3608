"""Method `auto` with a draft model under the policy faser: whole runs of the real scheduler on a simulated clock.

Text drafts and those of the model are traces of their own, whose acceptance is known. Confidences are all equal:
they tell nothing. Planted bugs that these tests have caught: with a model that does not pay there is no look-up;
the model drafts up to the cap of drafts from text; it drafts for the whole batch; it drafts where text is better;
drafts from text that it replaces teach nothing, or count as its own.
"""

from dataclasses import replace

import pytest

from benchmarks.simulator.simulation import Machine, Outcome, Simulation
from benchmarks.simulator.trace import RequestTrace, Trace, iid_trace
from benchmarks.simulator.workload import Arrival
from faser.config.speculation import SpeculationConfig
from faser.engine.contract.drafts import Drafts
from faser.engine.contract.step_times import CostTable, Role, StepTimes
from faser.engine.control.speculation.control import SpeculationControl
from faser.engine.control.step_cost import CostModel
from faser.types.statistics import MethodStats
from tests.engine.control.speculation.building import named_drafts
from tests.native_acceptance import make_native

CAP, MODEL_CAP = 16, 8
LONG_PROMPT = 1500
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 256)
MILLISECONDS = (12.4, 14.1, 14.6, 17.6, 19.3, 24.9, 29.3, 41.2, 53.5, 103.8, 208.0)  # two cores, 135M parameters
PASS_COST, CHEAP_PASS_COST = 0.4, 0.02  # of a step with as many rows
SUFFIX = SpeculationConfig(method="suffix")
AUTO = SpeculationConfig(method="auto", model="a draft model")
CONFIDENCE = {"suffix": 0.6, "draft_model": 2.0}


class AutoSimulation(Simulation):
    """by_text, by_model: acceptance of each request's drafts, or of its two halves; None: there is no draft.

    chosen: the method that drafted and the length of its draft, by request and step.
    """

    def __init__(
        self,
        by_text: list[float | tuple[float, float] | None],
        by_model: list[float],
        *,
        config: SpeculationConfig = AUTO,
        pass_cost: float = PASS_COST,
        prompt_len: int = LONG_PROMPT,
        output_len: int = 160,
    ) -> None:
        self._lens = prompt_len, output_len
        has_model = config.model is not None
        super().__init__(
            self._trace_of("suffix", CAP, by_text),
            Machine(costs=cost_model(pass_cost if has_model else None), draft_overhead_s=0.0),
            lambda costs, clock: SpeculationControl(
                config, costs, make_native=make_native, num_slots=64, clock=clock, times_itself=False
            ),
            model_trace=self._trace_of("draft_model", CAP, [*by_model]) if has_model else None,
        )
        self.chosen: list[list[tuple[str, int]]] = [[] for _ in by_text]

    def serve(self, clients: int) -> Outcome:
        prompt_len, output_len = self._lens
        arrivals = (
            Arrival(at_s=None, prompt_len=prompt_len, output_len=output_len, trace=number)
            for number in range(len(self.chosen))
        )
        return self.run(arrivals, clients=clients, duration_s=None)

    def share(self, number: int, method: str, *, after: int = 0) -> float:
        """Of the request's steps with a draft request, from `after` on: those in which this method drafted."""
        steps = self.chosen[number][after:]
        return sum(name == method and length > 0 for name, length in steps) / len(steps)

    def _draft(self) -> Drafts | None:
        drafts = super()._draft()
        if drafts is not None:
            numbers = {each.held_slot: int(each.request.request_id) for each in self.scheduler._running}
            for (slot, method), length in zip(
                named_drafts(drafts.table), drafts.table.lengths.tolist(), strict=True
            ):
                self.chosen[numbers[slot]].append((method, length))
        return drafts

    def _trace_of(self, method: str, cap: int, chances: list[float | tuple[float, float] | None]) -> Trace:
        requests = []
        for seed, chance in enumerate(chances):
            of_both = chance if isinstance(chance, tuple) else (chance, chance)
            first, second = (self._half(method, cap, each, seed) for each in of_both)
            requests.append(
                replace(
                    first,
                    runs=first.runs + second.runs,
                    lengths=first.lengths + second.lengths,
                    confidences=first.confidences + second.confidences,
                    methods=first.methods + second.methods,
                )
            )
        named = iid_trace(0.5, max_tokens=cap, num_requests=1, method=method)
        return replace(named, requests=tuple(requests))

    def _half(self, method: str, cap: int, chance: float | None, seed: int) -> RequestTrace:
        prompt_len, output_len = self._lens
        count = output_len // 2
        trace = iid_trace(
            chance or 0.0, max_tokens=cap, num_requests=1, prompt_len=prompt_len, output_len=count, seed=seed
        )
        length = 0 if chance is None else cap
        confidences = ((CONFIDENCE[method],) * length,) * count
        return replace(trace.requests[0], lengths=(length,) * count, confidences=confidences)


def cost_model(pass_cost: float | None) -> CostModel:
    seconds = [each / 1000 for each in MILLISECONDS]
    tables = {
        Role.STEP: CostTable(rows=ROWS, seconds=tuple(seconds)),
        Role.TEXT: CostTable(rows=(1, 2), seconds=(3e-5, 6e-5)),
    }
    if pass_cost is not None:
        tables[Role.PASS] = CostTable(rows=ROWS, seconds=tuple(pass_cost * each for each in seconds))
    return CostModel(StepTimes(tables=tables))


def methods_of(outcome: Outcome) -> dict[str, MethodStats]:
    assert outcome.speculation is not None
    return {each.method: each for each in outcome.speculation.methods}


def rate(outcome: Outcome) -> float:
    """Tokens a second of a request, from its first token on: most of the time before it is its prompt's."""
    seconds = sum(each.finished_s - each.first_s for each in outcome.served)
    return sum(each.num_tokens for each in outcome.served) / seconds


def test_what_the_model_would_have_to_read_first_is_not_charged_to_drafts_from_text() -> None:
    simulation = AutoSimulation([0.95], [0.7])
    outcome = simulation.serve(1)
    assert outcome.verified / outcome.turns > 3.0
    assert methods_of(outcome)["suffix"].accepted > 0.9 * outcome.accepted
    assert simulation.share(0, "suffix") > 0.9


@pytest.mark.parametrize("clients", [1, 4])
@pytest.mark.full(but=("4",))
def test_where_text_is_copied_auto_with_a_model_is_as_fast_as_suffix_alone(clients: int) -> None:
    text, model = [0.95] * 16, [0.7] * 16
    alone = rate(AutoSimulation([*text], model, config=SUFFIX, output_len=1000).serve(clients))
    assert rate(AutoSimulation([*text], model, output_len=1000).serve(clients)) >= 0.97 * alone


def test_where_text_has_nothing_the_model_drafts_and_no_more_than_its_own_cap() -> None:
    """Drafts from text may be longer."""
    simulation = AutoSimulation([None] * 4, [0.95] * 4, pass_cost=CHEAP_PASS_COST, prompt_len=32)
    simulation.serve(1)
    for number in range(4):
        assert simulation.share(number, "draft_model", after=5) > 0.9
    drafted = [length for steps in simulation.chosen for method, length in steps if method == "draft_model"]
    assert sum(drafted) / len(drafted) > 2
    assert MODEL_CAP - 2 <= max(drafted) <= MODEL_CAP

    copied = AutoSimulation([1.0], [0.95], pass_cost=CHEAP_PASS_COST, prompt_len=32)
    copied.serve(1)
    assert max(length for _, length in copied.chosen[0]) == CAP


def test_of_one_batch_those_with_good_text_get_no_passes_and_the_others_do() -> None:
    simulation = AutoSimulation(
        [0.95, None, 0.95, 0.1], [0.8] * 4, pass_cost=CHEAP_PASS_COST, prompt_len=32, output_len=400
    )
    simulation.serve(4)
    steps = min(map(len, simulation.chosen))  # with all four
    for number, method in enumerate(("suffix", "draft_model", "suffix", "draft_model")):
        drafted = simulation.chosen[number][10:steps]
        assert sum(name == method and length > 0 for name, length in drafted) > 0.9 * len(drafted) > 10, number


@pytest.mark.parametrize(
    ("halves", "first", "second"),
    [((0.05, 1.0), "draft_model", "suffix"), ((1.0, 0.05), "suffix", "draft_model")],
)
def test_while_the_model_drafts_text_goes_on_being_learned_of(
    halves: tuple[float, float], first: str, second: str
) -> None:
    """The drafts from text become good, or bad, in the middle of the answer."""
    simulation = AutoSimulation([halves], [0.8], pass_cost=CHEAP_PASS_COST, prompt_len=32, output_len=600)
    simulation.serve(1)
    steps = len(simulation.chosen[0])
    assert simulation.chosen[0][steps // 10][0] == first
    assert simulation.share(0, second, after=9 * steps // 10) > 0.9
