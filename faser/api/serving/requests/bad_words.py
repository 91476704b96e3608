"""bad_words as token ids: a word is banned as it is tokenised at the beginning of a text, and after a space."""

from collections.abc import Sequence

from faser.engine.text.tokenizer import Tokenizer
from faser.errors import RequestError
from faser.types import MAX_BAD_WORDS, MAX_STOP_CHARS


def read_bad_words(words: Sequence[str] | None, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word's sequences of tokens. Raises RequestError for a word that is empty or too long."""
    if not words:
        return ()
    if len(words) > MAX_BAD_WORDS:
        raise RequestError(
            f"bad_words has {len(words)} strings; at most {MAX_BAD_WORDS} are allowed", param="bad_words"
        )
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        if not bare:
            raise RequestError("bad_words contains an empty string; it would ban every token", param="bad_words")
        if len(word) > MAX_STOP_CHARS:
            raise RequestError(
                f"bad_words has a string of {len(word)} characters; at most {MAX_STOP_CHARS} are allowed",
                param="bad_words",
            )
        for spelled in (bare, f" {bare}"):
            found[tuple(tokenizer.encode(spelled, add_special_tokens=False))] = None
    return tuple(found)
