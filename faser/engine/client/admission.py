"""Admission: whether a newcomer's latency targets can be met, and what becomes of it if not.

Owns what is in flight, as far as a prediction needs it, and how wrong predictions have been. Times are seconds of
one clock, which the caller reads. A request without targets is always let in, and nothing is predicted for it.

The first token comes after the rest of the step that runs, the prompts that are due before (the scheduler computes
prompts by that order) and the own one, and a place if all are taken; each further one after a step of all samples
that will run by then (TargetRoom), which prompts that come meanwhile lengthen. Requests that other clients send
share the engine fairly, which a prediction leaves out. Its errors are followed: targets are compared with what
nine in ten of the latest requests would have needed.

Steps tell the pace: after a slow moment every request would be refused, none would run, and the pace would remain.
An engine on which nothing runs therefore takes a request now and then, whatever is predicted.

A request whose targets were given up, because it was degraded or is patient, is looked at again while it waits:
when the line has become shorter it gets back the best class whose targets can still be met.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from faser.engine.client.affinity import PrefixReach
from faser.engine.contract.latency_model import Pace
from faser.engine.contract.target_room import TargetRoom, due_s
from faser.errors import TargetError
from faser.optional import present
from faser.types.outlook import Decision, Target
from faser.types.request import NO_TARGETS, REFUSE, WAIT, Request, Slo, SpeculationParams

OnDecision = Callable[[str, Decision, Target], None]

# Reasoned; attainment by load with all of them is in results/steering.json.
_SHARE = 0.9  # of requests that need at most what is compared with the target
_FIRST_MARGIN, _MOST_MARGIN = 1.2, 4.0  # times the prediction
_FOLLOW = 0.05  # of the logarithm of a margin, for a request
_PROMPTS_S = 10.0  # of first tokens that say how much prompts lengthen steps
_FOLLOW_ANSWERS = 0.05  # weight of the newest answer
_MOST_RETRY_S = 600
_LEAST_SPARE = 0.1  # share of time that prompts leave to steps: more than 10 times as long is no prediction
_STALE_S = 5.0  # without a first token, after which an idle engine's pace has to be measured again
_LOOK_PERIOD_S = 0.05  # between looks at requests whose targets were given up
_MOST_LOOKS = 4  # of predictions that fail, at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Seconds of a newcomer: from its arrival to its first token, and per further one."""

    ttft_s: float
    tpot_s: float


@dataclass(slots=True)
class _InFlight:
    """prompt: tokens that are left to compute. prediction: without margin; None: there is none.

    due_s: as the scheduler's. given_up: the request with targets that it could not keep, the best class first.
    has_begun: its prompt has.
    """

    request: Request
    due_s: float
    prompt: int
    samples: int
    is_paced: bool
    prediction: Prediction | None
    given_up: tuple[Request, ...] = ()
    has_begun: bool = False
    has_first: bool = False


