"""NativeLookup: suffix and n-gram drafts for all sequences with one native call.

Owns which slot has which text in the index, and what its drafts are called. The methods, with their sources, are
described in suffix.py and ngram.py, whose drafters propose the same drafts with the same confidences.
"""

import ctypes
from collections.abc import Sequence

from faser.engine.contract.plan import Draft, DraftPlan, SequenceStart
from faser.engine.execution.drafters.drafter import Continuation
from faser.engine.execution.text_lookup.prediction import foreword
from faser.kernels.cpu.text_index import Found, TextIndex, TextRules


class NativeLookup:
    """A TextLookup of the methods that the rules have: suffix, then ngram."""

    drafts_overlapped = True

    def __init__(self, library: ctypes.CDLL, rules: TextRules) -> None:
        self.index = TextIndex(library, rules)
        self._depth = rules.depth
        self._cap = rules.cap
        methods = (("suffix", rules.depth > 0), ("ngram", rules.max_n > 0))
        self._methods = tuple(method for method, is_asked in methods if is_asked)
        self._nothing: tuple[dict[int, Draft], ...] = tuple({} for _ in self._methods)  # empty drafts by slot
        self.num_methods = len(self._methods)

    def start(self, start: SequenceStart) -> None:
        # What a preemption interrupted is remembered up to here; only a context's worth is repeated.
        unsaid = max(start.prompt_len, len(start.token_ids) - self._depth)
        before = foreword(start)
        token_ids = (*before, *start.token_ids)
        self.index.open(start.slot, token_ids, unsaid=len(before) + unsaid, salt=hash(start.salt))
        for method, nothing in zip(self._methods, self._nothing, strict=True):
            nothing[start.slot] = Draft(slot=start.slot, method=method)

    def guesses(self, plan: DraftPlan) -> tuple[tuple[Draft, ...], ...]:
        slots = [request.slot for request in plan.requests]
        most = [request.max_tokens for request in plan.requests]
        found = self.index.look(slots, most, [request.unverified for request in plan.requests])
        empty = [tuple(map(nothing.__getitem__, slots)) for nothing in self._nothing]
        if found is None:
            return tuple(empty)
        return tuple(self._filled(drafts, found, first) for first, drafts in enumerate(empty))

    def commit(self, continuations: Sequence[Continuation]) -> None:
        self.index.extend([each.slot for each in continuations], [each.token_ids for each in continuations])

    def release(self, slot: int) -> None:
        self.index.close(slot)
        for nothing in self._nothing:
            del nothing[slot]

    def _filled(self, empty: tuple[Draft, ...], found: Found, kind: int) -> tuple[Draft, ...]:
        """The drafts of one method, as far as it found any."""
        line = kind * len(empty)
        counts = found.counts[line : line + len(empty)]
        if not any(counts):
            return empty
        drafts = list(empty)
        for at, count in enumerate(counts):
            if count:
                first = (line + at) * self._cap
                drafts[at] = Draft(
                    slot=empty[at].slot,
                    method=empty[at].method,
                    token_ids=tuple(found.token_ids[first : first + count]),
                    confidences=tuple(found.confidences[first : first + count]),
                )
        return tuple(drafts)
