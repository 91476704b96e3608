"""Questions: where the conversations come from that a model answers. Each batch of them becomes one shard."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

from faser.distill.conversations.dataset import Dataset

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionBatch:
    """conversations: lists of messages that end with the user's. asked: as many were tried. dropped: by reason."""

    conversations: Sequence[Sequence[Message]]
    asked: int
    dropped: Mapping[str, int] = field(default_factory=dict)


class Questions(Protocol):
    """A source of conversations. What it gives follows from the dataset's shards and from its own settings."""

    def next_batch(self, dataset: Dataset, on_question: Callable[[], None]) -> QuestionBatch | None:
        """The questions of the next shard; None: there are no more. on_question: called after each sampled one."""
        ...


def derived_seed(seed: int, use: str, index: int) -> int:
    """A seed of its own, below 2 ** 63, for each use and index."""
    digest = blake2b(f"{seed} {use} {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
