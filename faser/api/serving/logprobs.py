"""Log probabilities in the three shapes that clients know: chat, text, and vLLM's of the prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from faser.engine.text.tokenizer import Tokenizer
from faser.types import PositionLogprobs

# JSON has no -inf; clients know this number for "impossible".
_LOWEST = -9999.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenNames:
    """How tokens are written. as_ids: token_id:17 instead of their text, so that no two look alike."""

    tokenizer: Tokenizer
    as_ids: bool = False

    def chat(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.as_ids else self.tokenizer.token_text(token_id)

    def text(self, token_id: int) -> str:
        """Alternatives are keys there, so a part of a code point is written as its bytes: bytes:\\xe2\\x96."""
        if self.as_ids:
            return f"token_id:{token_id}"
        token_bytes = self.tokenizer.token_bytes(token_id)
        try:
            return token_bytes.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def chat_logprobs(positions: Sequence[PositionLogprobs], names: TokenNames) -> dict[str, Any]:
    """OpenAI's shape of chat answers."""
    return {"content": [_chat_position(position, names) for position in positions], "refusal": None}


def _chat_position(position: PositionLogprobs, names: TokenNames) -> dict[str, Any]:
    top = [_chat_token(token_id, logprob, names) for token_id, logprob in position.top]
    return {**_chat_token(position.token_id, position.logprob, names), "top_logprobs": top}


def _chat_token(token_id: int, logprob: float, names: TokenNames) -> dict[str, Any]:
    return {
        "token": names.chat(token_id),
        "logprob": max(logprob, _LOWEST),
        "bytes": list(names.tokenizer.token_bytes(token_id)),
    }


class TextLogprobs:
    """OpenAI's shape of text completions, built token by token. offset: where the next token's text begins."""

    def __init__(self, names: TokenNames, *, offset: int, skip_special_tokens: bool) -> None:
        self._names = names
        self._skip_special_tokens = skip_special_tokens
        self.offset = offset
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._top: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add(self, token_id: int, position: PositionLogprobs | None) -> None:
        """position: None where nothing precedes the token, so that it has no probability."""
        self._tokens.append(self._names.text(token_id))
        self._offsets.append(self.offset)
        self.offset += self._num_chars(token_id)
        if position is None:
            self._logprobs.append(None)
            self._top.append(None)
            return
        self._logprobs.append(max(position.logprob, _LOWEST))
        top: dict[str, float] = {}
        for each_id, logprob in (*position.top, (position.token_id, position.logprob)):
            top.setdefault(self._names.text(each_id), max(logprob, _LOWEST))
        self._top.append(top)

    def as_json(self) -> dict[str, Any]:
        return {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._top,
            "text_offset": self._offsets,
        }

    def _num_chars(self, token_id: int) -> int:
        """Characters that begin in this token: its bytes that do not continue a code point."""
        tokenizer = self._names.tokenizer
        if self._skip_special_tokens and tokenizer.is_special(token_id):
            return 0
        return sum(byte & 0xC0 != 0x80 for byte in tokenizer.token_bytes(token_id))


def prompt_logprobs(
    positions: Sequence[PositionLogprobs | None], names: TokenNames
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's shape: by token id, the alternatives and the prompt's own token."""
    return [None if position is None else _prompt_position(position, names) for position in positions]


def _prompt_position(position: PositionLogprobs, names: TokenNames) -> dict[str, dict[str, Any]]:
    ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(position.top, start=1)]
    own = (position.token_id, position.logprob, position.rank)
    return {
        str(token_id): {
            "logprob": max(logprob, _LOWEST),
            "rank": rank,
            "decoded_token": names.chat(token_id),
        }
        for token_id, logprob, rank in (*ranked, own)
    }
