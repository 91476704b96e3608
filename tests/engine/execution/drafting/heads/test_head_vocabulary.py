"""The two maps of a draft vocabulary: what they say, and every way in which they can be wrong."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from faser.engine.execution.drafting.heads.tensors import draft_token_ids
from faser.errors import ModelError
from tests.checkpoints import VOCAB_SIZE
from tests.engine.execution.drafting.seeded_heads import draft_vocabulary, head_spec

TOKEN_IDS = draft_vocabulary(4)
SPEC = head_spec(draft_vocab_size=4)
OFFSETS = TOKEN_IDS - torch.arange(4)
MASK = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill(0, TOKEN_IDS, True)


class Source:
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> list[str]:
        return list(self._tensors)

    def get(self, name: str) -> Tensor:
        return self._tensors[name]


@pytest.mark.parametrize(
    "maps", [{"d2t": OFFSETS}, {"d2t": OFFSETS.int()}, {"t2d": MASK}, {"d2t": OFFSETS, "t2d": MASK}]
)
def test_either_map_gives_the_tokens(maps: dict[str, Tensor]) -> None:
    found = draft_token_ids(Source(maps), SPEC)
    assert found is not None
    assert torch.equal(found, TOKEN_IDS)


def test_rows_may_be_in_any_order() -> None:
    backwards = TOKEN_IDS.flip(0)
    found = draft_token_ids(Source({"d2t": backwards - torch.arange(4), "t2d": MASK}), SPEC)
    assert found is not None
    assert torch.equal(found, backwards)


@pytest.mark.parametrize("maps", [{}, {"d2t": torch.zeros(VOCAB_SIZE, dtype=torch.int64)}])
def test_the_targets_own_vocabulary_needs_no_map(maps: dict[str, Tensor]) -> None:
    assert draft_token_ids(Source(maps), head_spec(draft_vocab_size=VOCAB_SIZE)) is None


@pytest.mark.parametrize(
    ("maps", "message"),
    [
        ({}, "logits of 4 of the target's 512 tokens, but no tensor d2t"),
        ({"d2t": OFFSETS[:3]}, r"d2t is int64 \[3\]; it must be 4 integers"),
        ({"d2t": OFFSETS.float()}, r"d2t is float32 \[4\]; it must be 4 integers"),
        ({"d2t": OFFSETS + VOCAB_SIZE}, "d2t leads to token .*; the model has tokens 0 to 511"),
        ({"d2t": -torch.arange(4)}, "d2t leads to token 0 from two rows"),
        ({"t2d": MASK[:100]}, r"t2d is \[100\] and marks"),
        ({"t2d": ~MASK}, r"t2d is \[512\] and marks 508 tokens; it must mark 4"),
        ({"d2t": TOKEN_IDS - TOKEN_IDS[0], "t2d": MASK}, "d2t and t2d describe different vocabularies: token "),
    ],
)
def test_a_map_that_cannot_be_is_named(maps: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        draft_token_ids(Source(maps), SPEC)
