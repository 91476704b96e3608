"""Tokens as bytes: what each of them spells, and how few tokens a text can be, by its number of bytes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import models

from faser.errors import ModelError

# Bytes that GPT-2's table writes as themselves; the others follow from U+0100 on, in order.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_UNPRINTABLE = [byte for byte in range(256) if byte not in set(_PRINTABLE)]
BYTE_OF_CHAR = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): b for i, b in enumerate(_UNPRINTABLE)}

# The largest factor by which Unicode NFC shrinks UTF-8: the Kelvin sign, 3 bytes, becomes the letter K;
# three Hangul jamo, 9 bytes, one syllable of 3.
_NFC_SHRINK_FACTOR = 3
_PIECE_CHARS = 1 << 16  # counted at a time

# Long texts have 3 to 5 characters for each token. More than 16 have short ones only: runs of spaces or dashes.
_MOST_CHARS_PER_TOKEN = 16
_SHORT_CHARS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpelling:
    """From a token as a vocabulary writes it to the bytes that it represents.

    Three spellings are supported. Byte-level BPE (GPT-2's) writes every byte as one printable character.
    Sentencepiece writes a space as U+2581, and with byte_fallback a byte outside the vocabulary as <0xE2>.
    WordPiece (BERT's) marks tokens that continue a word.

    replacements: (written, meant), in order of application. continues: before a token that continues a word, where
    the others begin with a space; None: there is no such mark.
    leading_spaces: number of spaces that the tokenizer adds at the start of a text.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    leading_spaces: int = 0
    continues: str | None = None

    @classmethod
    def of(cls, core: tokenizers.Tokenizer) -> "TokenSpelling":
        """The spelling that the tokenizer's decoder describes. Raises ModelError for an unsupported decoder."""
        byte_level = byte_fallback = False
        replacements: list[tuple[str, str]] = []
        leading_spaces = 0
        continues: str | None = None
        steps = component_steps(core.decoder, "decoders")
        for step in steps:
            match step:
                case {"type": "ByteLevel"}:
                    byte_level = True
                case {"type": "ByteFallback"}:
                    byte_fallback = True
                case {"type": "Fuse"}:
                    pass
                case {"type": "Replace", "pattern": {"String": str(written)}, "content": str(meant)}:
                    replacements.append((written, meant))
                case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
                    leading_spaces = start
                case {"type": "WordPiece", "prefix": str(mark)}:
                    continues, leading_spaces = mark, 1
                case {"type": "Metaspace", "replacement": str(written)}:
                    replacements.append((written, " "))
                    leading_spaces = 0 if step.get("prepend_scheme") == "never" else 1
                case _:
                    raise ModelError(f"the tokenizer's decoder step {json.dumps(step)} is not supported")
        if not steps or (byte_level and len(steps) > 1):
            raise ModelError(
                "the tokenizer's decoder is neither byte-level nor sentencepiece nor WordPiece; only these are "
                "supported"
            )
        return cls(
            byte_level=byte_level,
            byte_fallback=byte_fallback,
            replacements=tuple(replacements),
            leading_spaces=leading_spaces,
            continues=continues,
        )

    def token_bytes(self, token: str) -> bytes:
        """The bytes of a token, which is written as in the vocabulary."""
        if self.byte_level:
            try:
                return bytes([BYTE_OF_CHAR[char] for char in token])
            except KeyError:  # an added token, written literally
                return token.encode("utf-8")
        if self.byte_fallback and (byte := _fallback_byte(token)) is not None:
            return bytes([byte])
        if self.continues is not None:
            part = token.removeprefix(self.continues)
            return (part if part != token else f" {token}").encode("utf-8")
        for written, meant in self.replacements:
            token = token.replace(written, meant)
        return token.encode("utf-8")


def _fallback_byte(token: str) -> int | None:
    """The byte of a token such as <0xE2>; None for any other token."""
    if len(token) != len("<0xE2>") or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None


def component_steps(component: Any, sequence_key: str) -> list[dict[str, Any]]:
    """The steps of a component of the tokenizers library, sequences flattened; empty for None."""
    if component is None:
        return []
    return _flatten(json.loads(component.__getstate__()), sequence_key)


def _flatten(state: dict[str, Any], sequence_key: str) -> list[dict[str, Any]]:
    if state["type"] != "Sequence":
        return [state]
    return [step for part in state[sequence_key] for step in _flatten(part, sequence_key)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBound:
    """A lower bound of the number of tokens of a text, without tokenising it.

    A prompt that is far too long can so be refused in the time that counting its bytes takes. Where that says too
    little (a token may cover hundreds of bytes, and some tokenizers drop text), a limit on characters keeps texts
    from being tokenised that no number of tokens explains: tokenising takes some 200 bytes of memory for each
    character.

    bytes_per_token: the most bytes of UTF-8 that one token covers; None: there is no limit.

    free_bytes: bytes that cost no token, because the vocabulary lacks them and the tokenizer drops them.
    free_spaces: white space costs no token, because an added token absorbs adjacent white space.
    """

    bytes_per_token: int | None
    free_bytes: bytes = b""
    free_spaces: bool = False

    @classmethod
    def of(
        cls, core: tokenizers.Tokenizer, spelling: TokenSpelling, vocabulary: Mapping[str, int]
    ) -> "LengthBound":
        """Return the bound of a tokenizer. vocabulary: its tokens, those that were added included."""
        added = core.get_added_tokens_decoder().values()
        shrinks = _shrink_factor(core)
        if (
            shrinks is None
            or not isinstance(core.model, models.BPE)
            or not _spells_or_drops(core, spelling, vocabulary)
        ):
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


def _spells_or_drops(core: tokenizers.Tokenizer, spelling: TokenSpelling, vocabulary: Mapping[str, int]) -> bool:
    """Return whether every character is spelled or dropped, so that none become part of an unknown token."""
    if spelling.byte_level:
        return core.model.unk_token is None
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
