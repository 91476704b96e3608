"""HostGaps: for how long a step leaves the device without work, because the host has to work first.

    device                | drafts |               | step |
    host   decide, look up         | plan, prepare |      | commit, learn, hand over

A step that is launched before the one in flight has ended has no gap. Another one has: deciding, planning and
preparing inputs before it; committing it, learning from it and the hand-over to the front-end after it. A step
with drafts always waits, so its gap is a cost of drafting. Asking the policy is a reason to wait as well.

Owns an estimate for each kind of step, which follows the measured gaps. Control plane, no torch.
"""

from enum import IntEnum


class GapKind(IntEnum):
    """What a gap belongs to: a step that was launched ahead; one for which the policy was not asked; one for which
    it was, and no sequence drafts; one with drafts that were made before it; one with drafts made during it.
    """

    AHEAD = 0
    UNASKED = 1
    ASKED = 2
    DRAFTED = 3
    OVERLAPPED = 4


# Seconds of a step, and of each of its sequences, by GapKind. DRAFTED and OVERLAPPED are lines through the gaps of
# 1, 16 and 64 sequences in benchmarks/results/host-gap.json (1.1, 1.4, 2.2 ms and 0.8, 1.1, 1.7 ms). UNASKED and
# ASKED come from the same benchmark with the policy asked in every fifth step. AHEAD is UNASKED, all of it hidden.
_USUAL = ((0.5e-3, 5e-6), (0.5e-3, 5e-6), (0.8e-3, 5e-6), (1.1e-3, 17e-6), (0.8e-3, 14e-6))
_EXPOSED = (0.0, 1.0, 1.0, 1.0, 1.0)  # share of the usual gap, before it is measured
_FOLLOW = 0.05  # weight of the newest gap, once there are enough
_PRIOR_STEPS = 4  # the usual gap counts as this many measured ones: after 16 steps it weighs a fifth
_OUTLIER = 3.0  # a gap counts as at most this many times the estimate: a pause is no new machine


class HostGaps:
    """Gaps in seconds, by GapKind and number of sequences.

    schedules_async: steps without drafts are launched ahead where they can be. Then gaps are the usual ones until
    they are measured. Otherwise all steps wait, only differences count, and they are 0 until they are measured.
    """

    def __init__(self, *, schedules_async: bool = False) -> None:
        self.schedules_async = schedules_async
        self._factors = [*_EXPOSED] if schedules_async else [0.0] * len(GapKind)  # measured over usual gap
        self._num_steps = [_PRIOR_STEPS if schedules_async else 0] * len(GapKind)  # that each factor stands for
        self._measured_unasked = False

    def observe(self, kind: GapKind, gap_s: float, num_sequences: int, *, deciding_s: float = 0.0) -> None:
        """A step of this kind had a gap, deciding_s of which went into deciding and learning.

        Until a step has been measured that waited without asking the policy, the others stand for it, less the
        time of deciding.
        """
        self._follow(kind, gap_s, num_sequences)
        if kind is GapKind.UNASKED:
            self._measured_unasked = True
        elif kind is not GapKind.AHEAD and not self._measured_unasked:
            self._follow(GapKind.UNASKED, gap_s - deciding_s, num_sequences)

    def drafting_s(self, num_sequences: int, *, hidden: bool, overlapped: bool = False) -> float:
        """By how much the gap of a step with drafts is longer than that of one without.

        hidden: the step without drafts would be launched ahead. overlapped: the drafts are made during the step.
        """
        kind = GapKind.OVERLAPPED if overlapped else GapKind.DRAFTED
        return self._extra_s(kind, num_sequences, hidden=hidden)

    def asking_s(self, num_sequences: int, *, hidden: bool) -> float:
        """By how much the gap of a step without drafts is longer where the policy is asked; hidden: as above."""
        return self._extra_s(GapKind.ASKED, num_sequences, hidden=hidden)

    def _extra_s(self, kind: GapKind, num_sequences: int, *, hidden: bool) -> float:
        plain = GapKind.AHEAD if hidden else GapKind.UNASKED
        return max(self._gap_s(kind, num_sequences) - self._gap_s(plain, num_sequences), 0.0)

    def _gap_s(self, kind: GapKind, num_sequences: int) -> float:
        return self._factors[kind] * _usual_s(kind, num_sequences)

    def _follow(self, kind: GapKind, gap_s: float, num_sequences: int) -> None:
        factor = self._factors[kind]
        most = _OUTLIER * max(factor, 1.0)
        measured = min(max(gap_s / _usual_s(kind, num_sequences), 0.0), most)
        self._num_steps[kind] += 1
        self._factors[kind] = factor + (measured - factor) * max(_FOLLOW, 1 / self._num_steps[kind])


def _usual_s(kind: GapKind, num_sequences: int) -> float:
    fixed_s, sequence_s = _USUAL[kind]
    return fixed_s + sequence_s * num_sequences
