"""The TextLookup protocol: drafts copied from text by several methods at once.

What a look-up costs decides whether speculation pays with small models, so one call asks all methods for all
requests. LookupDrafter makes a Drafter of a look-up with one method; CombinedLookup makes one look-up of several.

Limits of drafting from text, the same in Python and in the native index. Those of suffix look-up are vLLM's.

A prediction of the answer, as text to draft from: it is put before the tokens of its sequence.

    text     end of the prompt, prediction | prompt | answer so far
    context                                  … and its end occurs here as well, right before the prediction

So the first tokens of the answer already find their context in the text, and the prompt, which comes after the
prediction, counts as more recent.

NativeLookup: suffix and n-gram drafts, and those of an n-gram model, for all sequences with one native call.

Owns which slot has which text in the index, and the names of the methods. The files of python/ explain the
methods and their sources; their drafters propose the same drafts with the same confidences.

TextAndModel: the text look-up and a draft model in one engine (method `auto`), each asked by plans of its own.

The control plane chooses between their drafts. So the model has proposals for a part of the sequences only; where
a step needs a line for every drafted token, with_text_drafts adds those from text.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from typing import Protocol

import torch

from faser.config.speculation import SpeculationConfig
from faser.engine.checkpoints.ngram_model import NgramModel
from faser.engine.contract.plan import PLACEHOLDER, Draft, DraftPlan, SequenceRows, SequenceStart
from faser.engine.execution.drafting.drafter import NO_TOP, Continuation, Drafter, Proposals
from faser.kernels.cpu.text_index import UNLIMITED, Found, NgramTable, TextIndex, TextRules

_token_ids = attrgetter("token_ids")


class TextLookup(Protocol):
    """All methods of drafting from text. Its calls, and their order, are those of a Drafter."""

    @property
    def num_methods(self) -> int: ...

    @property
    def drafts_overlapped(self) -> bool:
        """As a Drafter's; True only if it holds for all methods."""
        ...

    def start(self, start: SequenceStart) -> None: ...

    def look_up(self, plan: DraftPlan) -> tuple[tuple[Draft, ...], ...]:
        """For each method a draft for every request, in their order. Otherwise as Drafter.propose.

        An occasional method that has no draft for any of them is left out, unless it is the only one.
        """
        ...

    def commit(self, continuations: Sequence[Continuation]) -> None: ...

    def release(self, slot: int) -> None: ...


class CombinedLookup:
    """A TextLookup: the methods of native, if it is given, then one method for each drafter.

    occasional: drafters of further methods, which have nothing for most requests.
    """

    def __init__(
        self, drafters: Sequence[Drafter], native: TextLookup | None = None, occasional: Sequence[Drafter] = ()
    ) -> None:
        self._native = native
        self._drafters, self._occasional = tuple(drafters), tuple(occasional)
        self._parts: tuple[TextLookup | Drafter, ...] = (
            *([] if native is None else [native]),
            *drafters,
            *occasional,
        )
        self.num_methods = len(self._parts) + (0 if native is None else native.num_methods - 1)

    @property
    def drafts_overlapped(self) -> bool:
        return all(each.drafts_overlapped for each in self._parts)

    def start(self, start: SequenceStart) -> None:
        for each in self._parts:
            each.start(start)

    def look_up(self, plan: DraftPlan) -> tuple[tuple[Draft, ...], ...]:
        found = [] if self._native is None else [*self._native.look_up(plan)]
        found += [drafter.propose(plan).drafts for drafter in self._drafters]
        for drafter in self._occasional:
            drafts = drafter.propose(plan).drafts
            if not found or any(map(_token_ids, drafts)):
                found.append(drafts)
        return tuple(found)

    def commit(self, continuations: Sequence[Continuation]) -> None:
        for each in self._parts:
            each.commit(continuations)

    def release(self, slot: int) -> None:
        for each in self._parts:
            each.release(slot)


