"""Drift: whether acceptance has changed lately, by slot and by method. No torch.

Keeps two cumulative sums per line (Page, Biometrika 41, 1954): the log likelihood ratio of the judged tokens if
acceptance were two logits lower, or higher, than expected; never below 0. Without it the estimates would trust a
text that turns from prose to noise for 30 tokens more. Knows neither the estimates nor what follows from an alarm.
"""

import functools

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_LOGITS = np.array([-2.0, 2.0])  # the changes of acceptance that raise an alarm
_RISES = np.expm1(_LOGITS)[:, None, None]
_SLOT_ALARM, _METHOD_ALARM = np.array(8.0), np.array(14.0)  # a false alarm about once in e^8 or e^14 tokens
_ZERO = np.array(0.0)


class Drift:
    """Sums of num_slots slots and num_methods methods; after an alarm its sums start from 0."""

    def __init__(self, num_slots: int, num_methods: int) -> None:
        self._of_slots = np.zeros((num_slots, 2))
        self._of_methods = np.zeros((num_methods, 2))
        self._is_method = np.eye(num_methods)

    def start(self, slot: int) -> None:
        """Another sequence takes the slot."""
        self._of_slots[slot] = 0.0

    def watch(self, slots: Ints, methods: Ints, expected: Floats, counts: Floats) -> tuple[Ints, Ints] | None:
        """The slots and the methods whose estimates recent tokens contradict; None, as nearly always: there are
        none.

        slots, methods: [S]; no slot occurs twice. expected: [S, K] acceptance by depth. counts: [S, 2, K] tokens
        judged and accepted.
        """
        usual = expected * _RISES
        np.log1p(usual, out=usual)
        usual *= counts[:, 0]
        ones = _ones(counts.shape[2])
        ratios = counts[:, 1].dot(ones)[:, None] * _LOGITS
        ratios -= usual.dot(ones).T
        of_slots = self._of_slots.take(slots, axis=0)
        of_slots += ratios
        self._of_slots[slots] = np.maximum(of_slots, _ZERO, out=of_slots)
        self._of_methods += self._is_method.take(methods, axis=0).T.dot(ratios)
        np.maximum(self._of_methods, _ZERO, out=self._of_methods)
        contradicted = np.count_nonzero(of_slots > _SLOT_ALARM)
        if not contradicted and not np.count_nonzero(self._of_methods > _METHOD_ALARM):
            return None
        stale_slots = slots[of_slots.max(axis=1) > _SLOT_ALARM]
        stale_methods = (self._of_methods.max(axis=1) > _METHOD_ALARM).nonzero()[0]
        self._of_slots[stale_slots] = 0.0
        self._of_methods[stale_methods] = 0.0
        return stale_slots, stale_methods


@functools.lru_cache(maxsize=8)
def _ones(count: int) -> Floats:
    """Read only."""
    return np.ones(count)
