"""Token ids to text while they arrive: what may be shown now, and whether a stop string ended it.

Owns the text that is held back: bytes of an unfinished code point, and characters with which a stop string
may have begun. Each push costs what its own tokens cost, however long the text before. Knows no request,
no engine and no HTTP.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from faser.engine.text.tokenizer import Tokenizer, strip_leading

# A code point has at most 4 bytes, so no more tokens than this can be needed to finish one. Twice that, for
# ids without bytes in between.
_CONTEXT_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizedText:
    """What one push yields.

    text: to be shown now. stop: the stop string that ended the text, or None.
    num_tokens: how many of the pushed tokens count; those behind the one that completes a stop string do not.
    """

    text: str
    stop: str | None
    num_tokens: int


class Detokenizer:
    """The text of one sample. After a DetokenizedText with a stop, or after finished, nothing more may be pushed.

    All texts joined are the decoding of all tokens at once, cut at the stop string that is complete first;
    of several complete at the same character, the longest. So the result does not depend on how tokens
    are spread over pushes, nor text over tokens.
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
        """prompt_token_ids: what the text continues; a code point begun there is finished here.

        min_tokens: a stop string counts only if this token or a later one (counted from 1) completes it.
        """
        self._tokenizer = tokenizer
        self._include_stop = include_stop
        self._skip_special_tokens = skip_special_tokens
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token_id in prompt_token_ids[-_CONTEXT_TOKENS:]:
            self._decoder.decode(self._visible_bytes(token_id))
        self._strips = 0 if self._shows_any(prompt_token_ids) else tokenizer.leading_spaces
        self._held = ""
        # Of stop strings that end at the same character the longest is found first.
        self._matchers = [_Matcher(each) for each in sorted(stop, key=len, reverse=True)]

    def push(self, token_ids: Sequence[int], *, finished: bool) -> DetokenizedText:
        """Take the next tokens. finished: there are no more, so give out all that is held back."""
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
        """Add new text to what is held back and move what is safe to shown; the stop string that it completes."""
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
        # held:  ...safe...|longest beginning of a stop string
        safe = len(self._held) - max(matcher.matched for matcher in self._matchers)
        shown.append(self._held[:safe])
        self._held = self._held[safe:]
        return None

    def _decode(self, token_bytes: bytes, *, final: bool = False) -> str:
        text = self._decoder.decode(token_bytes, final)
        if self._strips and text:
            stripped = strip_leading(text, self._strips)
            self._strips = 0 if stripped else self._strips - len(text)
            return stripped
        return text

    def _visible_bytes(self, token_id: int) -> bytes:
        hidden = self._skip_special_tokens and self._tokenizer.is_special(token_id)
        return b"" if hidden else self._tokenizer.token_bytes(token_id)

    def _shows_any(self, token_ids: Sequence[int]) -> bool:
        return any(self._visible_bytes(token_id) for token_id in reversed(token_ids))


class _Matcher:
    """Finds one string in characters that come one by one, in constant time each on average.

    matched: how many characters at the end of those seen are the beginning of the string; never all of them.
    Source: Knuth, Morris, Pratt, SIAM Journal on Computing 6(2), 1977, section 2; its next[] is _shorter here.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        # [i]: of the first i + 1 characters, the longest proper ending that is also a beginning
        self._shorter = [0] * len(text)
        length = 0
        for at in range(1, len(text)):
            length = self._extend(length, text[at])
            self._shorter[at] = length

    def step(self, char: str) -> bool:
        """Whether this character completes the string."""
        self.matched = self._extend(self.matched, char)
        complete = self.matched == len(self.text)
        if complete:
            self.matched = self._shorter[-1]
        return complete

    def _extend(self, length: int, char: str) -> int:
        while length and self.text[length] != char:
            length = self._shorter[length - 1]
        return length + 1 if self.text[length] == char else 0