class LookupDrafter:
    """A Drafter over a TextLookup with one method."""

    def __init__(self, lookup: TextLookup) -> None:
        assert lookup.num_methods == 1, lookup.num_methods
        self._lookup = lookup

    @property
    def drafts_overlapped(self) -> bool:
        return self._lookup.drafts_overlapped

    def start(self, start: SequenceStart) -> None:
        self._lookup.start(start)

    def propose(self, plan: DraftPlan, _until: Callable[[], bool] | None = None, /) -> Proposals:
        (drafts,) = self._lookup.look_up(plan)
        return Proposals(drafts=drafts)

    def commit(self, continuations: Sequence[Continuation]) -> None:
        self._lookup.commit(continuations)

    def release(self, slot: int) -> None:
        self._lookup.release(slot)


MAX_CONTEXT = 24  # tokens that suffix look-up compares
DRAFT_PER_CONTEXT_TOKEN = 1.0  # a suffix draft is no longer than the context it was found by
MIN_FOLLOWING_SHARE = 0.1  # a suffix draft ends before a token that follows in fewer of the occurrences
CORPUS_TOKENS = 262_144  # of past outputs that suffix look-up remembers


_CONTEXT = 24  # tokens of the prompt repeated before a prediction; look-ups compare no more


def prediction_prefix(start: SequenceStart) -> tuple[int, ...]:
    """The tokens to put before those of a sequence; empty without a prediction."""
    if not start.predicted_token_ids:
        return ()
    context = start.token_ids[max(0, start.prompt_len - _CONTEXT) : start.prompt_len]
    return (*context, *start.predicted_token_ids)


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


class TextAndModel:
    """A Drafter. model: None where text drafts alone."""

    def __init__(self, text: TextLookup, model: Drafter | None = None) -> None:
        self._text = text
        self.model = model

    @property
    def drafts_overlapped(self) -> bool:
        return self._text.drafts_overlapped and (self.model is None or self.model.drafts_overlapped)

    def start(self, start: SequenceStart) -> None:
        self._text.start(start)
        if self.model is not None:
            self.model.start(start)

    def propose(self, plan: DraftPlan, until: Callable[[], bool] | None = None, /) -> Proposals:
        if plan.from_text:
            return Proposals(drafts=tuple(chain.from_iterable(self._text.look_up(plan))))
        if not plan.requests:
            return Proposals(drafts=())
        assert self.model is not None, "requests are left to a draft model, and there is none"
        return self.model.propose(plan, until)

    def commit(self, continuations: Sequence[Continuation]) -> None:
        self._text.commit(continuations)
        if self.model is not None:
            self.model.commit(continuations)

    def release(self, slot: int) -> None:
        self._text.release(slot)
        if self.model is not None:
            self.model.release(slot)


def with_text_drafts(proposals: Proposals, rows: Sequence[SequenceRows], *, num_decided: int) -> Proposals:
    """What the model proposed, and after it the drafts of all other rows of a step: these are from text.

    num_decided: leading tokens of each draft that are known by now, so that the step has no rows for them.
    """
    if proposals.probs is None and proposals.top_ids is None:
        return proposals
    by_model = {draft.slot for draft in proposals.drafts}
    passed = (PLACEHOLDER,) * num_decided
    others = [
        Draft(slot=each.slot, method="", token_ids=passed + each.token_ids[-each.num_drafts :])
        for each in rows
        if each.num_drafts and each.slot not in by_model
    ]
    return with_point_masses(proposals, others) if others else proposals


def with_point_masses(proposals: Proposals, others: Sequence[Draft]) -> Proposals:
    """proposals, and after them drafts that are point masses and name no other tokens.

    probs gets a row for each token with all its mass on it, top_ids a line of NO_TOP; where these are None, so
    they stay.
    """
    probs, top_ids = proposals.probs, proposals.top_ids
    token_ids = [token_id for draft in others for token_id in draft.token_ids]
    if probs is not None:
        certain = probs.new_zeros(len(token_ids), probs.shape[1])
        certain[range(len(token_ids)), token_ids] = 1.0
        probs = torch.cat((probs, certain))
    if top_ids is not None:
        top_ids = torch.cat((top_ids, top_ids.new_full((len(token_ids), top_ids.shape[1]), NO_TOP)))
    return replace(proposals, drafts=(*proposals.drafts, *others), probs=probs, top_ids=top_ids)
