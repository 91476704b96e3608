"""One vector of a prompt in place of an answer: what a request asks for, and what a model declares."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class PoolingKind(StrEnum):
    """Ways to make one vector of the states that a prompt's tokens have after the last layer and its norm.

    CLS: the first token's, which only encoders have use for.
    """

    LAST = "last"
    MEAN = "mean"
    CLS = "cls"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """The vector that a request asks for. Its numbers are as the model has them, not yet normalised.

    token_ids: the vector is the logits of these tokens at the last position; empty: it is made of states.
    second_from: where the tokens of a second text begin, which an encoder tells from those of the first one; None:
    all tokens have one type.
    """

    kind: PoolingKind = PoolingKind.LAST
    token_ids: tuple[int, ...] = ()
    second_from: int | None = None

    @property
    def reads_all(self) -> bool:
        """Return whether the states of all tokens count, so that none may come from the prefix cache."""
        return self.kind is PoolingKind.MEAN and not self.token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedder:
    """Rules by which a checkpoint makes embeddings and scores, from the files that sentence-transformers writes.

    is_encoder: the model attends in both directions and generates no text. judges_pairs: it is a cross-encoder:
    the vector of a pair is one logit, and it makes no embeddings. raw_scores: a score is that logit, not its
    sigmoid. normalises: embeddings have length 1. dimensions: smaller sizes that it was trained for; empty: any,
    if is_matryoshka, else none. prompts: texts before an input, by their names. score_token_ids: a score is the
    logit of the first one, less that of the second one if there are two; empty: the cosine of two embeddings.
    """

    kind: PoolingKind = PoolingKind.LAST
    normalises: bool = True
    is_matryoshka: bool = False
    dimensions: tuple[int, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    score_token_ids: tuple[int, ...] = ()
    is_encoder: bool = False
    judges_pairs: bool = False
    raw_scores: bool = False


EMBEDDER = Embedder()  # of a model that generates
