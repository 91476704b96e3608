"""How likely draft tokens are to be accepted: the Python side of native/acceptance.cpp.

The control plane calls it several times a step, for few sequences: what counts is the calls themselves.
"""

import ctypes
import weakref
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from faser.kernels.cpu.library import AcceptanceArraysStruct, DraftTableStruct

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Columns = tuple[Ints, Ints, Ints, Ints, Floats]  # of a DraftTable: slots, methods, lengths, token_ids, confidences


class NativeAcceptance:
    """See contract/native_acceptance.py. Keeps the arrays alive; one caller at a time."""

    def __init__(
        self, library: ctypes.CDLL, arrays: Mapping[str, NDArray[Any]], numbers: Mapping[str, float]
    ) -> None:
        assert all(each.flags.c_contiguous for each in arrays.values()), "arrays are read as they lie in memory"
        self._arrays = dict(arrays)
        num_methods, num_slots = arrays["offset"].shape
        self._cap = arrays["all"].shape[-1]
        struct = AcceptanceArraysStruct(
            num_methods=num_methods,
            num_slots=num_slots,
            cap=self._cap,
            **{name: each.ctypes.data for name, each in arrays.items()},
            **numbers,
        )
        self._library = library
        self._address: int = library.faser_acceptance_new(ctypes.addressof(struct))
        weakref.finalize(self, library.faser_acceptance_free, self._address)
        self._table, self._looked = DraftTableStruct(), DraftTableStruct()
        self._at_table, self._at_looked = map(ctypes.addressof, (self._table, self._looked))

    def survival(self, drafts: Columns) -> Floats:
        found = np.empty((len(drafts[0]), self._cap + 1))
        self._library.faser_acceptance_survival(self._address, self._of(drafts), _at(found))
        return found

    def choose(self, drafts: Columns, count: int, requested: Ints | None) -> tuple[Ints, Columns, Floats]:
        cap = self._cap
        numbers, tokens = np.empty((3, count), dtype=np.int64), np.empty((count, cap), dtype=np.int64)
        reals = np.empty(count * (2 * cap + 1))
        taken, methods, lengths = numbers
        confidences, survival = reals[: count * cap].reshape(count, cap), reals[count * cap :].reshape(count, -1)
        at, at_reals = _at(numbers), _at(reals)
        self._library.faser_acceptance_choose(
            self._address,
            self._of(drafts),
            count,
            None if requested is None else _at(requested),
            at,
            at + 8 * count,
            at + 16 * count,
            _at(tokens),
            at_reals,
            at_reals + 8 * count * cap,
        )
        return taken, (drafts[0][:count], methods, lengths, tokens, confidences), survival

    def note(self, slots: Ints, reached: Ints, survival: Floats, *, from_text: bool) -> None:
        self._library.faser_acceptance_note(
            self._address, from_text, _at(slots), len(slots), _at(reached), _at(survival)
        )

    def hold(self, drafts: Columns, decided: Ints, accepted: Ints) -> None:
        self._library.faser_acceptance_hold(self._address, self._of(drafts), _at(decided), _at(accepted))

    def judge(
        self,
        sampled: tuple[Sequence[int], Sequence[int], Sequence[int]],
        drafts: Columns,
        kept: Ints,
        looked: Columns,
        taken: Ints,
        by_model: Ints,
        *,
        num_decided: int,
        is_drawn: bool,
    ) -> Ints:
        slots, counts, token_ids = (array("q", each) for each in sampled)
        accepted = np.empty(len(kept), dtype=np.int64)
        _fill(self._looked, looked)
        self._library.faser_acceptance_judge(
            self._address,
            len(slots),
            slots.buffer_info()[0],
            counts.buffer_info()[0],
            token_ids.buffer_info()[0],
            self._of(drafts),
            _at(kept),
            _at(accepted),
            self._at_looked,
            _at(taken),
            _at(by_model),
            len(by_model),
            num_decided,
            is_drawn,
        )
        return accepted

    def drop(self, slot: int) -> None:
        self._library.faser_acceptance_drop(self._address, slot)

    def forget(self) -> None:
        self._library.faser_acceptance_forget(self._address)

    def learn(self) -> None:
        self._library.faser_acceptance_learn(self._address)

    def best_prefixes(
        self, survival: Floats, weights: Floats, lengths: Ints, seconds: Floats, worth: float
    ) -> tuple[Ints, float]:
        kept = np.empty(len(lengths), dtype=np.int64)
        rate = self._library.faser_best_prefixes(
            self._address,
            len(lengths),
            _at(survival),
            _at(weights),
            _at(lengths),
            _at(seconds),
            worth,
            _at(kept),
        )
        return kept, rate

    def _of(self, drafts: Columns) -> int:
        _fill(self._table, drafts)
        return self._at_table


def _fill(struct: DraftTableStruct, drafts: Columns) -> None:
    slots, methods, lengths, token_ids, confidences = drafts
    struct.count = len(slots)
    struct.slots, struct.methods, struct.lengths = _at(slots), _at(methods), _at(lengths)
    struct.token_ids, struct.confidences = _at(token_ids), _at(confidences)


def _at(values: NDArray[Any]) -> int:
    """The address of an array, which must lie in memory row by row."""
    address: int = values.ctypes.data
    return address
