"""StepPosterior: what draft rows and the host's work for drafts cost now, as the steps so far have shown.

    seconds on the device      a · base + b · rows      base, rows: by the table; a draft row costs b / a of that
    seconds without work       g, + h where drafts are looked up or made, + k where rows of them are kept
                               h, k: the host decides, looks up, learns; lays out, accepts

The table was measured on an idle machine, batch by batch. Next to other programs a step is interrupted the more
often the longer it computes, so its further rows slow down more than its first ones; a factor on the whole step
would find drafts too cheap. Both parts of a step are measured by themselves, so a machine that slows down is not
taken for host work.

Levels of load share what they know: a and b have a normal posterior at each level, whose prior is that of all
steps of any level, worth a tenth of them. Older steps are forgotten. g, h and k are factors on one line through
the gaps of 1, 16 and 64 sequences, for all levels. Once drafts are there, h is spent and only k has to pay.
Control plane, no torch.
"""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

# Reasoned, not fitted: how throughput changes with each halved or doubled is in results/control-constants.json.
_OUTLIER = 3.0  # a measurement counts as at most this many times off: a page fault, a pause is no new machine
_KEPT = 0.99  # of what is known of draft rows after one more step: 100 steps count
_PRIOR = 0.01  # steps of draft rows alone that the table is worth: three rows are a fortieth of a step, or less
_LEAST_ROW_FACTOR, _MOST_ROW_FACTOR = 0.8, 4.0  # bounds of what a draft row costs over the table
_SHARED = 0.1  # what a step of any level is worth at each level

# Seconds by which drafts delay a step, and for each of its sequences: a line through the gaps of 1, 8 and 32
# sequences on an H200 (2.25, 2.79, 2.57 ms): a cycle of benchmarks/results/h200/cycle.json without its passes and
# its verification as draft.json and verify.json have them.
_USUAL_S, _USUAL_SEQUENCE_S = 2.5e-3, 5e-6
PLAIN, DRAFTED, KEPT = range(3)  # kinds of steps: without drafts; all drafts were cut; with draft rows
_FOLLOW_GAPS = 0.05  # weight of the newest gap, once there are enough
_FORGET_KEPT = 0.002  # with a step that keeps no row: where rows seem too dear, none would correct that
_PRIOR_STEPS = 4  # the usual gap counts as this many measured ones: after 16 steps it weighs a fifth
_MOST_SUM = 1e9  # in a file of an earlier run: larger ones are damage
_MOST_SAVED = 20.0  # steps that an earlier run counts as, at most


