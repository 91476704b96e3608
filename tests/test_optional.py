"""Missing values: what is kept, in which order, and that 0, "" and False are values."""

from faser.optional import given, maybe, or_else, present


def test_fields_and_values_that_are_missing_are_left_out() -> None:
    assert given({"a": 0, "b": None, "c": "", "d": False}) == {"a": 0, "c": "", "d": False}
    assert present([3, None, 0, None]) == [3, 0]


def test_only_a_missing_value_has_the_default() -> None:
    assert or_else(0, 3) == 0
    assert or_else(None, 3) == 3


def test_a_missing_value_is_not_changed() -> None:
    assert maybe(len, None) is None
    assert maybe(len, "") == 0
