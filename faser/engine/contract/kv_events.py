"""Events of the prefix index: which content blocks of KV hold from now on, and which no longer.

In vLLM's wire format (vllm/distributed/kv_events.py): each event is an array that begins with its name. A block's
hash covers all tokens up to its end, and the cache_salt and adapter of its sequence; it has no meaning but being
equal.
"""

import msgspec


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Blocks that follow one another are in the index. parent_block_hash: of what comes before; None: nothing.

    token_ids: of all of them, block_size each. lora_id, lora_name: a number for the content of the adapter that
    computed them, and its name; None: no adapter did. extra_keys: for each block what it depends on beyond its
    tokens: the adapter's name, and in the first block of a sequence with a cache_salt the salt, hashed; None:
    nothing. medium: always None, which stands for the engine's own memory.
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
