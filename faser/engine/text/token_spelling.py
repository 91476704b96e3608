"""TokenSpelling: from a token as the vocabulary writes it to the bytes that it represents.

Two spellings are supported. Byte-level BPE (GPT-2's) writes every byte as one printable character.
Sentencepiece writes a space as U+2581 and a byte outside the vocabulary as <0xE2>.
"""

import json
from dataclasses import dataclass
from typing import Any

import tokenizers

from faser.errors import ModelError

# Bytes that GPT-2's table writes as themselves; the others follow from U+0100 on, in order.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_UNPRINTABLE = [byte for byte in range(256) if byte not in set(_PRINTABLE)]
BYTE_OF_CHAR = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): b for i, b in enumerate(_UNPRINTABLE)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpelling:
    """The spelling of one vocabulary. byte_fallback: <0xE2> is a byte.

    replacements: (written, meant), in order of application.
    leading_spaces: number of spaces that the tokenizer adds at the start of a text.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    leading_spaces: int = 0

    @classmethod
    def of(cls, core: tokenizers.Tokenizer) -> "TokenSpelling":
        """The spelling that the tokenizer's decoder describes. Raises ModelError for an unsupported decoder."""
        byte_level = byte_fallback = False
        replacements: list[tuple[str, str]] = []
        leading_spaces = 0
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
                case {"type": "Metaspace", "replacement": str(written)}:
                    replacements.append((written, " "))
                    leading_spaces = 0 if step.get("prepend_scheme") == "never" else 1
                case _:
                    raise ModelError(f"the tokenizer's decoder step {json.dumps(step)} is not supported")
        if not steps or (byte_level and len(steps) > 1):
            raise ModelError(
                "the tokenizer's decoder is neither byte-level nor sentencepiece; these are supported"
            )
        return cls(
            byte_level=byte_level,
            byte_fallback=byte_fallback,
            replacements=tuple(replacements),
            leading_spaces=leading_spaces,
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
