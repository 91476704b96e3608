"""bad_words as token ids."""

import pytest

from faser.api.requests.sampling import read_bad_words
from faser.errors import RequestError
from tests.fake_engine import byte_tokenizer

TOKENIZER = byte_tokenizer()


def test_a_word_is_banned_with_and_without_a_space_before_it() -> None:
    expected = (tuple(b"ab"), tuple(b" ab"))
    assert read_bad_words(["ab"], TOKENIZER) == read_bad_words([" ab", "ab"], TOKENIZER) == expected


def test_none_are_none() -> None:
    assert read_bad_words(None, TOKENIZER) == read_bad_words([], TOKENIZER) == ()


@pytest.mark.parametrize(
    "words, said", [(["a", " "], "empty string"), (["x" * 1025], "1025 characters"), (["a"] * 257, "257 strings")]
)
def test_limits_are_named(words: list[str], said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        read_bad_words(words, TOKENIZER)
    assert caught.value.param == "bad_words"
