"""Estimates of the acceptance of draft tokens: the Python side of native/acceptance.cpp.

The control plane calls it several times a step, for few sequences, so that the calls themselves are what costs.
Arrays go by id (native/arrays.h): contiguous ones, of 64 bits.
"""

import ctypes
import weakref
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from faser.kernels.cpu.library import AcceptanceArraysStruct
from faser.optional import maybe
from faser.types.arrays import Floats, Ints

Columns = tuple[Ints, Ints, Ints, Ints, Floats]  # of a DraftTable: slots, methods, lengths, token_ids, confidences


class Texts(Protocol):
    """Texts that drafts are looked up in: what contract/native_acceptance.py says of them."""

    address: int
    method_ids: Ints


class CompiledAcceptance:
    """Native estimates of contract/native_acceptance.py. Keeps the arrays alive; one caller at a time."""

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
        address: int = library.faser_acceptance_new(ctypes.addressof(struct))
        self._address = address
        weakref.finalize(self, library.faser_acceptance_free, address)
        self._survival, self._choose = library.faser_acceptance_survival, library.faser_acceptance_choose
        self._note, self._hold = library.faser_acceptance_note, library.faser_acceptance_hold
        self._judge, self._drop = library.faser_acceptance_judge, library.faser_acceptance_drop
        self._look, self._judge_look = library.faser_acceptance_look, library.faser_acceptance_judge_look
        self._learn, self._best_prefixes = library.faser_acceptance_learn, library.faser_best_prefixes

    def survival(self, drafts: Columns) -> Floats:
        found = np.empty((len(drafts[0]), self._cap + 1))
        self._survival(self._address, len(drafts[0]), *map(id, drafts), id(found))
        return found

    def choose(
        self, drafts: Columns, count: int, requested: Ints | None, row_price: float
    ) -> tuple[Ints, Columns, Floats]:
        cap = self._cap
        numbers, tokens = np.empty((3, count), dtype=np.int64), np.empty((count, cap), dtype=np.int64)
        real = np.empty(count * (2 * cap + 1))
        noted = maybe(id, requested)
        found = id(numbers), id(tokens), id(real)
        self._choose(self._address, len(drafts[0]), *map(id, drafts), count, noted, row_price, *found)
        taken, methods, lengths = numbers
        confidences, survival = real[: count * cap], real[count * cap :]
        columns = drafts[0][:count], methods, lengths, tokens, confidences.reshape(count, cap)
        return taken, columns, survival.reshape(count, cap + 1)

    def look(self, texts: Texts, slots: Ints, limits: Ints, row_price: float) -> tuple[Columns, Floats, int]:
        count, cap = len(slots), self._cap
        numbers, tokens = np.empty((2, count), dtype=np.int64), np.empty((count, cap), dtype=np.int64)
        real = np.empty(count * (2 * cap + 1))
        wanted = id(texts.method_ids), count, id(slots), id(limits), row_price
        num_promising: int = self._look(self._address, texts.address, *wanted, id(numbers), id(tokens), id(real))
        if num_promising < 0:
            raise KeyError(f"one of the slots {slots.tolist()} has no text")
        methods, lengths = numbers
        confidences, survival = real[: count * cap], real[count * cap :]
        columns = slots, methods, lengths, tokens, confidences.reshape(count, cap)
        return columns, survival.reshape(count, cap + 1), num_promising

    def judge_look(
        self, sampled: tuple[Sequence[int], Sequence[int], Sequence[int]], drafts: Columns, kept: Ints
    ) -> Ints:
        return self._judged(self._judge_look, sampled, drafts, kept)

    def note(self, slots: Ints, reached: Ints, survival: Floats, *, from_text: bool) -> None:
        self._note(self._address, from_text, len(slots), id(slots), id(reached), id(survival))

    def hold(self, drafts: Columns, decided: Ints, accepted: Ints) -> None:
        self._hold(self._address, len(drafts[0]), *map(id, drafts), id(decided), id(accepted))

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
        rest = len(looked[0]), *map(id, looked), id(taken), id(by_model), len(by_model), num_decided, is_drawn
        return self._judged(self._judge, sampled, drafts, kept, *rest)

    def _judged(
        self,
        call: Callable[..., None],
        sampled: tuple[Sequence[int], Sequence[int], Sequence[int]],
        drafts: Columns,
        kept: Ints,
        *rest: int,
    ) -> Ints:
        """Accepted tokens of each draft, by one of the two native judges. rest: its further arguments."""
        slots, counts, token_ids = sampled
        came, num_came, tokens = array("q", slots), array("q", counts), array("q", token_ids)
        accepted = np.empty(len(kept), dtype=np.int64)
        call(
            self._address,
            len(came),
            came.buffer_info()[0],
            num_came.buffer_info()[0],
            tokens.buffer_info()[0],
            len(kept),
            *map(id, drafts),
            id(kept),
            id(accepted),
            *rest,
        )
        return accepted

    def drop(self, slot: int) -> None:
        self._drop(self._address, slot)

    def learn(self) -> None:
        self._learn(self._address)

    def best_prefixes(
        self, survival: Floats, least: Ints | None, lengths: Ints, seconds: Floats, worth: float
    ) -> tuple[Ints, float]:
        assert survival.shape[1] == self._cap + 1, "tables are as wide as the arrays"
        kept = np.empty(len(lengths), dtype=np.int64)
        first = maybe(id, least)
        rate = self._best_prefixes(
            self._address, len(lengths), id(survival), first, id(lengths), id(seconds), worth, id(kept)
        )
        return kept, rate
