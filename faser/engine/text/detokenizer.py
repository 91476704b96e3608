"""Detokenizer: converts token ids to text as they arrive, and finds stop strings.

Holds back the bytes of an unfinished code point and the characters that may begin a stop string. The cost of a
push depends on its tokens only, not on the length of the text so far. Knows no request, no engine and no HTTP.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from faser.engine.text.tokenizer import Tokenizer, strip_leading

# A code point has at most 4 bytes, so at most 4 tokens with bytes. Twice that allows for tokens without bytes.
_CONTEXT_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizedText:
    """The result of one push.

    text: can be shown now. stop: the stop string that ended the text, or None.
    num_tokens: number of pushed tokens up to the one that completes a stop string; without one, all.
    """

    text: str
    stop: str | None
    num_tokens: int


class Detokenizer:
    """The text of one sample. The last push is the one that returns a stop string or has finished=True.

    The texts of all pushes, joined, equal the decoding of all tokens at once, cut at the first stop string to be
    complete; of several complete at the same character, at the longest. So the result depends neither on how
    tokens are divided into pushes nor on how text is divided into tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: tuple[str, ...],
        include_stop: bool,
        skip_special_tokens: bool,
        prompt_token_ids: tuple[int, ...],
        min_tokens: int = 0,
    ) -> None:
        """prompt_token_ids: the text continues theirs, and may finish a code point that begins in them.

        min_tokens: a stop string counts only if the token with this number (from 1) or a later one completes it.
        """
        self._tokenizer = tokenizer
        self._include_stop = include_stop
        self._skip_special_tokens = skip_special_tokens
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token_id in prompt_token_ids[-_CONTEXT_TOKENS:]:
            self._decoder.decode(self._visible_bytes(token_id))
        self._spaces_to_strip = 0 if self._shows_any(prompt_token_ids) else tokenizer.leading_spaces
        self._held = ""
        # Longest first: of stop strings that end at the same character, the longest is found.
        self._matchers = [_Matcher(each) for each in sorted(stop, key=len, reverse=True)]

    def push(self, token_ids: Sequence[int], *, finished: bool) -> DetokenizedText:
        """Add the next tokens. finished: these are the last, so the text that is held back is returned too."""
        shown: list[str] = []
        for taken, token_id in enumerate(token_ids, start=1):
            self._num_tokens += 1
            stop = self._take(self._decode(self._visible_bytes(token_id)), shown)
            if stop is not None:
                return DetokenizedText(text="".join(shown), stop=stop, num_tokens=taken)
        stop = self._take(self._decode(b"", final=True), shown) if finished else None
        if finished and stop is None:
            shown.append(self._held)
            self._held = ""
        return DetokenizedText(text="".join(shown), stop=stop, num_tokens=len(token_ids))

    def _take(self, text: str, shown: list[str]) -> str | None:
        """Add text to the held text, and move what begins no stop string to shown. Returns a completed stop."""
        if not self._matchers:
            shown.append(text)
            return None
        before = len(self._held)
        self._held += text
        for at, char in enumerate(text, start=before + 1):
            complete = [matcher for matcher in self._matchers if matcher.step(char)]
            if complete and self._num_tokens >= self._min_tokens:
                stop = complete[0].text
                shown.append(self._held[: at if self._include_stop else at - len(stop)])
                self._held = ""
                return stop
        # held:  ...safe...|longest prefix of a stop string
        safe = len(self._held) - max(matcher.matched for matcher in self._matchers)
        shown.append(self._held[:safe])
        self._held = self._held[safe:]
        return None

    def _decode(self, token_bytes: bytes, *, final: bool = False) -> str:
        text = self._decoder.decode(token_bytes, final)
        if self._spaces_to_strip and text:
            stripped = strip_leading(text, self._spaces_to_strip)
            self._spaces_to_strip = 0 if stripped else self._spaces_to_strip - len(text)
            return stripped
        return text

    def _visible_bytes(self, token_id: int) -> bytes:
        hidden = self._skip_special_tokens and self._tokenizer.is_special(token_id)
        return b"" if hidden else self._tokenizer.token_bytes(token_id)

    def _shows_any(self, token_ids: Sequence[int]) -> bool:
        return any(self._visible_bytes(token_id) for token_id in reversed(token_ids))


class _Matcher:
    """Finds one string in a sequence of characters, in amortised constant time per character.

    matched: length of the longest suffix of the characters that is a proper prefix of the string. The table is
    made as far as the string has ever been matched, so that a sample does not pay for all of its stop strings.
    Source: Knuth, Morris, Pratt, SIAM Journal on Computing 6(2), 1977, section 2; its next[] is _shorter here.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        # [i]: length of the longest proper suffix of the first i + 1 characters that is also a prefix
        self._shorter = [0]

    def step(self, char: str) -> bool:
        """Take a character; return whether it completes the string."""
        self.matched = self._extend(self.matched, char)
        while len(self._shorter) < self.matched:
            self._shorter.append(self._extend(self._shorter[-1], self.text[len(self._shorter)]))
        complete = self.matched == len(self.text)
        if complete:
            self.matched = self._shorter[-1]
        return complete

    def _extend(self, length: int, char: str) -> int:
        while length and self.text[length] != char:
            length = self._shorter[length - 1]
        return length + 1 if self.text[length] == char else 0
