"""Decides whether a forward stops to look at its drafted tokens, where, and whether rows then leave. No torch.

It goes by measurements alone: what a look costs, which share of the drafted rows would leave, how long steps take
by their rows. A shadow step stops and looks without letting rows leave; the gate learns from it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from faser.engine.execution.pruning.calibration import PruneCalibration
from faser.engine.execution.pruning.step_seconds import StepSeconds
from faser.errors import ConfigError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

AUTO, ON, OFF = MODES = ("auto", "on", "off")
SHADOW_EVERY = 20  # steps with drafts, while pruning pays or might
SHADOW_OFTEN = 4  # the same in mode `on` before any threshold is known
SHADOW_LOOKS = 3  # of one step, at most: where rows cost little, a look costs a hundredth of a step
_SHADOW_SELDOM = 640  # steps with drafts, where even the best pruning would save nothing
_FOLLOW = 0.1  # weight of the newest step in running means
_LEAST_GAIN = 0.01  # of the step's time: a smaller gain is noise
_PROMISING = 0.5  # share of the drafted rows that leaves at best


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Where a forward stops for a look. layers: (index among the candidates, layers run before it), ascending.

    prunes: flagged rows leave after the look, and there is only one look. Otherwise all rows go on.
    """

    layers: tuple[tuple[int, int], ...] = ()
    prunes: bool = False


