"""The figures in the table of early pruning. Oracles: loops over all pairs, and over all drafted tokens."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.speculation.pruning import Cell, LayerLook, area, least_threshold, rows_kept, save
from faser.engine.execution.pruning.rank_judge import NUM_TOP, UNKNOWN, DraftedTokens

tokens = st.lists(st.tuples(st.integers(0, NUM_TOP), st.booleans()), min_size=1, max_size=30)


@given(tokens)
def test_the_area_is_the_share_of_pairs_in_order(judged: list[tuple[int, bool]]) -> None:
    refused = [count for count, accepted in judged if not accepted]
    good = [count for count, accepted in judged if accepted]
    pairs = [(bad > fine) + (bad == fine) / 2 for bad in refused for fine in good]
    expected = sum(pairs) / len(pairs) if pairs else 0.5
    counts, accepted = (np.array(each) for each in zip(*judged, strict=True))
    assert area(counts, accepted) == pytest.approx(expected)


@given(tokens)
def test_the_threshold_is_the_least_count_from_which_on_hardly_any_token_was_right(
    judged: list[tuple[int, bool]],
) -> None:
    allowed = []
    for k in range(1, NUM_TOP + 1):
        flagged = [good for count, good in judged if count >= k]
        if flagged and sum(flagged) <= 0.02 * len(flagged):
            allowed.append(k)
    counts, accepted = (np.array(each) for each in zip(*judged, strict=True))
    assert least_threshold(counts, accepted) == (allowed[0] if allowed else None)


@given(st.lists(st.lists(st.integers(UNKNOWN, NUM_TOP), min_size=1, max_size=5), min_size=1, max_size=5))
def test_rows_are_kept_up_to_the_first_flagged_token_of_their_draft(drafts: list[list[int]]) -> None:
    num_drafts = np.array([len(draft) for draft in drafts], dtype=np.int64)
    total = int(num_drafts.sum())
    nothing = np.zeros(total, dtype=np.int64)
    drafted = DraftedTokens(
        num_drafts=num_drafts,
        sequence=np.repeat(np.arange(len(drafts)), num_drafts),
        depth=np.concatenate([np.arange(len(draft)) for draft in drafts]),
        judged_by=nothing,
        slots=nothing,
        token_ids=torch.zeros(total, dtype=torch.int64),
        top_ids=torch.zeros((total, 1), dtype=torch.int64),
    )
    expected = [
        sum(next((i for i, count in enumerate(draft) if count >= k), len(draft)) for draft in drafts)
        for k in range(1, NUM_TOP + 1)
    ]
    counts = np.array([count for draft in drafts for count in draft], dtype=np.int64)
    assert rows_kept(counts, drafted).tolist() == expected


def test_what_is_saved_can_be_read_again(tmp_path: Path) -> None:
    look = LayerLook(
        drafter="d",
        temperature=0.0,
        layer=5,
        judged=10,
        accepted_share=0.5,
        auc=0.61,
        threshold=None,
        false_share=0.0,
        dropped_share=0.0,
        saved_share=0.0,
        look_ms=1.0,
    )
    cell = Cell(
        drafter="d",
        concurrency=4,
        mode="on",
        tokens_per_s=[1.0, 3.0, 2.0],
        ratio=0.9,
        drafted_rows=50,
        dropped_share=0.1,
        flagged=3,
        false_share=0.0,
        other_answers=0,
    )
    save(tmp_path / "new", [look], [cell])
    saved = json.loads((tmp_path / "new" / "prune.json").read_text("utf-8"))
    assert (saved["looks"][0]["auc"], saved["cells"][0]["mode"]) == (0.61, "on")
    text = (tmp_path / "new" / "prune.md").read_text("utf-8")
    assert "| d | 0 | 5 | 10 | 50% | 0.610 | – |" in text
    assert "| d | 4 | on | 2.0 | 0.900 | 10.0% of 50 | 3 | 0.0% | 0 |" in text