class StepPosterior:
    """Learned corrections to step times: see the module. schedules_async: plain steps have no gap before them.

    Then the usual gaps hold until they are measured. Otherwise all steps wait for the host, only the difference
    counts, and it is 0 until both kinds have been measured.
    """

    def __init__(self, *, schedules_async: bool = False) -> None:
        self._rows: dict[int, _RowSums] = {}  # by level
        self._all_rows = _RowSums()
        steps = _PRIOR_STEPS if schedules_async else 0
        drafting = float(schedules_async)
        self._gaps = [_Gap(0.0, steps), _Gap(drafting, steps), _Gap(drafting, steps)]  # by kind

    def row_factor(self, num_sequences: int) -> float:
        """Return how many times dearer draft rows are than their table says, compared with the rest of the step.

        Further rows of one sequence fit into a tile of the products and are nearly free; those of 16 are not.
        """
        found = self._rows.get(num_sequences.bit_length())
        return self._all_rows.factor if found is None else found.factor

    def host_s(self, num_sequences: int) -> float:
        """Return by how much the host delays a step of this many sequences if it drafts."""
        return self._more_s(KEPT, PLAIN, num_sequences)

    def kept_s(self, num_sequences: int) -> float:
        """Return by how much the host delays a step whose drafts are there if rows of them are kept."""
        return self._more_s(KEPT, DRAFTED, num_sequences)

    def _more_s(self, kind: int, than: int, num_sequences: int) -> float:
        gap, other = self._gaps[kind], self._gaps[than]
        if not (gap.num_steps and other.num_steps):
            return 0.0
        return max(gap.mean - other.mean, 0.0) * _usual_s(num_sequences)

    def observe_rows(self, num_sequences: int, base_s: float, rows_s: float, device_s: float) -> None:
        """A step has taken device_s. Of that, by the table, its draft rows take rows_s and the rest base_s."""
        if (level := self._rows.get(num_sequences.bit_length())) is None:
            level = self._rows[num_sequences.bit_length()] = _RowSums()
        whole_s = base_s + rows_s
        base, rows, time = base_s / whole_s, rows_s / whole_s, device_s / whole_s
        usual = level.usual or self._all_rows.usual
        if usual:
            time = min(max(time, usual / _OUTLIER), usual * _OUTLIER)
        self._all_rows.add(base, rows, time)
        level.add(base, rows, time)
        self._all_rows.solve()
        level.solve(self._all_rows)

    def observe_gap(self, num_sequences: int, gap_s: float, kind: int) -> None:
        """A step of this kind has left the device without work for gap_s."""
        self._gaps[kind].follow(gap_s / _usual_s(num_sequences))
        if kind == DRAFTED and self._gaps[KEPT].num_steps:
            kept, drafted = self._gaps[KEPT], self._gaps[DRAFTED]
            kept.mean += _FORGET_KEPT * (drafted.mean - kept.mean)

    def saved(self) -> dict[str, Any]:
        """Return what a later run on the same machine may begin with."""
        return {
            "rows": self._all_rows.sums,
            "levels": {str(level): sums.sums for level, sums in self._rows.items()},
            "gaps": [(each.mean, each.num_steps) for each in self._gaps],
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Begin with what an earlier run has saved, as if seen in a few steps.

        Raises ValueError, KeyError or TypeError for anything else, and changes nothing then.
        """
        shared = _RowSums.from_saved(saved["rows"])
        levels = {int(level): _RowSums.from_saved(sums) for level, sums in saved["levels"].items()}
        gaps = [_Gap(float(mean), min(int(steps), _PRIOR_STEPS)) for mean, steps in saved["gaps"]]
        if len(gaps) != len(self._gaps) or not all(isfinite(each.mean) and each.num_steps >= 0 for each in gaps):
            raise ValueError(f"gaps are {saved['gaps']}; three pairs of a mean and a number of steps are needed")
        shared.solve()
        for sums in levels.values():
            sums.solve(shared)
        self._all_rows, self._rows, self._gaps = shared, levels, gaps


class _Gap:
    """Mean gap of one kind of steps, in usual ones, as of num_steps."""

    __slots__ = ("mean", "num_steps")

    def __init__(self, mean: float, num_steps: int) -> None:
        self.mean, self.num_steps = mean, num_steps

    def follow(self, gap: float) -> None:
        gap = min(max(gap, 0.0), _OUTLIER * max(self.mean, 1.0))
        self.num_steps += 1
        self.mean += (gap - self.mean) * max(_FOLLOW_GAPS, 1 / self.num_steps)


class _RowSums:
    """Discounted normal equations of time ≈ a · base + b · rows. factor: b / a. usual: measured over predicted."""

    __slots__ = ("factor", "sums", "usual")

    def __init__(self) -> None:
        self.factor, self.usual = 1.0, 0.0
        self.sums = [0.0] * 5  # base², base · rows, rows², base · time, rows · time

    @classmethod
    def from_saved(cls, sums: Sequence[float]) -> "_RowSums":
        found = cls()
        base, both, rows, *times = (float(each) for each in sums)
        if len(times) != 2 or not all(0 <= each < _MOST_SUM for each in (base, both, rows, *times)):
            raise ValueError(f"sums are {sums}; five numbers from 0 to {_MOST_SUM:g} are needed")
        by = min(1.0, _MOST_SAVED / max(base + 2 * both + rows, 1e-12))  # the parts of a step are 1 together
        found.sums = [by * each for each in (base, both, rows, *times)]
        return found

    def add(self, base: float, rows: float, time: float) -> None:
        new = (base * base, base * rows, rows * rows, base * time, rows * time)
        self.sums = [old * _KEPT + each for old, each in zip(self.sums, new, strict=True)]
        self.usual = time if not self.usual else self.usual + (1 - _KEPT) * (time - self.usual)

    def solve(self, shared: "_RowSums | None" = None) -> None:
        """Find the factor. b is near a before any data; shared: what the steps of all levels say."""
        sums = self.sums
        if shared is not None:
            sums = [own + _SHARED * other for own, other in zip(sums, shared.sums, strict=True)]
        base, both, rows, base_time, rows_time = sums
        base, both, rows = base + _PRIOR, both - _PRIOR, rows + _PRIOR
        of_base, of_rows = base_time * rows - rows_time * both, rows_time * base - base_time * both
        if of_base > 0:
            self.factor = min(max(of_rows / of_base, _LEAST_ROW_FACTOR), _MOST_ROW_FACTOR)


def _usual_s(num_sequences: int) -> float:
    return _USUAL_S + _USUAL_SEQUENCE_S * num_sequences
