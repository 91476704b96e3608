"""EncodingBatch: the texts that an encoder takes in one step."""

from dataclasses import dataclass

from faser.types.pooling import PoolingKind


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingBatch:
    """N texts, R tokens side by side.

    token_ids: [R]. counts: [N] tokens of each text. kinds: [N] how each gets its vector. seconds: [N] where the
    second text of a pair begins; None: it is no pair, or its tokens have one type.
    """

    token_ids: list[int]
    counts: list[int]
    kinds: list[PoolingKind]
    seconds: list[int | None]
