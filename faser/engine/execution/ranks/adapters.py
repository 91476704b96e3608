"""Adapters of a model that several ranks hold: each rank has its part of every adapter.

An adapter is loaded while steps run, in a thread, which cannot send messages between those of the steps. So rank 0
leaves a note in the store where the ranks meet, and a thread of each other rank looks for the next one. All ranks
keep the adapter, or none does. Into slots it goes by messages in the order of the steps (relay.py).
"""

import contextlib
import logging
import threading
from itertools import count

import msgspec

from faser.engine.execution.adapters import AdapterStore
from faser.engine.execution.ranks.group import RankGroup
from faser.engine.execution.ranks.relay import DropAdapter, PlaceAdapter, tell
from faser.errors import EngineError, FaserError, RequestError
from faser.types.adapter import Adapter

_log = logging.getLogger("faser.engine")


class LeadingAdapters:
    """Rank 0's adapters, which the other ranks load, place and drop as well. Implements AdapterMemory.

    own: rank 0's parts. One thread at a time loads adapters.
    """

    def __init__(self, own: AdapterStore, group: RankGroup) -> None:
        self._own = own
        self._group = group
        self._notes = count()

    def load_adapter(self, adapter: Adapter) -> None:
        """Load an adapter on all ranks, each its part; see AdapterMemory.

        Raises RequestError also for what another rank finds, EngineError if a rank has ended.
        """
        if self._own.holds(adapter.digest):
            return
        note, kept = _note(next(self._notes)), False
        self._group.leave(note, msgspec.json.encode(adapter).decode())
        try:
            self._own.load_adapter(adapter)
            for rank in range(1, self._group.size):
                if problem := self._group.find(_answer(note, rank)):
                    raise RequestError(f"{problem} (on rank {rank})", param="model")
            kept = True
        finally:
            if not kept:
                self._own.forget(adapter.digest)
            self._group.leave(_verdict(note), "kept" if kept else "")

    def place(self, slot: int, digest: str) -> None:
        """Put a loaded adapter into a slot on all ranks, between two steps."""
        tell(self._group, PlaceAdapter(slot, digest))
        self._own.place(slot, digest)

    def drop_adapter(self, digest: str) -> None:
        """Free an adapter on all ranks, between two steps."""
        tell(self._group, DropAdapter(digest))
        self._own.drop_adapter(digest)


def follow_loads(own: AdapterStore, group: RankGroup) -> threading.Thread:
    """Start the thread of another rank that loads what rank 0 loads, until the group is closed."""
    found = threading.Thread(target=_follow_loads, args=(own, group), name="faser-adapters", daemon=True)
    found.start()
    return found


def _follow_loads(own: AdapterStore, group: RankGroup) -> None:
    with contextlib.suppress(EngineError):  # the group is closed, or its store is gone
        for note in map(_note, count()):
            adapter = msgspec.json.decode(group.find(note), type=Adapter)
            group.leave(_answer(note, group.rank), _problem(own, adapter))
            if not group.find(_verdict(note)):
                own.forget(adapter.digest)


def _problem(own: AdapterStore, adapter: Adapter) -> str:
    """Load a rank's part; return why it cannot be used, or nothing."""
    try:
        own.load_adapter(adapter)
    except FaserError as error:
        return str(error)
    except Exception as error:  # a fault of ours; requests with this adapter fail, and no others
        _log.exception("adapter %s cannot be loaded", adapter.name)
        return f"the adapter {adapter.name!r} cannot be loaded: {type(error).__name__}: {error}"
    return ""


def _note(number: int) -> str:
    return f"adapter/{number}"


def _answer(note: str, rank: int) -> str:
    return f"{note}/{rank}"


def _verdict(note: str) -> str:
    return f"{note}/verdict"
