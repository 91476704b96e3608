"""Whether a step's drafts are looked at before the last layer, where, and whether rows then leave. No torch.

Owns the decision and its hysteresis. Everything it goes by is measured: what a look costs, which share of the
drafted rows leaves, how long steps take by their rows. A look that prunes nothing (shadow) is how it learns.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from faser.config.speculation import SpeculationConfig
from faser.engine.control.timing.cost_model import CostModel
from faser.engine.execution.pruning.calibration import PruneCalibration
from faser.errors import ConfigError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

AUTO, ON, OFF = MODES = ("auto", "on", "off")
SHADOW_EVERY = 20  # steps with drafts, while pruning pays or might
SHADOW_OFTEN = 4  # the same where rows are to leave, and nothing is known that would let them
SHADOW_LOOKS = 3  # of one step, at most: a look is a hundredth of a step where rows cost little
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
    if not config.needs_passes:
        return (
            f"drafts of method {config.method} come from text alone, which names no likely tokens beside its own"
        )
    if config.draft_sample_method == "probabilistic":
        return "drafts that are drawn (draft_sample_method probabilistic) are verified with their probabilities"
    return None


def candidate_layers(num_layers: int) -> tuple[int, ...]:
    """Layers after which to look: about a sixth, a quarter, a third, half, two thirds, five sixths of all.

    The later ones save less, and know more (benchmarks/prune_table.py). Raises ConfigError below 2 layers.
    """
    if num_layers < 2:
        raise ConfigError(f"early pruning needs a target of at least 2 layers; this one has {num_layers}")
    layers = (round(num_layers * twelfths / 12) for twelfths in (2, 3, 4, 6, 8, 10))
    return tuple(sorted({min(max(1, layer), num_layers - 1) for layer in layers}))


class PruneGate:
    """Decides for one engine. mode: auto prunes where a gain is expected, on wherever it is calibrated.

    num_layers: of the target. most: tokens that a drafted one is compared with.
    """

    def __init__(self, mode: str, *, num_layers: int, most: int, costs: CostModel) -> None:
        assert mode in ("auto", "on"), f"early pruning that is {mode} has no gate"
        self._usual = mode
        self.use(None)
        self.layers = candidate_layers(num_layers)
        self._upper = 1 - np.array(self.layers) / num_layers  # share of layers behind the look
        self._shadows = -(-len(self.layers) // SHADOW_LOOKS)  # so many look at all of them
        self._turn = 0
        self._costs = costs
        self._calibration = PruneCalibration(len(self.layers), most)
        self._shares = np.zeros(len(self.layers))  # of drafted rows, how many leave
        self._look_s = np.zeros(len(self.layers))
        self._looks = np.zeros(len(self.layers), dtype=np.int64)
        self._tokens = 1.0  # that a step brings
        self.gain = 0.0  # that is expected of pruning, followed; a share of the step's time
        self._since_shadow = self._interval = SHADOW_EVERY
        self.active = False  # whether a gain is believed in

    def use(self, mode: str | None) -> None:
        """From the next step on this mode, off among them; None: as at the beginning. What was learned stays.

        Raises ConfigError for a mode that is none.
        """
        mode = mode or self._usual
        if mode not in MODES:
            raise ConfigError(f"early pruning is {mode!r}; it must be one of {', '.join(MODES)}")
        self._forced, self._rests = mode == ON, mode == OFF

    def may_look(self) -> bool:
        """Whether drafts that are about to be made may be looked at: in this step, or in the one after it."""
        if self._rests:
            return False
        return (
            self._since_shadow + 2 >= self._interval
            or self.active
            or (self._forced and bool(self._calibration.usable.any()))
        )

    def ask(self, num_rows: int, num_drafts: int, *, named: bool) -> Split:
        """For a step of num_rows rows, num_drafts of them drafted. named: their likely tokens are there."""
        if self._rests:
            return UNSPLIT
        self._since_shadow += 1
        step_s = self._costs.step_s(num_rows)
        self._interval = self._shadow_interval(num_rows, num_drafts, step_s)
        if named and self._since_shadow >= self._interval:
            return self._shadow()
        if not self._calibration.usable.any():
            return UNSPLIT
        gains = self._gains_s(num_rows, num_drafts, step_s)
        best = int(gains.argmax())
        self._follow(float(gains[best]) / max(step_s, 1e-9))
        if not named or not (self.active or self._forced):
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

    def _shadow(self) -> Split:
        """A look at a part of the candidates, spread over all; the next shadow has another part."""
        self._since_shadow = 0
        self._turn = (self._turn + 1) % self._shadows
        return Split(layers=tuple(enumerate(self.layers))[self._turn :: self._shadows])

    def _shadow_interval(self, num_rows: int, num_drafts: int, step_s: float) -> int:
        if self._forced and not self._calibration.usable.any():
            return SHADOW_OFTEN
        if self._forced or self.active:
            return SHADOW_EVERY
        best_s = self._saving_s(num_rows, np.array([_PROMISING * num_drafts]), step_s) * self._upper[0]
        return SHADOW_EVERY if best_s[0] > _LEAST_GAIN * step_s else _SHADOW_SELDOM

    def _gains_s(self, num_rows: int, num_drafts: int, step_s: float) -> Floats:
        """[L] seconds saved, less the look, less what falsely pruned tokens are worth: at most all rows that left.

        Minus infinity where there is no threshold.
        """
        leaving = self._shares * num_drafts
        token_s = step_s / max(self._tokens, 1.0)
        false_s = leaving * self._calibration.false_shares * token_s
        gains = self._saving_s(num_rows, leaving, step_s) * self._upper - self._look_s - false_s
        return np.where(self._calibration.usable, gains, -np.inf)

    def _saving_s(self, num_rows: int, leaving: Floats, step_s: float) -> Floats:
        """[N] of all layers, for so many rows less. The staircase counts: rows that cross no edge save nothing."""
        whole = leaving.astype(np.int64)
        left = np.maximum(num_rows - np.concatenate((whole, whole + 1)), 1)
        here_s, below_s = self._costs.step_s(left).reshape(2, -1)
        return step_s - (here_s + (leaving - whole) * (below_s - here_s))

    def _follow(self, gain: float) -> None:
        """Hysteresis: on at a gain that is more than noise, off at a loss, both of them followed over steps."""
        self.gain += _FOLLOW * (gain - self.gain)
        if self.gain > _LEAST_GAIN:
            self.active = True
        elif self.gain < 0:
            self.active = False
