"""Values that are made once for each key."""

import gc

import pytest

from faser.memo import Memo, WeakMemo


class Key:
    """An object that something is made of."""


@pytest.mark.parametrize("kind", [Memo, WeakMemo])
def test_a_value_is_made_once_for_each_key(kind: type[Memo[Key, list[Key]]]) -> None:
    made: list[Key] = []

    def make(key: Key) -> list[Key]:
        made.append(key)
        return [key]

    memo, one, other = kind(make), Key(), Key()
    assert memo[one] is memo[one]
    assert memo[other] == [other]
    assert made == [one, other]


def test_a_value_ends_with_its_key() -> None:
    memo: WeakMemo[Key, Key] = WeakMemo(lambda _key: Key())
    keys = [Key(), Key()]
    values = [memo[each] for each in keys]
    del keys[0]
    gc.collect()
    assert len(memo) == 1
    assert memo[keys[0]] is values[1]
