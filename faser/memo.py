"""Values that are made of a key at their first use, and kept."""

from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Memo(dict[_Key, _Value]):
    """Values by key; make is called for a key that is not there yet."""

    def __init__(self, make: Callable[[_Key], _Value]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, key: _Key) -> _Value:
        value = self[key] = self._make(key)
        return value


class WeakMemo(Generic[_Key, _Value]):
    """Values by key, each kept as long as its key lives; make is called for a key that is not there yet."""

    def __init__(self, make: Callable[[_Key], _Value]) -> None:
        self._make = make
        self._made: WeakKeyDictionary[_Key, _Value] = WeakKeyDictionary()

    def __getitem__(self, key: _Key) -> _Value:
        try:
            return self._made[key]
        except KeyError:
            value = self._made[key] = self._make(key)
            return value

    def __len__(self) -> int:
        return len(self._made)
