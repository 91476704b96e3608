"""Responses kept for later requests: in memory, up to a size; those unused for longest go first.

Who asks finds only the responses to the same API key. A server without keys has one owner, so its ids are chosen
here, and cannot be guessed.
"""

import logging
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from faser.api.dialects.conversion import Json

_ENTRY_BYTES = 1 << 10  # what an entry takes besides its contents

_log = logging.getLogger("faser.api")


@dataclass(frozen=True, slots=True)
class _Entry:
    """A response, and the items of the conversation before it, as JSON."""

    response: bytes
    items: bytes

    @property
    def size(self) -> int:
        return len(self.response) + len(self.items) + _ENTRY_BYTES


class ResponseStore:
    """max_bytes: 0: nothing is kept. owner, of all methods: index of the API key; None: the server has none."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[tuple[int | None, str], _Entry] = OrderedDict()

    @property
    def keeps(self) -> bool:
        return self._max_bytes > 0

    def new_id(self) -> str:
        return f"resp_{secrets.token_hex(16)}"

    def put(self, owner: int | None, response: Json, items: Sequence[Json]) -> None:
        """Keep a response. items: of the conversation before it."""
        entry = _Entry(msgspec.json.encode(response), msgspec.json.encode(items))
        if entry.size > self._max_bytes:
            _log.warning(
                "response %s has %d bytes with its conversation and is not kept; --responses-store is %d bytes",
                response["id"],
                entry.size,
                self._max_bytes,
            )
            return
        self.delete(owner, response["id"])
        self._entries[owner, response["id"]] = entry
        self._num_bytes += entry.size
        while self._num_bytes > self._max_bytes:
            _, oldest = self._entries.popitem(last=False)
            self._num_bytes -= oldest.size

    def get(self, owner: int | None, response_id: str) -> bytes | None:
        """The response as JSON."""
        entry = self._find(owner, response_id)
        return None if entry is None else entry.response

    def conversation(self, owner: int | None, response_id: str) -> list[Json] | None:
        """The items of the conversation up to and with the response."""
        entry = self._find(owner, response_id)
        if entry is None:
            return None
        return [*msgspec.json.decode(entry.items), *msgspec.json.decode(entry.response)["output"]]

    def delete(self, owner: int | None, response_id: str) -> bool:
        """Delete a response; return whether it existed."""
        if (owner, response_id) not in self._entries:
            return False
        self._num_bytes -= self._entries.pop((owner, response_id)).size
        return True

    def _find(self, owner: int | None, response_id: str) -> _Entry | None:
        if (owner, response_id) not in self._entries:
            return None
        self._entries.move_to_end((owner, response_id))
        return self._entries[owner, response_id]