class Admission:
    """classes: settings by the name of a class, as which a request may run instead of its own."""

    def __init__(self, classes: Callable[[str], SpeculationParams], on_decision: OnDecision) -> None:
        self._classes, self._on_decision = classes, on_decision
        self._open: dict[str, _InFlight] = {}
        self._hoping: deque[str] = deque()  # ids of those whose targets were given up, the next to look at first
        self._look_due_s = self._measured_s = 0.0
        self._num_samples = self._num_paced = 0
        self._room = TargetRoom()
        self._prefixes = PrefixReach()
        self._prompt_load, self._load_at_s = 0.0, 0.0  # seconds of prompts a second
        self._mean_answer, self._num_answers = 64.0, 0
        self.first_margin, self.token_margin = Margin(), Margin()
        self.pace: Pace | None = None

    def admit(self, request: Request, now_s: float) -> Request:
        """The request as it is to be served. Raises TargetError for one that its class refuses.

        Without a pace, which an engine has once it has run, every request is let in, and is due at its target.
        """
        given_up: tuple[Request, ...] = ()
        while True:
            asked = request.speculation
            prediction, missed = self._judge(request, now_s)
            if asked.slo != NO_TARGETS and missed is Target.NONE:
                self._on_decision(asked.class_name, Decision.MET, missed)
            if missed is Target.NONE:
                return self._enter(_due(request), prediction, given_up)
            assert prediction is not None
            is_stale = not self._open and now_s >= self._measured_s + _STALE_S
            if asked.admission == WAIT or (asked.admission == REFUSE and is_stale):
                self._on_decision(asked.class_name, Decision.WAITS, missed)
                if is_stale or self._missed(prediction, asked.slo) is Target.NONE:
                    return self._enter(_due(request), prediction, given_up)
                return self._enter(replace(request, is_patient=True), None, (*given_up, request))
            if asked.admission == REFUSE:
                self._on_decision(asked.class_name, Decision.REFUSED, missed)
                raise self._refusal(asked.slo, prediction, missed)
            self._on_decision(asked.class_name, Decision.DEGRADED, missed)
            given_up = (*given_up, request)
            request = _as_class(request, self._classes(asked.admission))

    def shortfall(self, request: Request, now_s: float) -> int:
        """Return how far from its targets a newcomer would be served here; 0: they can be met. Less is better."""
        num_classes = 0
        while True:
            _, missed = self._judge(request, now_s)
            if missed is Target.NONE or request.speculation.admission in (WAIT, REFUSE):
                return 2 * num_classes + (missed is not Target.NONE)
            num_classes += 1
            request = _as_class(request, self._classes(request.speculation.admission))

    def restore(self, now_s: float) -> list[Request]:
        """Requests, as they are to be served from now on, that get back targets which had been given up.

        To be called when the line may have become shorter; the caller tells the engine. Looks at a few requests at
        a time, and at one no more once its first token has come or is too late.
        """
        if not self._hoping or self.pace is None or now_s < self._look_due_s:
            return []
        self._look_due_s = now_s + _LOOK_PERIOD_S
        restored: list[Request] = []
        num_failed = 0
        for _ in range(len(self._hoping)):
            request_id = self._hoping.popleft()
            found = self._open.get(request_id)
            if found is None or found.has_first or not any(_may_be_met(each, now_s) for each in found.given_up):
                continue
            self._leave(request_id)
            request = self._restored(found, now_s)
            if request is not None:
                restored.append(request)
                continue
            self._count(request_id, found)
            self._hoping.append(request_id)
            num_failed += 1
            if num_failed == _MOST_LOOKS:
                break
        return restored

    def _restored(self, found: _InFlight, now_s: float) -> Request | None:
        """One that has left, in the best class whose targets it can keep now; None: in none of them."""
        for place, request in enumerate(found.given_up):
            prediction, missed = self._judge(request, now_s)
            if missed is Target.NONE:
                self._on_decision(request.speculation.class_name, Decision.RESTORED, Target.NONE)
                return self._enter(_due(request), prediction, found.given_up[:place])
        return None

    def _judge(self, request: Request, now_s: float) -> tuple[Prediction | None, Target]:
        """Predict a newcomer's times, and the targets that they miss. None: there is no prediction."""
        slo = request.speculation.slo
        if self.pace is None or slo == NO_TARGETS:
            return None, Target.NONE
        prediction = self.predict(request, now_s)
        return prediction, self._missed(prediction, slo, *self._margins)

    def begun(self, uncomputed: Mapping[str, int]) -> None:
        """Take in how many tokens of the prompts that have begun the engine has yet to compute."""
        for request_id, num_tokens in uncomputed.items():
            if found := self._open.get(request_id):
                found.prompt, found.has_begun = num_tokens, True

    def first_token(self, request_id: str, now_s: float, *, num_cached: int = 0) -> None:
        """A request has its first token. num_cached: tokens of its prompt that were not computed."""
        found = self._open[request_id]
        request, self._measured_s = found.request, now_s
        found.has_begun = found.has_first = True
        self._prefixes.note(request, num_cached)
        if self.pace is not None and (found.is_paced or request.due_s is not None):
            # Other prompts are computed where they lengthen no step too much.
            computed = max(len(request.prompt_token_ids) - num_cached, 1)
            self._prompt_load = self._load(now_s) + float(self.pace.prompt_s(1.0, computed)) / _PROMPTS_S
            self._load_at_s = now_s
        if found.prediction is not None and request.due_s is not None:
            took_s, target_s = now_s - request.arrival_s, request.due_s - request.arrival_s
            self.first_margin.follow(took_s, found.prediction.ttft_s, target_s)

    def end(self, request_id: str, *, num_tokens: int, tpot_s: float | None) -> None:
        """A request has left, for whatever reason. num_tokens: of its longest sample."""
        found = self._leave(request_id)
        if num_tokens:
            self._num_answers += 1
            weight = max(_FOLLOW_ANSWERS, 1 / self._num_answers)
            self._mean_answer += weight * (num_tokens - self._mean_answer)
        target_ms = found.request.token_target_ms
        if tpot_s and found.prediction is not None and target_ms is not None:
            self.token_margin.follow(tpot_s, found.prediction.tpot_s, target_ms / 1000)

    def forget(self) -> None:
        """The engine has ended, and with it its pace."""
        self.pace = None

    def predict(self, request: Request, now_s: float) -> Prediction:
        """For a request that would be submitted now; needs a pace."""
        pace = self.pace
        assert pace is not None, "there is no pace yet"
        own_due_s = due_s(_due(request))
        ahead = sum(
            each.prompt for each in self._before(request) if not each.has_first and each.due_s <= own_due_s
        )
        prompts, samples = ahead + self._prefixes.uncached(request), request.sampling.n
        paced, unpaced, short = self._places(pace, request, now_s)
        beside = min(paced + unpaced, pace.num_slots - 1)
        step_s = float(pace.decoding_s(max(beside, 1)))
        wait_s = step_s / 2 if self._num_samples else 0.0
        if short > 0:  # places become free one by one, as answers end
            held = max(paced + unpaced if _is_paced(request) else unpaced, 1)
            wait_s += short * self._mean_answer * float(pace.token_s(min(held, pace.num_slots))) / held
        prompts_s = float(pace.prompt_steps(beside, prompts)) * float(pace.decoding_s(beside + 1))
        prompts_s += float(pace.prompt_s(beside, prompts))
        return Prediction(
            ttft_s=max(now_s - request.arrival_s, 0.0) + wait_s + prompts_s,
            tpot_s=float(pace.token_s(min(beside + samples, pace.num_slots))) / self._spare(now_s),
        )

    def _places(self, pace: Pace, request: Request, now_s: float) -> tuple[int, int, int]:
        """Paced and unpaced samples that will run next to a newcomer, and how many must end before it starts."""
        samples, paced, unpaced = request.sampling.n, self._num_paced, self._num_samples - self._num_paced
        before = sum(each.samples for each in self._before(request) if not each.is_paced)
        token_s = self._room.tightest_s(now_s, request.token_target_ms)
        if token_s is None:
            return 0, min(unpaced, pace.num_slots), before + samples - pace.num_slots
        self._room.fit(pace, token_s / self.token_margin.value * self._spare(now_s))
        if _is_paced(request):
            unpaced = min(unpaced, self._room.unpaced(paced + samples))
            return paced, unpaced, paced + unpaced + samples - pace.num_slots
        most = max(min(self._room.unpaced(paced), pace.num_slots - paced), 1)
        return paced, min(unpaced, most), before + samples - most

    def _before(self, request: Request) -> list[_InFlight]:
        """Those that have begun, and those that start before a newcomer.

        An unpaced one waits for a place that paced ones leave, so it delays no paced newcomer before it begins.
        """
        own_due_s, is_paced = due_s(_due(request)), _is_paced(request)
        return [
            each
            for each in self._open.values()
            if each.has_begun or (each.due_s <= own_due_s and (each.is_paced or not is_paced))
        ]

    @property
    def _margins(self) -> tuple[float, float]:
        """An idle engine keeps none: what was in the way of others is over, and margins learn again."""
        return (self.first_margin.value, self.token_margin.value) if self._open else (1.0, 1.0)

    def _missed(self, prediction: Prediction, slo: Slo, first: float = 1.0, token: float = 1.0) -> Target:
        """first, token: times the prediction, that a target is compared with."""
        if slo.ttft_ms is not None and prediction.ttft_s * first > slo.ttft_ms / 1000:
            return Target.TTFT
        if slo.tpot_ms is not None and prediction.tpot_s * token > slo.tpot_ms / 1000:
            return Target.TPOT
        return Target.NONE

    def _enter(
        self, request: Request, prediction: Prediction | None, given_up: tuple[Request, ...] = ()
    ) -> Request:
        found = _InFlight(
            request=request,
            due_s=due_s(request),
            prompt=self._prefixes.uncached(request),
            samples=request.sampling.n,
            is_paced=_is_paced(request),
            prediction=prediction,
            given_up=given_up,
        )
        self._count(request.request_id, found)
        if given_up:
            self._hoping.append(request.request_id)
        self._room.see(request.token_target_ms, request.arrival_s)
        return request

    def _count(self, request_id: str, found: _InFlight) -> None:
        self._open[request_id] = found
        self._num_samples += found.samples
        self._num_paced += found.samples if found.is_paced else 0

    def _leave(self, request_id: str) -> _InFlight:
        found = self._open.pop(request_id)
        self._num_samples -= found.samples
        self._num_paced -= found.samples if found.is_paced else 0
        return found

    def _spare(self, now_s: float) -> float:
        """The share of time that prompts leave to steps."""
        return max(1 - self._load(now_s), _LEAST_SPARE)

    def _load(self, now_s: float) -> float:
        return self._prompt_load * math.exp(-max(now_s - self._load_at_s, 0.0) / _PROMPTS_S)

    def _refusal(self, slo: Slo, prediction: Prediction, missed: Target) -> TargetError:
        assert self.pace is not None
        if missed is Target.TTFT:
            expected_s, target_ms = prediction.ttft_s * self.first_margin.value, slo.ttft_ms
            assert target_ms is not None
            wait_s = expected_s - target_ms / 1000
        else:
            expected_s, target_ms = prediction.tpot_s * self.token_margin.value, slo.tpot_ms
            assert target_ms is not None
            share = max(1 - target_ms / 1000 / expected_s, 0.0)  # of the samples that have to end
            wait_s = share * self._mean_answer * expected_s
        retry_s = min(max(math.ceil(wait_s), 1), _MOST_RETRY_S)
        return TargetError(
            f"the {missed.value.upper()} target of {target_ms:g} ms cannot be met now: "
            f"about {1000 * expected_s:.0f} ms are expected, with {len(self._open)} requests in flight; "
            f"retry after {retry_s} s",
            retry_after_s=retry_s,
        )


