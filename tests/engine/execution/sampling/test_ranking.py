"""The order of a vocabulary. Oracle: Python's sort by (-value, id), on values with many ties."""

import pytest
import torch
from torch import Tensor

from faser.engine.execution.sampling.ranking import best, first, first_and_margin, leading


def tied_values(num_rows: int, width: int, num_levels: int) -> Tensor:
    rng = torch.Generator().manual_seed(width * num_levels)
    return torch.randint(num_levels, (num_rows, width), generator=rng).float() - num_levels / 2


def ordered_ids(row: Tensor) -> list[int]:
    values = row.tolist()
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


@pytest.mark.parametrize("width", [1, 7, 256, 300, 1024])
def test_the_best_is_the_lowest_id_of_the_largest_value(width: int) -> None:
    values = tied_values(20, width, 5)

    token_ids, largest = best(values)
    assert token_ids.tolist() == [ordered_ids(row)[0] for row in values]
    assert torch.equal(largest, values.amax(-1))


@pytest.mark.parametrize("num_levels", [1, 5, 1000])
@pytest.mark.parametrize("width", [2, 7, 256, 300, 1024])
def test_the_lead_is_what_the_first_has_more_than_the_second(width: int, num_levels: int) -> None:
    values = tied_values(20, width, num_levels)
    before = values.clone()

    token_ids, margins = first_and_margin(values)

    assert torch.equal(values, before)
    assert token_ids.tolist() == [ordered_ids(row)[0] for row in values]
    ordered = values.sort(-1, descending=True).values
    assert torch.equal(margins, ordered[:, 0] - ordered[:, 1])


@pytest.mark.parametrize("num_levels", [1, 3, 30, 100_000])
@pytest.mark.parametrize("num_columns", [300, 1024])
@pytest.mark.parametrize("width", [1, 5, 64, 300])
def test_the_certain_part_of_leading_is_the_order(width: int, num_columns: int, num_levels: int) -> None:
    values = tied_values(10, num_columns, num_levels)

    found = leading(values, width)

    assert found.token_ids.shape == (10, width)
    for row in range(10):
        sure = int(found.num_sure[row])
        assert found.token_ids[row, :sure].tolist() == ordered_ids(values[row])[:sure]
        assert torch.equal(found.values[row], values[row].sort(descending=True).values[:width])


def test_leading_is_certain_of_all_but_ties_with_its_last_entry() -> None:
    values = torch.tensor([[5.0, 1.0, 4.0, 3.0, 3.0, 2.0]])

    assert leading(values, 3).num_sure.tolist() == [2]
    assert leading(values, 5).num_sure.tolist() == [4]
    assert leading(values, 6).num_sure.tolist() == [6]


@pytest.mark.parametrize("num_levels", [1, 3, 30, 100_000])
@pytest.mark.parametrize("width", [0, 1, 20, 63, 299, 300, 400])
def test_first_is_the_order_whatever_the_ties(width: int, num_levels: int) -> None:
    values = tied_values(10, 300, num_levels)

    assert first(values, width).tolist() == [ordered_ids(row)[:width] for row in values]
