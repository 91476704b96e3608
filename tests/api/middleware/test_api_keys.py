"""Keys and their indices, also while keys are replaced."""

import hmac
from unittest.mock import patch

from faser.api.middleware.keys import ApiKeys


def test_every_key_has_an_index_of_its_own() -> None:
    keys = ApiKeys(["one", "two", "one", "drei ✓"])
    assert len(keys) == 3
    assert [keys.index_of(key.encode()) for key in ("one", "two", "drei ✓")] == [0, 1, 2]


def test_what_is_not_a_key_has_no_index() -> None:
    keys = ApiKeys(["one", "two"])
    assert [keys.index_of(key) for key in (b"", b"on", b"one ", b"onetwo", b"\xff")] == [None] * 5


def test_an_index_never_passes_to_another_key() -> None:
    """Limits and caches are kept by index: whoever gets the first key's index gets what is the first key's."""
    keys = ApiKeys(["first", "second"])
    keys.replace(["third", "second"])
    assert keys.index_of(b"first") is None
    assert keys.index_of(b"second") == 1
    assert keys.index_of(b"third") == 2
    keys.replace(["fourth", "first"])
    assert [keys.index_of(key) for key in (b"first", b"fourth", b"second", b"third")] == [0, 3, None, None]
    assert [keys.accepts(index) for index in range(5)] == [True, False, False, True, False]


def test_every_key_is_compared_in_constant_time_whichever_matches() -> None:
    """Digests of equal length, all of them, by the function that is made for it."""
    keys = ApiKeys(["a", "much longer than the others", "b"])
    for presented in (b"a", b"b", b"none of them"):
        with patch("faser.api.middleware.keys.hmac.compare_digest", wraps=hmac.compare_digest) as compare:
            keys.index_of(presented)
        lengths = {len(each) for call in compare.call_args_list for each in call.args}
        assert (compare.call_count, len(lengths)) == (3, 1)
