"""Counting of trees, on places of an answer that are made up; and candidates in a text of a few tokens.

Planted bugs: a wrong node that is deeper counts as accepted; siblings of the second place are those of the first;
a candidate that was taken is one again; the tokens of a step are those that it verified.
"""

import pytest

from benchmarks.speculation.trees import Candidates, Node, Place, decoded
from faser.engine.contract.drafts import table_of

FREE = [0.0, *[1.0] * 16]


def places(*chains: list[Node], first: list[list[Node]] | None = None) -> list[list[Place]]:
    return [[Place(chain=chain, first=first or []) for chain in chains]]


def test_a_chain_is_accepted_up_to_its_first_wrong_token() -> None:
    chain = [Node(0.9, 1, True), Node(0.8, 2, True), Node(0.7, 3, False)]
    found = decoded(places(chain, chain, chain, chain), "chain", FREE, 3)
    assert found == {"tokens_per_step": 2.0, "draft_rows": 3.0, "ms_per_token": 0.5}


def test_a_sibling_is_accepted_where_the_chain_is_wrong() -> None:
    chain, sibling = [Node(0.5, 1, False), Node(0.4, 2, False)], [Node(0.3, 1, True), Node(0.1, 2, True)]
    answer = places(chain, chain, chain, first=[sibling])
    assert decoded(answer, "chain", FREE, 15)["tokens_per_step"] == 1.0
    assert decoded(answer, "2 at the first place", FREE, 2)["tokens_per_step"] == 1.0
    assert decoded(answer, "2 at the first place", FREE, 3)["tokens_per_step"] == 1.5
    assert decoded(answer, "2 at the first place", FREE, 4)["tokens_per_step"] == 3.0


def test_siblings_of_the_second_place_belong_to_arms_of_two_places() -> None:
    place = Place(chain=[Node(0.5, 1, True)], second=[[Node(0.2, 2, True)]])
    assert [node.depth for node in place.nodes("3 at the first place")] == [1]
    assert [node.depth for node in place.nodes("2 at the first two")] == [1, 2]


@pytest.mark.parametrize(("row_ms", "rows"), [(0.01, 3), (0.35, 2), (2.0, 0)])
def test_as_many_rows_are_verified_as_pay(row_ms: float, rows: int) -> None:
    chain = [Node(0.9, 1, False), Node(0.6, 2, False), Node(0.2, 3, False)]
    step_ms = [0.0, *(1 + row_ms * each for each in range(16))]
    assert decoded(places(chain), "chain", step_ms, None)["draft_rows"] == rows


def test_candidates_are_what_followed_before_and_what_methods_propose() -> None:
    candidates = Candidates(None)
    candidates.start([7, 1, 7, 2, 7, 1, 7])
    drafted = table_of([0], "ngram", [[1, 7]], [[1.0, 1.0]], width=2)
    kinds = candidates.kinds([7, 1, 7, 2, 7, 1, 7], drafted)
    assert set(kinds) == {1, 2}
    for _ in range(30):
        candidates.learn(kinds, 2)
    assert [token for token, _ in candidates.best(kinds, None)] == [2, 1]
    (other,) = candidates.best(kinds, 2)
    assert other[0] == 1
    assert other[1] < 0.1 < candidates.best(kinds, None)[0][1]