UNSPLIT = Split()


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What one look at one step's drafted tokens found.

    layer: index among the candidates. flagged_rows: drafted rows that leave, or would. seconds: of looking, and of
    leaving where rows left.
    """

    layer: int
    num_drafts: int
    flagged_rows: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """What became of the T verified tokens of a look. counts: [T] tokens that beat each of them."""

    layer: int
    temperatures: Floats
    counts: Ints
    accepted: NDArray[np.bool_]


def candidate_layers(num_layers: int) -> tuple[int, ...]:
    """Layers after which to look: about a sixth, a quarter, a third, half, two thirds, five sixths of all.

    Later looks save less and know more. Raises ConfigError below 2 layers.
    """
    if num_layers < 2:
        raise ConfigError(f"early pruning needs a target of at least 2 layers; this one has {num_layers}")
    layers = (round(num_layers * twelfths / 12) for twelfths in (2, 3, 4, 6, 8, 10))
    return tuple(sorted({min(max(1, layer), num_layers - 1) for layer in layers}))


class PruneGate:
    """One for an engine. mode: `auto` prunes where it expects a gain, `on` wherever a threshold is known.

    num_layers: of the target. num_top: likely tokens that a drafted one is compared with. step_seconds: only read.

    layers: after which it may look. gain: share of the step's time that pruning is expected to save, as a running
    mean. active: whether the gate believes in a gain. All three are only to be read.
    """

    def __init__(self, mode: str, *, num_layers: int, num_top: int, step_seconds: StepSeconds) -> None:
        assert mode in (AUTO, ON), f"early pruning that is {mode} has no gate"
        self._configured_mode = mode
        self.use(None)
        self.layers = candidate_layers(num_layers)
        self._share_after = 1 - np.array(self.layers) / num_layers  # of the layers, those after the look
        self._num_parts = -(-len(self.layers) // SHADOW_LOOKS)  # shadow steps that look at all candidates together
        self._part = 0
        self._step_seconds = step_seconds
        self._calibration = PruneCalibration(len(self.layers), num_top)
        self._leaving_shares = np.zeros(len(self.layers))  # of the drafted rows
        self._look_s = np.zeros(len(self.layers))
        self._num_looks = np.zeros(len(self.layers), dtype=np.int64)
        self._step_tokens = 1.0  # tokens that a step brings, as a running mean
        self._since_shadow = self._interval = SHADOW_EVERY
        self.gain = 0.0
        self.active = False

    def use(self, mode: str | None) -> None:
        """Work in this mode from the next step on, `off` included; None: in the configured mode.

        What it has learned stays. Raises ConfigError for an unknown mode.
        """
        mode = mode or self._configured_mode
        if mode not in MODES:
            raise ConfigError(f"early pruning is {mode!r}; it must be one of {', '.join(MODES)}")
        self._mode = mode

    def may_look(self) -> bool:
        """Whether drafts that are made now may be looked at, in the next step or in the one after it."""
        if self._mode == OFF:
            return False
        return (
            self._since_shadow + 2 >= self._interval
            or self.active
            or (self._mode == ON and bool(self._calibration.usable.any()))
        )

    def ask(self, num_rows: int, num_drafts: int, *, named: bool) -> Split:
        """Where a step of num_rows rows, num_drafts of them drafted, stops. named: likely tokens are there."""
        if self._mode == OFF:
            return UNSPLIT
        self._since_shadow += 1
        step_s = self._step_seconds.of(num_rows)
        self._interval = self._shadow_interval(num_rows, num_drafts, step_s)
        if named and self._since_shadow >= self._interval:
            return self._shadow()
        if not self._calibration.usable.any():
            return UNSPLIT
        gains_s = self._gains_s(num_rows, num_drafts, step_s)
        best = int(gains_s.argmax())
        self._follow_gain(float(gains_s[best]) / max(step_s, 1e-9))
        if not named or not (self.active or self._mode == ON):
            return UNSPLIT
        return Split(layers=((best, self.layers[best]),), prunes=True)

    def thresholds(self, layer: int, temperatures: Floats) -> Ints:
        """[T] counts from which on a token is flagged. layer: index among the candidates."""
        return self._calibration.thresholds(layer, temperatures)

    def looked(self, look: Look) -> None:
        at = look.layer
        weight = max(_FOLLOW, 1 / (self._num_looks[at] + 1))
        self._num_looks[at] += 1
        self._look_s[at] += weight * (look.seconds - self._look_s[at])
        leaving_share = look.flagged_rows / max(look.num_drafts, 1)
        self._leaving_shares[at] += weight * (leaving_share - self._leaving_shares[at])

    def learn(self, lessons: list[Lesson], num_tokens: int) -> None:
        """A step that was looked at brought num_tokens tokens."""
        self._step_tokens += _FOLLOW * (num_tokens - self._step_tokens)
        for lesson in lessons:
            self._calibration.add(lesson.layer, lesson.temperatures, lesson.counts, lesson.accepted)

    def _shadow(self) -> Split:
        """Looks at a part of the candidates, spread over all layers; the next shadow step takes the next part."""
        self._since_shadow = 0
        self._part = (self._part + 1) % self._num_parts
        return Split(layers=tuple(enumerate(self.layers))[self._part :: self._num_parts])

    def _shadow_interval(self, num_rows: int, num_drafts: int, step_s: float) -> int:
        if self._mode == ON and not self._calibration.usable.any():
            return SHADOW_OFTEN
        if self._mode == ON or self.active:
            return SHADOW_EVERY
        best_s = self._saving_s(num_rows, np.array([_PROMISING * num_drafts]), step_s) * self._share_after[0]
        return SHADOW_EVERY if best_s[0] > _LEAST_GAIN * step_s else _SHADOW_SELDOM

    def _gains_s(self, num_rows: int, num_drafts: int, step_s: float) -> Floats:
        """[L] seconds saved at each candidate, less the look, less the tokens that false prunes lose.

        Counts every row that leaves as a false prune with the bound's share. Minus infinity without a threshold.
        """
        leaving = self._leaving_shares * num_drafts
        token_s = step_s / max(self._step_tokens, 1.0)
        false_s = leaving * self._calibration.false_shares * token_s
        gains_s = self._saving_s(num_rows, leaving, step_s) * self._share_after - self._look_s - false_s
        return np.where(self._calibration.usable, gains_s, -np.inf)

    def _saving_s(self, num_rows: int, leaving: Floats, step_s: float) -> Floats:
        """[N] seconds that a step would take less without `leaving` of its rows, [N], in all layers.

        Step times are a staircase: rows that cross no edge of it save nothing.
        """
        whole = leaving.astype(np.int64)
        staying = np.maximum(num_rows - np.concatenate((whole, whole + 1)), 1)
        here_s, below_s = self._step_seconds.of(staying).reshape(2, -1)
        return step_s - (here_s + (leaving - whole) * (below_s - here_s))

    def _follow_gain(self, gain: float) -> None:
        """Hysteresis: active from a gain that is more than noise, inactive at a loss, both as running means."""
        self.gain += _FOLLOW * (gain - self.gain)
        if self.gain > _LEAST_GAIN:
            self.active = True
        elif self.gain < 0:
            self.active = False
