"""Events of the prefix index: which content blocks of KV hold from now on, and which no longer.

In vLLM's wire format (vllm/distributed/kv_events.py): each event is an array that begins with its name. A block's
hash covers all tokens up to its end, and the cache_salt of its sequence; it has no meaning but being equal.
"""

import msgspec


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Blocks that follow one another are in the index. parent_block_hash: of what comes before; None: nothing.

    token_ids: of all of them, block_size each. extra_keys: for each block what it depends on beyond its tokens:
    the first block of a sequence with a cache_salt has that, hashed; None: none of them on anything. The other
    fields are of what FASER does not have.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[str] | None] | None = None


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Blocks whose content is forgotten."""

    block_hashes: list[int]
    medium: str | None = None


KvEvent = BlockStored | BlockRemoved