class Margin:
    """Factor on predicted times that _SHARE of measured times need: a quantile, followed online.

    A time above it moves it up nine times as far as one below moves it down (Robbins and Monro, 1951). A time that
    is within its target needed nothing, however much longer than predicted it was: the engine computes prompts as
    late as they are due, and gives steps as many rows of prompts as targets leave.
    """

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = _FIRST_MARGIN

    def follow(self, measured_s: float, predicted_s: float, target_s: float) -> None:
        is_short = measured_s > target_s and measured_s > self.value * predicted_s
        moved = self.value * math.exp(_FOLLOW * (_SHARE if is_short else _SHARE - 1))
        self.value = min(max(moved, 1.0), _MOST_MARGIN)


def _due(request: Request) -> Request:
    ttft_ms = request.speculation.slo.ttft_ms
    return request if ttft_ms is None else replace(request, due_s=request.arrival_s + ttft_ms / 1000)


def _may_be_met(request: Request, now_s: float) -> bool:
    last_s = _due(request).due_s
    return last_s is None or now_s < last_s


def _is_paced(request: Request) -> bool:
    return request.token_target_ms is not None


def _as_class(request: Request, settings: SpeculationParams) -> Request:
    """The request with the class's targets and limits, and never more drafts than it asked for."""
    own = request.speculation
    caps = present((own.max_tokens, settings.max_tokens))
    enabled = own.enabled and settings.enabled
    return replace(
        request,
        due_s=None,
        speculation=replace(
            settings,
            enabled=enabled,
            max_tokens=0 if not enabled else min(caps, default=None),
            trace=own.trace,
        ),
    )
