"""LengthBound: a lower bound of the number of tokens of a text, without tokenising it.

Derived from the most bytes that one token covers and from the bytes that cost no token. A prompt that is far
too long can so be refused in the time that counting its bytes takes. Where that says too little (a token may cover
hundreds of bytes, and some tokenizers drop text), a limit on characters keeps texts from being tokenised that no
number of tokens explains: tokenising takes some 200 bytes of memory for each character.
"""

from dataclasses import dataclass

import tokenizers
from tokenizers import models

from faser.engine.text.token_spelling import BYTE_OF_CHAR, TokenSpelling, component_steps

# The largest factor by which Unicode NFC shrinks UTF-8: the Kelvin sign, 3 bytes, becomes the letter K;
# three Hangul jamo, 9 bytes, one syllable of 3.
_NFC_SHRINK_FACTOR = 3

_PIECE_CHARS = 1 << 16  # counted at a time

# Long texts have 3 to 5 characters for each token. More than 16 have short ones only: runs of spaces or dashes.
_MOST_CHARS_PER_TOKEN = 16
_SHORT_CHARS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBound:
    """bytes_per_token: the most bytes of UTF-8 that one token covers; None: there is no limit.

    free_bytes: bytes that cost no token, because the vocabulary lacks them and the tokenizer drops them.
    free_spaces: white space costs no token, because an added token absorbs adjacent white space.
    """

    bytes_per_token: int | None
    free_bytes: bytes = b""
    free_spaces: bool = False

    @classmethod
    def of(cls, core: tokenizers.Tokenizer, spelling: TokenSpelling) -> "LengthBound":
        vocabulary = core.get_vocab(with_added_tokens=True)
        added = core.get_added_tokens_decoder().values()
        shrinks = _shrink_factor(core)
        if shrinks is None or not isinstance(core.model, models.BPE) or not _spells_or_drops(core, spelling):
            return cls(bytes_per_token=None)
        # Matched as written: all of sentencepiece (U+2581 in a text is 3 bytes, and one space), and added tokens.
        as_written = {token.content for token in added} | (set() if spelling.byte_level else vocabulary.keys())
        longest = max((len(spelling.token_bytes(token)) for token in vocabulary), default=1)
        longest = max([longest, *(len(token.encode("utf-8")) for token in as_written)])
        missing = [byte for char, byte in BYTE_OF_CHAR.items() if char not in vocabulary]
        return cls(
            bytes_per_token=longest * shrinks,
            free_bytes=bytes(missing) if spelling.byte_level else b"",
            free_spaces=any(token.lstrip or token.rstrip for token in added),
        )

    def min_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens; 0 if there is no better one."""
        if self.bytes_per_token is None:
            return 0
        num_bytes = sum(self._num_bytes(text[at : at + _PIECE_CHARS]) for at in range(0, len(text), _PIECE_CHARS))
        return -(-num_bytes // self.bytes_per_token)

    def max_chars(self, num_tokens: int) -> int:
        """The length up to which a text is taken for one of at most num_tokens tokens.

        Either a longer text certainly has more tokens, or it has over 16 characters for each and 65,536 in all.
        """
        plausible = max(_SHORT_CHARS, _MOST_CHARS_PER_TOKEN * num_tokens)
        if self.bytes_per_token is None or self.free_bytes or self.free_spaces:
            return plausible
        return min(plausible, self.bytes_per_token * num_tokens)  # a character has at least one byte

    def _num_bytes(self, text: str) -> int:
        """The bytes that cost tokens."""
        kept = "".join(text.split()) if self.free_spaces else text
        return len(kept.encode("utf-8", "surrogatepass").translate(None, self.free_bytes))


def _spells_or_drops(core: tokenizers.Tokenizer, spelling: TokenSpelling) -> bool:
    """Whether every character is spelled or dropped, so that none become part of an unknown token."""
    if spelling.byte_level:
        return core.model.unk_token is None
    vocabulary = core.get_vocab(with_added_tokens=True)
    return core.model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))


def _shrink_factor(core: tokenizers.Tokenizer) -> int | None:
    """The largest factor by which text loses bytes before it is split into tokens; None: no limit."""
    factor = 1
    for step in component_steps(core.normalizer, "normalizers"):
        match step:
            case {"type": "NFC"}:
                factor *= _NFC_SHRINK_FACTOR
            case {"type": "Prepend"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                if len(new.encode("utf-8")) < len(old.encode("utf-8")):
                    return None
            case _:
                return None
    for step in component_steps(core.pre_tokenizer, "pretokenizers"):
        if step["type"] not in ("ByteLevel", "Digits", "Metaspace", "Split") or step.get("behavior") == "Removed":
            return None
    return factor
