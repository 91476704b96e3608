"""Whether a step's drafts are looked at before the last layer, where, and whether rows then leave. No torch.

Owns the decision and its hysteresis. Everything it goes by is measured: what a look costs, which share of the
drafted rows leaves, how long steps take by their rows. A look that prunes nothing (shadow) is how it learns.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from faser.engine.cost_model import CostModel
from faser.engine.spec.prune_calibration import PruneCalibration
from faser.errors import ConfigError
from faser.speculation import SpeculationConfig

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

MODES = ("auto", "on", "off")
SHADOW_EVERY = 20  # steps with drafts, while pruning pays or might
_SHADOW_SELDOM = 640  # the same where even the best pruning would save nothing
_FOLLOW = 0.1
_LEAST_GAIN = 0.01  # of the step's time: what is smaller is noise
_PROMISING = 0.5  # share of drafted rows that leaves, at the best


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Where a forward stops for a look. layers: (index among the candidates, layers run before it), ascending.

    prunes: rows leave after the look, of which there is one then. Otherwise all go on, and only lessons are drawn.
    """

    layers: tuple[tuple[int, int], ...] = ()
    prunes: bool = False


UNSPLIT = Split()


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One look at one step's drafts. flagged_rows: rows that leave, or would. seconds: of looking and leaving."""

    layer: int
    num_drafts: int
    flagged_rows: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """What became of tokens looked at, [T] each, all of them judged. counts: of tokens that beat them."""

    layer: int
    temperatures: Floats
    counts: Ints
    accepted: NDArray[np.bool_]


def prunes(mode: str, config: SpeculationConfig) -> bool:
    """Whether an engine with this configuration has early pruning at all.

    Raises ConfigError for a mode that is none, and for `on` where drafts cannot be pruned exactly or usefully.
    """
    if mode not in MODES:
        raise ConfigError(f"early pruning is {mode!r}; it must be one of {', '.join(MODES)}")
    obstacle = _obstacle(config)
    if mode == "on" and obstacle is not None:
        raise ConfigError(f"early pruning cannot be on: {obstacle}")
    return mode != "off" and obstacle is None


def _obstacle(config: SpeculationConfig) -> str | None:
    if config.policy == "off":
        return "policy off never drafts"
    if config.synthetic:
        return "synthetic rejection accepts drafts without looking at them"
    if config.method in ("ngram", "suffix") or (config.method == "auto" and config.model is None):
        return (
            f"drafts of method {config.method} come from text alone, which names no likely tokens beside its own"
        )
    if config.draft_sample_method == "probabilistic":
        return "drafts that are drawn (draft_sample_method probabilistic) are verified with their probabilities"
    return None


def candidate_layers(num_layers: int) -> tuple[int, ...]:
    """Layers after which to look: about a sixth, a quarter, a third of all. Raises ConfigError below 2 layers."""
    if num_layers < 2:
        raise ConfigError(f"early pruning needs a target of at least 2 layers; this one has {num_layers}")
    return tuple(sorted({max(1, round(num_layers / part)) for part in (6, 4, 3)}))


class PruneGate:
    """Decides for one engine. mode: auto prunes where a gain is expected, on wherever it is calibrated.

    num_layers: of the target. most: tokens that a drafted one is compared with.
    """

    def __init__(self, mode: str, *, num_layers: int, most: int, costs: CostModel) -> None:
        assert mode in ("auto", "on"), f"early pruning that is {mode} has no gate"
        self._forced = mode == "on"
        self.layers = candidate_layers(num_layers)
        self._upper = tuple(1 - layer / num_layers for layer in self.layers)  # share of layers behind the look
        self._costs = costs
        self._calibration = PruneCalibration(len(self.layers), most)
        self._shares = np.zeros(len(self.layers))  # of drafted rows, how many leave
        self._look_s = np.zeros(len(self.layers))
        self._looks = np.zeros(len(self.layers), dtype=np.int64)
        self._tokens = 1.0  # that a step brings
        self.gain = 0.0  # that is expected of pruning, followed; a share of the step's time
        self._since_shadow = SHADOW_EVERY
        self.active = False  # whether a gain is believed in

    def ask(self, num_rows: int, num_drafts: int) -> Split:
        """For a step of num_rows rows, num_drafts of them drafted."""
        self._since_shadow += 1
        step_s = self._costs.step_s(num_rows)
        if self._since_shadow >= self._shadow_interval(num_rows, num_drafts, step_s):
            self._since_shadow = 0
            return Split(layers=tuple(enumerate(self.layers)))
        usable = [at for at in range(len(self.layers)) if self._calibration.usable(at)]
        if not usable:
            return UNSPLIT
        gains = {at: self._gain_s(at, num_rows, num_drafts, step_s) for at in usable}
        best = max(usable, key=gains.__getitem__)
        self._follow(gains[best] / max(step_s, 1e-9))
        if not (self.active or self._forced):
            return UNSPLIT
        return Split(layers=((best, self.layers[best]),), prunes=True)

    def thresholds(self, layer: int, temperatures: Floats) -> Ints:
        """[T] counts from which on a token is flagged. layer: index among the candidates."""
        return self._calibration.thresholds(layer, temperatures)

    def looked(self, look: Look) -> None:
        """A look was taken."""
        at = look.layer
        weight = max(_FOLLOW, 1 / (self._looks[at] + 1))
        self._looks[at] += 1
        self._look_s[at] += weight * (look.seconds - self._look_s[at])
        self._shares[at] += weight * (look.flagged_rows / max(look.num_drafts, 1) - self._shares[at])

    def learn(self, lessons: list[Lesson], num_tokens: int) -> None:
        """What became of a step that was looked at. num_tokens: that it brought."""
        self._tokens += _FOLLOW * (num_tokens - self._tokens)
        for lesson in lessons:
            self._calibration.add(lesson.layer, lesson.temperatures, lesson.counts, lesson.accepted)

    def _shadow_interval(self, num_rows: int, num_drafts: int, step_s: float) -> int:
        if self._forced or self.active:
            return SHADOW_EVERY
        best_s = self._saving_s(0, num_rows, _PROMISING * num_drafts, step_s)
        return SHADOW_EVERY if best_s > _LEAST_GAIN * step_s else _SHADOW_SELDOM

    def _gain_s(self, at: int, num_rows: int, num_drafts: int, step_s: float) -> float:
        """Seconds saved, less the look, less what falsely pruned tokens are worth: at most every row that left."""
        leaving = float(self._shares[at]) * num_drafts
        token_s = step_s / max(self._tokens, 1.0)
        false_s = leaving * self._calibration.false_share(at) * token_s
        return self._saving_s(at, num_rows, leaving, step_s) - float(self._look_s[at]) - false_s

    def _saving_s(self, at: int, num_rows: int, leaving: float, step_s: float) -> float:
        """Of the layers behind a look. The staircase counts: rows that cross no edge save nothing."""
        whole = int(leaving)
        less_s = self._costs.step_s(num_rows - whole)
        if leaving > whole:
            less_s += (leaving - whole) * (self._costs.step_s(num_rows - whole - 1) - less_s)
        return (step_s - less_s) * self._upper[at]

    def _follow(self, gain: float) -> None:
        """Hysteresis: on at a gain that is more than noise, off at a loss, both of them followed over steps."""
        self.gain += _FOLLOW * (gain - self.gain)
        if self.gain > _LEAST_GAIN:
            self.active = True
        elif self.gain < 0:
            self.active = False
