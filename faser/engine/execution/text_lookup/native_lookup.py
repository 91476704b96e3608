"""NativeLookup: suffix and n-gram drafts, and those of an n-gram model, for all sequences with one native call.

Owns which slot has which text in the index, and the names of the methods. The files of python/ explain the
methods and their sources; their drafters propose the same drafts with the same confidences.
"""

import ctypes
from collections.abc import Sequence

from faser.config.speculation import SpeculationConfig
from faser.engine.checkpoints.ngram_model import NgramModel
from faser.engine.contract.plan import Draft, DraftPlan, SequenceStart
from faser.engine.execution.drafters.drafter import Continuation
from faser.engine.execution.text_lookup.prediction import prediction_prefix
from faser.engine.execution.text_lookup.rules import (
    CORPUS_TOKENS,
    DRAFT_PER_CONTEXT_TOKEN,
    MAX_CONTEXT,
    MIN_FOLLOWING_SHARE,
)
from faser.kernels.cpu.text_index import UNLIMITED, Found, NgramTable, TextIndex, TextRules


def ngram_table(library: ctypes.CDLL, model: NgramModel) -> NgramTable:
    return NgramTable(library, model.contexts, model.following, model.chances)


def text_rules(
    config: SpeculationConfig,
    methods: Sequence[str],
    ngrams: NgramTable | None = None,
    *,
    max_bytes: int = UNLIMITED,
) -> TextRules:
    """The rules of the index for suffix, ngram or both, and for the n-gram model if it is given."""
    suffix, ngram = "suffix" in methods, "ngram" in methods
    return TextRules(
        cap=config.cap,
        depth=MAX_CONTEXT if suffix else 0,
        max_outputs=config.suffix_max_cached_requests,
        max_tokens=CORPUS_TOKENS,
        max_spec_factor=DRAFT_PER_CONTEXT_TOKEN,
        min_token_prob=MIN_FOLLOWING_SHARE,
        min_n=config.prompt_lookup_min if ngram else 0,
        max_n=config.prompt_lookup_max if ngram else 0,
        ngrams=ngrams,
        max_bytes=max_bytes,
    )


class NativeLookup:
    """A TextLookup of the methods that the rules have: suffix, then ngram, then ngram_model."""

    drafts_overlapped = True

    def __init__(self, library: ctypes.CDLL, rules: TextRules) -> None:
        self.index = TextIndex(library, rules)
        self._depth = rules.depth
        self._cap = rules.cap
        methods = (
            ("suffix", rules.depth > 0),
            ("ngram", rules.max_n > 0),
            ("ngram_model", rules.ngrams is not None),
        )
        self._methods = tuple(method for method, is_asked in methods if is_asked)
        self._empty: tuple[dict[int, Draft], ...] = tuple({} for _ in self._methods)  # empty drafts by slot
        self.num_methods = len(self._methods)

    def start(self, start: SequenceStart) -> None:
        # After a preemption the corpus has this output already; only enough for one context is added again.
        unsaid = max(start.prompt_len, len(start.token_ids) - self._depth)
        prefix = prediction_prefix(start)
        token_ids = (*prefix, *start.token_ids)
        self.index.open(start.slot, token_ids, unsaid=len(prefix) + unsaid, salt=hash(start.salt))
        for method, empty in zip(self._methods, self._empty, strict=True):
            empty[start.slot] = Draft(slot=start.slot, method=method)

    def look_up(self, plan: DraftPlan) -> tuple[tuple[Draft, ...], ...]:
        slots = [request.slot for request in plan.requests]
        limits = [request.max_tokens for request in plan.requests]
        found = self.index.look_up(slots, limits, [request.unverified for request in plan.requests])
        empty = [tuple(map(drafts.__getitem__, slots)) for drafts in self._empty]
        if found is None:
            return tuple(empty)
        return tuple(self._filled(drafts, found, at) for at, drafts in enumerate(empty))

    def commit(self, continuations: Sequence[Continuation]) -> None:
        self.index.extend([each.slot for each in continuations], [each.token_ids for each in continuations])

    def release(self, slot: int) -> None:
        self.index.close(slot)
        for empty in self._empty:
            del empty[slot]

    def _filled(self, empty: tuple[Draft, ...], found: Found, method: int) -> tuple[Draft, ...]:
        """The drafts of method number `method`: an empty one where it found nothing."""
        line = method * len(empty)
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
