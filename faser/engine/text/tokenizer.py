"""Tokenizer: text to token ids and back, with the exact bytes of every token.

Decoding joins the bytes of the tokens and reads them as UTF-8, so text cut between any two tokens joins to the
same text. Knows neither the model nor HTTP.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from faser.engine.checkpoints.files import refuse_special_files
from faser.engine.checkpoints.tokenizer_settings import TokenizerSettings, read_settings
from faser.engine.text.vocabulary import LengthBound, TokenSpelling
from faser.errors import ModelError, RequestError

_MARGIN_CHARS = 4096
_MOST_TOKENS = 1 << 24


class Tokenizer:
    """A checkpoint's tokenizer. Immutable, so threads may share it.

    vocab_size: the highest token id plus one, added tokens included. base_vocab_size: without added tokens.
    leading_spaces: number of spaces that the tokenizer adds at the start of a text.
    """

    def __init__(self, core: tokenizers.Tokenizer, settings: TokenizerSettings) -> None:
        """Takes over core and adds the special tokens to it.

        Raises ModelError for an unsupported decoder, or too high an id.
        """
        self._core = core
        core.no_truncation()
        core.no_padding()
        known = {token.content for token in core.get_added_tokens_decoder().values()}
        core.add_tokens([token for token in settings.special_tokens if token.content not in known])
        self.bos_token = settings.bos_token
        self.eos_token = settings.eos_token
        self.chat_template = settings.chat_template
        spelling = TokenSpelling.of(core)
        vocabulary = core.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if self.vocab_size > _MOST_TOKENS:
            raise ModelError(f"the tokenizer has the id {self.vocab_size - 1}; the limit is {_MOST_TOKENS - 1}")
        added = core.get_added_tokens_decoder()
        self.base_vocab_size = max((i for i in vocabulary.values() if i not in added), default=-1) + 1
        self.leading_spaces = spelling.leading_spaces
        self._bytes = [b""] * self.vocab_size
        for token, token_id in vocabulary.items():
            self._bytes[token_id] = spelling.token_bytes(token)
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._length_bound = LengthBound.of(core, spelling, vocabulary)

    def encode(self, text: str, *, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        """Token ids of a text. Special tokens written out in the text are recognised.

        add_special_tokens: also add the tokens with which the checkpoint begins or ends a text, such as BOS.
        most: how many ids are kept; the text's last tokens go, the added ones stay.
        Raises RequestError for a lone surrogate, which has no UTF-8, and for text that the vocabulary lacks.
        """
        found = self._encoding(text, add_special_tokens=add_special_tokens and most is None)
        if most is not None:
            added = self._core.num_special_tokens_to_add(is_pair=False) if add_special_tokens else 0
            found.truncate(max(most - added, 0))
            found = self._core.post_process(found, None, add_special_tokens)
        ids: list[int] = found.ids[:most]
        return ids

    def encode_pair(self, first: str, second: str, *, most: int | None = None) -> tuple[list[int], int | None]:
        """Token ids of a pair with the checkpoint's special tokens, and where those of the second type begin.

        None: all have one type. most: how many ids are kept: tokens go from the end of the longer text, as long as
        it is longer. Raises RequestError as encode does.
        """
        one, two = (self._encoding(text, add_special_tokens=False) for text in (first, second))
        if most is not None:
            room = max(most - self._core.num_special_tokens_to_add(is_pair=True), 0)
            shorter, longer = sorted((one, two), key=lambda each: len(each.ids))
            if len(shorter.ids) + len(longer.ids) > room:
                kept = min(len(shorter.ids), room // 2)
                shorter.truncate(kept)
                longer.truncate(room - kept)
        pair = self._core.post_process(one, two, True)
        types: list[int] = pair.type_ids
        return pair.ids[:most], types.index(1) if 1 in types else None

    def _encoding(self, text: str, *, add_special_tokens: bool) -> Any:
        """Encode a text with the library. Raises RequestError as encode does."""
        try:
            # A batch of one, because encode() holds the interpreter lock and would block all other requests.
            (encoded,) = self._core.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError:
            char, at = next((char, at) for at, char in enumerate(text) if "\ud800" <= char <= "\udfff")
            raise RequestError(
                f"the text has the lone surrogate U+{ord(char):04X} at character {at}; it must be valid Unicode"
            ) from None
        except Exception as error:  # the library raises plain Exception, as for text that the vocabulary lacks
            raise RequestError(f"the tokenizer cannot encode this text: {error}") from None
        return encoded

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; U+FFFD replaces bytes that are not UTF-8. Ids without a token are skipped."""
        special = self._special if skip_special_tokens else frozenset()
        text = b"".join(self.token_bytes(each) for each in ids if each not in special).decode("utf-8", "replace")
        return strip_leading(text, self.leading_spaces)

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of a token, which may be part of a code point; empty for an id without a token."""
        return self._bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def token_text(self, token_id: int) -> str:
        """The text of a single token; U+FFFD replaces part of a code point."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_id(self, token: str) -> int | None:
        """The id of a token, spelled as in the vocabulary; None: there is no such token."""
        token_id: int | None = self._core.token_to_id(token)
        return token_id

    def token(self, token_id: int) -> str | None:
        """A token as the vocabulary spells it; None: there is no such id."""
        spelled: str | None = self._core.id_to_token(token_id)
        return spelled

    def to_json(self) -> str:
        """The tokenizer with its added tokens, in the format of tokenizer.json."""
        text: str = self._core.to_str()
        return text

    def special_tokens(self) -> dict[str, int]:
        """The id of each special token, by its spelling."""
        return {str(self._core.id_to_token(token_id)): token_id for token_id in sorted(self._special)}

    def is_special(self, token_id: int) -> bool:
        """Return whether skip_special_tokens leaves the token out."""
        return token_id in self._special

    def min_tokens(self, text: str) -> int:
        """A lower bound of len(encode(text)), found without tokenising.

        The UTF-8 length of the text divided by the most that one token covers. 0 for a tokenizer that can drop or
        merge text without limit.
        """
        return self._length_bound.min_tokens(text)

    def max_chars(self, num_tokens: int) -> int:
        """The length, in characters, above which a text has more than num_tokens tokens, or is taken to have them.

        See LengthBound.
        """
        return self._length_bound.max_chars(num_tokens)

    def end_of(self, text: str, num_tokens: int) -> str:
        """The end of a text, long enough for its last num_tokens tokens.

        encode() gives the same last tokens for it as for the whole text wherever the two agree on one boundary
        between tokens in the characters that are kept beyond those of the tokens, at least 4,096. Words, numbers
        and lines set such boundaries; a text without them, such as one letter repeated, may be divided otherwise.
        """
        return text[-(self.max_chars(num_tokens) + _MARGIN_CHARS) :]

    def start_of(self, text: str, num_tokens: int) -> str:
        """The start of a text, long enough for its first num_tokens tokens; see end_of."""
        return text[: self.max_chars(num_tokens) + _MARGIN_CHARS]


def strip_leading(text: str, limit: int) -> str:
    """text without its leading spaces, of which at most limit are removed."""
    spaces = len(text) - len(text.lstrip(" "))
    return text[min(spaces, limit) :]


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a checkpoint directory or of a .gguf file.

    Raises ModelError that names the file if it is missing, broken or unsupported.
    """
    if path.is_file():
        from faser.engine.checkpoints.gguf_tokenizer import read_gguf_tokenizer  # imports the gguf library

        return Tokenizer(*read_gguf_tokenizer(path))
    refuse_special_files(path)
    vocabulary_path = path / "tokenizer.json"
    if not vocabulary_path.is_file():
        found = next((name for name in ("tokenizer.model", "tekken.json") if (path / name).is_file()), None)
        advice = f"; {found} alone is not enough, convert it to tokenizer.json" if found else ""
        raise ModelError(f"{path} has no tokenizer.json{advice}")
    try:
        core = tokenizers.Tokenizer.from_file(str(vocabulary_path))
    except Exception as error:  # the library raises plain Exception for any damage
        raise ModelError(f"{vocabulary_path} is not a usable tokenizer: {error}") from None
    try:
        return Tokenizer(core, read_settings(path))
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
