"""RowFactor: how many times dearer draft rows are now than their table says, compared with the rest of the step.

The table was measured on an idle machine, batch by batch, and has no time for judging drafts. Beside other
programs a step is interrupted the more often the longer it computes, so its further rows slow down more than its
first ones. A factor on the whole step would find drafts too cheap. Control plane, no torch.
"""

_KEPT = 0.99  # of what is known after one more step: 100 steps count
_PRIOR = 0.01  # steps of draft rows alone that the table is worth: three rows are a fortieth of a step, or less
_LEAST, _MOST = 0.8, 4.0
_OUTLIER = 3.0  # a step counts as at most this many times its usual time: a page fault is no new machine


class RowFactor:
    """Least squares with forgetting of measured ≈ a · base + b · rows, where b is near a before any data.

    factor: b / a.
    """

    __slots__ = ("_base_base", "_base_rows", "_base_time", "_rows_rows", "_rows_time", "_usual", "factor")

    def __init__(self) -> None:
        self.factor = 1.0
        self._usual = 0.0  # measured over predicted by the table
        self._base_base = self._base_rows = self._rows_rows = 0.0  # of the parts of the step, all of it being 1
        self._base_time = self._rows_time = 0.0

    def add(self, base_s: float, rows_s: float, measured_s: float) -> None:
        """A step whose draft rows take rows_s and the rest base_s, both by the table."""
        whole_s = base_s + rows_s
        base, rows, time = base_s / whole_s, rows_s / whole_s, measured_s / whole_s
        if self._usual:
            time = min(max(time, self._usual / _OUTLIER), self._usual * _OUTLIER)
        self._usual = time if not self._usual else self._usual + (1 - _KEPT) * (time - self._usual)
        self._base_base = self._base_base * _KEPT + base * base
        self._base_rows = self._base_rows * _KEPT + base * rows
        self._rows_rows = self._rows_rows * _KEPT + rows * rows
        self._base_time = self._base_time * _KEPT + base * time
        self._rows_time = self._rows_time * _KEPT + rows * time
        one, both, other = self._base_base + _PRIOR, self._base_rows - _PRIOR, self._rows_rows + _PRIOR
        scale = one * other - both * both
        of_base = (self._base_time * other - self._rows_time * both) / scale
        of_rows = (self._rows_time * one - self._base_time * both) / scale
        if of_base > 0:
            self.factor = min(max(of_rows / of_base, _LEAST), _MOST)
