"""SequenceMatchers: where each sequence stands in its grammar.

A matcher has taken the tokens of its sequence that are committed, and no others. Draft tokens after them are tried
on copies:

    committed     c1 c2 ... cn
    draft                       x1   x2   x3
    rows                        | r0 | r1 | r2 | r3      row k is masked as after x1 … xk: `masks`
    allowed                       yes  yes  no           x3 is no row: `num_allowed` is asked before the step

The mask of r0 is computed by other threads (mask_threads.py) as soon as the token before it is known. The thread
of the steps waits for it no longer than `patience_s`: a sequence whose mask is not ready gets no token in that
step, and the same one later. Where draft rows take long or meet a limit of the parser, the sequence gets no drafts
for a while: limits are met by committed tokens alone, so answers are those without drafts. All questions about the
drafts of a step, of all sequences, wait for `patience_s` together.

Copies of a matcher share its lexer, and so do all sequences with the same grammar. When the lexer is at its limit,
each of them goes on with a matcher of its own, which takes the tokens of its answer alone.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
from llguidance import LLExecutor, LLMatcher

from faser.engine.structure.compiler import GrammarCompiler
from faser.engine.structure.mask_threads import MaskThreads, Task
from faser.types.answer import SequenceError
from faser.types.arrays import Ints
from faser.types.sampling import StructuredOutput, StructureKind

PATIENCE_S = 0.02
_QUICK = 1 / 20  # of the patience; a sequence whose last token took longer is slow: it gets no drafts
_DRAFT = 1 / 10  # of the patience, what draft tokens may take in a step, as the last token predicts it
_MOST_THREADS = 8  # masks take microseconds: more threads wait for each other
_PAUSE = 64  # tokens without drafts after draft rows that took too long
LONGEST_S = 10.0  # what one token may take
_TOO_MANY = 1 << 40  # tokens to take back
# Only these may be so ambiguous that the time of one token says nothing about the next one.
_AMBIGUOUS = (StructureKind.GRAMMAR, StructureKind.STRUCTURAL_TAG)


@dataclass(slots=True, eq=False)
class _Draft:
    """words: [γ + 1, W], of the rows before, between and after these tokens. failed: a limit was met."""

    tokens: tuple[int, ...]
    words: Ints
    task: Task | None = None
    failed: bool = True


@dataclass(slots=True, eq=False)
class _Place:
    """Position of one slot's answer in its grammar. The task owns the fields of the second group until it is done.

    may_end_from: before this position the answer ends only if nothing else is allowed. token_ids: of the answer.
    drafts_from: how many of them there are before it drafts again.

    num_taken: how many the matcher has taken. mask: [W], of the next token. failed: there is none. seconds: of a
    processor, for the last token and its mask. lexer: is held while a matcher that shares it works, since
    llguidance would wait for it with the interpreter lock. is_alone: no other place has that lexer.
    """

    asked: StructuredOutput
    may_end_from: float
    mask: Ints
    lexer: threading.Lock
    token_ids: list[int]
    drafts_from: int = 0
    draft: _Draft | None = None

    matcher: LLMatcher | None = None
    num_taken: int = 0
    failed: bool = True
    seconds: float = 0.0
    is_alone: bool = False
    task: Task = field(init=False)

    @property
    def ready(self) -> LLMatcher:
        assert self.matcher is not None
        return self.matcher


class SequenceMatchers:
    """Matchers of all slots whose request asks for structure. num_threads: that compute masks.

    patience_s: how long a step waits for masks. longest_s: what a token may take; then its answer ends with an
    error. state_chunk: of a model with recurrent states, which goes on at multiples of it, since it cannot compute
    the rows before them again: there a step waits for longest_s at most.
    Called by the thread of the steps alone.
    """

    def __init__(
        self,
        compiler: GrammarCompiler,
        *,
        num_threads: int,
        patience_s: float = PATIENCE_S,
        longest_s: float = LONGEST_S,
        state_chunk: int | None = None,
    ) -> None:
        self._compiler = compiler
        self._state_chunk = state_chunk
        self._patience_s, self._longest_s = patience_s, longest_s
        self._threads = MaskThreads(min(num_threads, _MOST_THREADS))
        self._executor = LLExecutor(1)
        self._places: dict[int, _Place] = {}
        self._ends: Ints | None = None  # [W] a mask of the end-of-sequence tokens
        self._left_s = patience_s  # what questions about drafts may wait until the next masks

    @property
    def slots(self) -> Collection[int]:
        return self._places

    def start(
        self, slot: int, asked: StructuredOutput, output: Sequence[int], *, may_end_from: float = 0.0
    ) -> None:
        """A sequence takes over a free slot. output: tokens that it has generated already."""
        mask = np.zeros(self._compiler.mask_words, dtype=np.int64)
        same = [each.lexer for each in self._places.values() if each.asked == asked and not each.is_alone]
        place = _Place(asked, may_end_from, mask, same[0] if same else threading.Lock(), [*output])
        place.task = self._threads.submit(lambda: self._advance(place))
        self._places[slot] = place
        if self._state_chunk and output:
            self._pause(place)  # its draft may have been what could not be verified

    def release(self, slot: int) -> None:
        """The slot is free; it need not be one of `slots`."""
        self._places.pop(slot, None)

    def is_late(self, slot: int) -> bool:
        """Return whether the mask of its next token is still being computed; any slot may be asked for."""
        place = self._places.get(slot)
        return place is not None and not place.task.is_done

    def accept(self, slot: int, *token_ids: int) -> None:
        """The sequence continues with these tokens. One that its grammar forbids leaves it without any token."""
        place = self._places[slot]
        place.task.wait(threading.TIMEOUT_MAX)  # it is done: the first of the tokens came from its mask
        place.draft = None
        place.token_ids += token_ids
        place.task = self._threads.submit(lambda: self._advance(place), slow=self._is_slow(place))

    def masks(
        self, drafts: Sequence[tuple[int, tuple[int, ...]]], positions: Sequence[int], *, alone: bool = True
    ) -> tuple[Ints, dict[int, SequenceError | None]]:
        """Return masks [R, W], where bit i % 64 of word i // 64 allows token i, and the slots that get no token.

        drafts: (slot, draft tokens) for each sequence, which has a row for its next token and one more for each
        draft token. positions: of the token that the first row of each sequence decides. alone: the step has no
        other sequences. Rows after a draft token that is forbidden, or that ends the sequence, allow every token:
        no step reaches them. A sequence whose grammar failed is allowed no token.

        Nor is one whose masks are not ready; why it cannot go on, or None: its rows have to be computed again.
        """
        for (slot, _), position in zip(drafts, positions, strict=True):
            if self._state_chunk and position % self._state_chunk == 0:
                self._places[slot].task.wait(self._longest_s)
        waiting = self._wait([slot for slot, _ in drafts], alone=alone)
        self._left_s = self._patience_s
        deadline = time.perf_counter() + self._patience_s
        drafted = {slot: self._try(slot, draft) for slot, draft in drafts if draft and slot not in waiting}
        words = np.zeros((sum([len(draft) + 1 for _, draft in drafts]), len(self._ends_mask())), dtype=np.int64)
        row = 0
        for (slot, draft), position in zip(drafts, positions, strict=True):
            place, count = self._places[slot], len(draft) + 1
            if slot in drafted and not self._is_done(place, drafted[slot], until_s=deadline):
                waiting[slot] = None
            elif slot not in waiting and not place.failed:
                found = words[row : row + count]
                found[:] = drafted[slot].words[:count] if draft else place.mask
                if position < place.may_end_from:
                    early = found[: int(min(count, place.may_end_from - position))]
                    going_on = early & ~self._ends_mask()
                    early[:] = np.where(going_on.any(-1, keepdims=True), going_on, early)
            row += count
        return words, waiting

    def may_draft(self, slot: int, num_tokens: int) -> int:
        """Return how many of num_tokens draft tokens a step may try: none where the grammar takes long.

        Does not depend on the tokens, so a draft may be cut there whatever it was drawn from.
        """
        place = self._places[slot]
        if self._takes_long(place) or not self._comes(place.task.wait) or place.failed or self._is_slow(place):
            return 0
        if len(place.token_ids) < place.drafts_from:
            return 0
        most_s = self._patience_s * _DRAFT
        return num_tokens if place.seconds * num_tokens <= most_s else int(most_s / place.seconds)

    def num_allowed(self, slot: int, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens, from the first one on, the grammar allows to follow. Changes nothing.

        At most as many as `may_draft` allows.
        """
        place = self._places[slot]
        token_ids = token_ids[: self.may_draft(slot, len(token_ids))]
        if not token_ids:
            return 0
        if place.asked.kind not in _AMBIGUOUS:
            with self._held(place) as held:
                return int(place.ready.validate_tokens([*token_ids])) if held else 0
        draft = self._try(slot, tuple(token_ids))
        if not self._is_done(place, draft):
            return 0
        of_tokens = np.array(token_ids, dtype=np.int64)
        bits = draft.words[np.arange(len(of_tokens)), of_tokens // 64] >> (of_tokens % 64) & 1
        allowed = int(bits.argmin()) if not bits.all() else len(of_tokens)
        ends = np.isin(of_tokens[:allowed], self._compiler.eos_token_ids)
        return int(ends.argmax()) + 1 if ends.any() else allowed

    def forced(self, slot: int, after: Sequence[int], limit: int) -> list[int]:
        """Tokens that have to follow: at most limit of the text that the grammar leaves no choice about.

        It is divided as the tokenizer divides it, without tokens at its end that further text may change; the
        model may divide it otherwise. The first token that the tokenizer has and the model has not ends them.
        after: draft tokens that come first. Changes nothing.
        """
        place = self._places[slot]
        if self.may_draft(slot, len(after) + 1) <= len(after) or (after and place.asked.kind in _AMBIGUOUS):
            return []
        with self._held(place) as held:
            matcher = place.ready.deep_copy()
            if not held or (after and matcher.try_consume_tokens([*after]) < len(after)):
                return []
            wanted = matcher.compute_ff_tokens()[:limit]
            found = [*takewhile(lambda token_id: token_id < self._compiler.vocab_size, wanted)]
            if found:
                matcher.try_consume_tokens(found)
            if len(found) < limit and matcher.is_stopped() and not matcher.is_error():
                found.append(self._compiler.eos_token_ids[0])
            return found

    def _is_slow(self, place: _Place) -> bool:
        return place.seconds > self._patience_s * _QUICK

    def _takes_long(self, place: _Place) -> bool:
        """Return whether steps do not wait for its mask: the last token was slow, or a step waited for it."""
        at_work = not place.task.is_done and place.task.began_s < time.perf_counter() - self._patience_s
        return at_work or self._is_slow(place)

    def _advance(self, place: _Place) -> None:
        """Take the tokens that are new, and compute the mask of the next one. In another thread."""
        place.failed = True  # until the mask is there: an exception leaves no mask of an earlier token
        with place.lexer:
            self._follow(place)
            shared = place.failed and not place.is_alone and place.ready.get_error().startswith("lexer error")
        if shared:
            place.is_alone, place.lexer = True, threading.Lock()
            place.matcher, place.num_taken = self._compiler.alone(place.asked), 0
            self._follow(place)

    def _follow(self, place: _Place) -> None:
        """A matcher that starts within an answer computes the masks before as well, as if it had generated it."""
        if place.matcher is None:
            place.matcher = self._compiler.matcher(place.asked)
        matcher, began_s = place.matcher, time.thread_time()
        starts = place.num_taken == 0
        for token_id in place.token_ids[place.num_taken :]:
            if starts:
                began_s = time.thread_time()
                matcher.unsafe_compute_mask_ptr(place.mask.ctypes.data, place.mask.nbytes)
                place.seconds = time.thread_time() - began_s
            if self._is_slow(place):
                self._take_unlocked(matcher, token_id)
            else:
                matcher.consume_token(token_id)
            place.num_taken += 1
        matcher.unsafe_compute_mask_ptr(place.mask.ctypes.data, place.mask.nbytes)
        place.failed = matcher.is_error()
        place.seconds = time.thread_time() - began_s

    def _take_unlocked(self, matcher: LLMatcher, token_id: int) -> None:
        """Without the interpreter lock, which llguidance keeps unless there are several matchers."""
        none = matcher.deep_copy()
        none.rollback(_TOO_MANY)  # fails, and takes no token then
        self._executor.consume_token_par([(matcher, token_id), (none, token_id)])

    def _wait(self, slots: Sequence[int], *, alone: bool) -> dict[int, SequenceError | None]:
        """The slots whose next masks are not ready after the time that a step waits."""
        places = {slot: self._places[slot] for slot in slots}
        deadline = time.perf_counter() + self._patience_s
        waiting = {slot: place for slot, place in places.items() if not place.task.is_done}
        late = False
        for slot, place in [*waiting.items()]:
            if not self._takes_long(place) or (alone and len(waiting) == len(places)):
                if place.task.wait(deadline - time.perf_counter()):
                    del waiting[slot]
                else:
                    late = True
        if late:
            self._threads.replace_stuck(self._patience_s / 2)
        before = time.perf_counter() - self._longest_s
        return {
            slot: SequenceError.GRAMMAR_TOO_SLOW if place.task.began_s < before else None
            for slot, place in waiting.items()
        }

    def _try(self, slot: int, tokens: tuple[int, ...]) -> _Draft:
        """Masks of a draft that begins with these tokens, which another thread computes."""
        place = self._places[slot]
        if place.draft is None or place.draft.tokens[: len(tokens)] != tokens:
            draft = _Draft(tokens, np.full((len(tokens) + 1, len(place.mask)), -1, dtype=np.int64))
            draft.task = self._threads.submit(lambda: self._compute(place, draft))
            place.draft = draft
        return place.draft

    def _compute(self, place: _Place, draft: _Draft) -> None:
        """In another thread."""
        words = draft.words
        with place.lexer:
            copy = place.ready.deep_copy()
            self._executor.unsafe_compute_mask_ptr_with_draft_token(
                [(copy, 0, [*draft.tokens])], words.ctypes.data, words.strides[0], len(words)
            )
        draft.failed = copy.is_error()

    def _is_done(self, place: _Place, draft: _Draft, *, until_s: float | None = None) -> bool:
        """Return whether the draft can be verified; otherwise its sequence does without drafts for a while.

        until_s: how long a step waits that verifies it; None: it is a question about drafts.
        """
        assert draft.task is not None
        was_over = until_s is None and not self._left_s
        done = self._comes(draft.task.wait) if until_s is None else draft.task.wait(until_s - time.perf_counter())
        if not done:
            self._threads.replace_stuck(self._patience_s / 2)
        if draft.failed if done else not was_over:
            self._pause(place)
        return done and not draft.failed

    def _pause(self, place: _Place) -> None:
        place.draft, place.drafts_from = None, len(place.token_ids) + _PAUSE

    @contextlib.contextmanager
    def _held(self, place: _Place) -> Iterator[bool]:
        """Yield whether the lexer was free in time; if so no other matcher uses it until the end of the block."""
        was_over = not self._left_s
        held = self._comes(lambda seconds: place.lexer.acquire(timeout=seconds))
        if not held and not was_over:
            self._pause(place)
        try:
            yield held
        finally:
            if held:
                place.lexer.release()

    def _comes(self, wait: Callable[[float], bool]) -> bool:
        """Wait in the time left for this step's drafts; return whether what a draft needs has come."""
        began_s = time.perf_counter()
        came = wait(self._left_s)
        self._left_s = max(0.0, self._left_s - (time.perf_counter() - began_s))
        return came

    def _ends_mask(self) -> Ints:
        if self._ends is None:
            bits = np.zeros(self._compiler.mask_words * 64, dtype=np.uint8)
            bits[[*self._compiler.eos_token_ids]] = 1
            self._ends = np.packbits(bits, bitorder="little").view(np.int64)
        return self._ends
