"""Log probabilities in three JSON formats: OpenAI's for chats, OpenAI's for completions, vLLM's for prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from faser.engine.text.tokenizer import Tokenizer
from faser.types import PositionLogprobs

# JSON has no -inf; clients read this number as "impossible".
_LOWEST = -9999.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFormatter:
    """How tokens are written. as_ids: as token_id:17 instead of as text, so that no two tokens look alike."""

    tokenizer: Tokenizer
    as_ids: bool = False

    def chat(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.as_ids else self.tokenizer.token_text(token_id)

    def completion(self, token_id: int) -> str:
        """Alternatives are JSON keys, so part of a code point is written as its bytes: bytes:\\xe2\\x96."""
        if self.as_ids:
            return f"token_id:{token_id}"
        token_bytes = self.tokenizer.token_bytes(token_id)
        try:
            return token_bytes.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def chat_logprobs(positions: Sequence[PositionLogprobs], formatter: TokenFormatter) -> dict[str, Any]:
    """OpenAI's format for chats."""
    return {"content": [_chat_position(position, formatter) for position in positions], "refusal": None}


def _chat_position(position: PositionLogprobs, formatter: TokenFormatter) -> dict[str, Any]:
    top = [_chat_token(token_id, logprob, formatter) for token_id, logprob in position.top]
    return {**_chat_token(position.token_id, position.logprob, formatter), "top_logprobs": top}


def _chat_token(token_id: int, logprob: float, formatter: TokenFormatter) -> dict[str, Any]:
    return {
        "token": formatter.chat(token_id),
        "logprob": max(logprob, _LOWEST),
        "bytes": list(formatter.tokenizer.token_bytes(token_id)),
    }


class CompletionLogprobs:
    """OpenAI's format for completions, built token by token. offset: where the next token's text begins."""

    def __init__(self, formatter: TokenFormatter, *, offset: int, skip_special_tokens: bool) -> None:
        self._formatter = formatter
        self._skip_special_tokens = skip_special_tokens
        self.offset = offset
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._top: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add(self, token_id: int, position: PositionLogprobs | None, *, echoed: str | None = None) -> None:
        """position: None for the first token of a prompt, which has no probability.

        echoed: the text of the prompt that the token is part of; None: the token is generated.
        """
        self._tokens.append(self._formatter.completion(token_id))
        self._offsets.append(self.offset)
        self.offset += self._num_chars(token_id, echoed)
        if position is None:
            self._logprobs.append(None)
            self._top.append(None)
            return
        self._logprobs.append(max(position.logprob, _LOWEST))
        top: dict[str, float] = {}
        for each_id, logprob in ((position.token_id, position.logprob), *position.top):
            top.setdefault(self._formatter.completion(each_id), max(logprob, _LOWEST))
        self._top.append(top)

    def as_json(self) -> dict[str, Any]:
        return {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._top,
            "text_offset": self._offsets,
        }

    def _num_chars(self, token_id: int, echoed: str | None) -> int:
        """Number of characters that begin in this token: its bytes that do not continue a code point.

        A special token of the prompt counts where the echoed text has it: not one that tokenising added.
        """
        tokenizer = self._formatter.tokenizer
        if tokenizer.is_special(token_id):
            if echoed is None and self._skip_special_tokens:
                return 0
            if echoed is not None and not echoed.startswith(tokenizer.token_text(token_id), self.offset):
                return 0
        return sum(byte & 0xC0 != 0x80 for byte in tokenizer.token_bytes(token_id))


def prompt_logprobs(
    positions: Sequence[PositionLogprobs | None], formatter: TokenFormatter
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's format: per position, the alternatives and the prompt's own token, by token id."""
    return [None if position is None else _prompt_position(position, formatter) for position in positions]


def _prompt_position(position: PositionLogprobs, formatter: TokenFormatter) -> dict[str, dict[str, Any]]:
    ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(position.top, start=1)]
    own = (position.token_id, position.logprob, position.rank)
    return {
        str(token_id): {
            "logprob": max(logprob, _LOWEST),
            "rank": rank,
            "decoded_token": formatter.chat(token_id),
        }
        for token_id, logprob, rank in (*ranked, own)
    }
