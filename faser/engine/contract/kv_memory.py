"""KvMemory: the bytes of blocks and snapshots, as the control plane copies them to disk and back.

Plain bytes: what is in them, the data plane knows (execution/runner/kv_memory.py).
"""

from typing import Protocol


class KvMemory(Protocol):
    """block_bytes: of a block in all layers. state_bytes: of a snapshot; 0: the model has no recurrent states.

    Reading and writing may be done in any thread, beside a step that uses neither the block nor the snapshot.
    """

    block_bytes: int
    state_bytes: int

    def read_block(self, block: int, into: memoryview) -> None:
        """Copy a block to block_bytes bytes."""
        ...

    def write_block(self, block: int, content: memoryview) -> None:
        """Fill a block with what read_block copied."""
        ...

    def read_state(self, snapshot: int, into: memoryview) -> None:
        """Copy a snapshot to state_bytes bytes."""
        ...

    def write_state(self, snapshot: int, content: memoryview, num_tokens: int) -> None:
        """Fill a snapshot with what read_state copied. num_tokens: that are in the state."""
        ...

    def save_state(self, slot: int, snapshot: int, num_tokens: int) -> None:
        """Take a snapshot of a slot's state. Between steps, in their thread."""
        ...
