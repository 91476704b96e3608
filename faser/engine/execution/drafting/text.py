"""Drafts copied from text by the native index, and a model next to them.

What a look-up costs decides whether speculation pays with small models, so one native call asks all methods for
all requests (kernels/cpu/native/lookup.cpp, ngrams.cpp):

    suffix        what most often followed the longest context, in the sequence and in past answers:
                  SuffixDecoding, arXiv 2411.04975, sections 3 and 4
    ngram         what followed the last few tokens the last time they occurred in the sequence: prompt lookup
                  decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding)
    ngram_model   chains of the token that an n-gram model finds likeliest

Past answers change no token of any request, but a client that times its own requests could learn that others were
answered with the same text: sequences of different salts share nothing.

A prediction of the answer is text to draft from too. It is put before the tokens of its sequence:

    text     end of the prompt, prediction | prompt | answer so far
    context                                  … and its end occurs here as well, right before the prediction

So the first tokens of the answer already find their context in the text, and the prompt, which comes after the
prediction, counts as more recent.
"""

import ctypes
from collections.abc import Callable, Sequence

import numpy as np

from faser.config.speculation import SpeculationConfig
from faser.engine.checkpoints.ngram_model import NgramModel
from faser.engine.contract.drafts import METHOD_IDS, NO_DRAFTS, empty_table, joined
from faser.engine.contract.plan import DraftPlan, SequenceStart
from faser.engine.execution.drafting.cold_state import Rebuilds
from faser.engine.execution.drafting.drafter import Drafter, Proposals
from faser.engine.execution.drafting.grammar import GrammarDrafter
from faser.engine.structure.sequence_matchers import SequenceMatchers
from faser.kernels.cpu.text_index import UNLIMITED, NgramTable, TextIndex, TextRules

# Those of suffix look-up are vLLM's.
MAX_CONTEXT = 24  # tokens that suffix look-up compares
DRAFT_PER_CONTEXT_TOKEN = 1.0  # a suffix draft is no longer than the context it was found by
MIN_FOLLOWING_SHARE = 0.1  # a suffix draft ends before a token that follows in fewer of the occurrences
CORPUS_TOKENS = 262_144  # of past outputs that suffix look-up remembers


class TextAndModel:
    """A Drafter that Rebuilds: several from text, and a model, each asked by plans of its own.

    The control plane chooses. text: their drafts come one after the other, and some may have more than one for
    each request. model: None where text drafts alone.
    """

    def __init__(self, text: Sequence[Drafter], model: Drafter | None = None) -> None:
        self._text = tuple(text)
        self.model = model
        self.drafters = self._text if model is None else (*self._text, model)

    @property
    def drafts_overlapped(self) -> bool:
        return all(each.drafts_overlapped for each in self.drafters)

    def start(self, start: SequenceStart) -> None:
        for each in self.drafters:
            each.start(start)

    def propose(self, plan: DraftPlan, until: Callable[[], bool] | None = None, /) -> Proposals:
        if plan.from_text:
            tables = [each.propose(plan).table for each in self._text]
            return Proposals(table=joined([each for each in tables if len(each.slots)] or tables[:1]))
        if not plan.requests:
            return Proposals(table=NO_DRAFTS)
        assert self.model is not None, "requests are left to a draft model, and there is none"
        return self.model.propose(plan, until)

    def commit(self, slots: Sequence[int], counts: Sequence[int], token_ids: Sequence[int]) -> None:
        for each in self.drafters:
            each.commit(slots, counts, token_ids)

    def release(self, slot: int) -> None:
        for each in self.drafters:
            each.release(slot)

    def rebuild(self, method: str, slot: int | None, /) -> bool:
        return any(each.rebuild(method, slot) for each in self.drafters if isinstance(each, Rebuilds))


class IndexedTexts:
    """The Texts of a LookupDrafter. matchers: of answers with a structure, which cut drafts and make some."""

    def __init__(self, drafter: "LookupDrafter", matchers: SequenceMatchers | None) -> None:
        self.address = drafter.index.address
        self.method_ids = drafter.method_ids
        self._drafter, self._matchers = drafter, matchers  # the former keeps the index alive

    def are_all(self) -> bool:
        return self._matchers is None or not self._matchers.slots


def texts_of(drafter: Drafter, matchers: SequenceMatchers | None) -> IndexedTexts | None:
    """Texts in which all drafts are looked up but those that a grammar dictates; None: others draft as well."""
    found = [drafter]
    if isinstance(drafter, TextAndModel):
        found = [each for each in drafter.drafters if not isinstance(each, GrammarDrafter)]
    if len(found) == 1 and isinstance(found[0], LookupDrafter):
        return IndexedTexts(found[0], matchers)
    return None


class LookupDrafter:
    """A Drafter that Rebuilds, by the methods that the rules have.

    A draft for every request by the first one, then by the next.

    Owns which slot has which text in the index.
    """

    drafts_overlapped = True

    def __init__(self, library: ctypes.CDLL, rules: TextRules) -> None:
        self.index = TextIndex(library, rules)
        self._depth = rules.depth
        methods = (
            ("suffix", rules.depth > 0),
            ("ngram", rules.max_n > 0),
            ("ngram_model", rules.ngrams is not None),
        )
        self.methods = tuple(method for method, is_asked in methods if is_asked)
        self.method_ids = np.array([METHOD_IDS[method] for method in self.methods])

    def start(self, start: SequenceStart) -> None:
        # After a preemption the corpus has this output already; only enough for one context is added again.
        unsaid = max(start.prompt_len, len(start.token_ids) - self._depth)
        prefix = prediction_prefix(start)
        token_ids = (*prefix, *start.token_ids)
        self.index.open(start.slot, token_ids, unsaid=len(prefix) + unsaid, salt=start.salt)

    def propose(self, plan: DraftPlan, _until: Callable[[], bool] | None = None, /) -> Proposals:
        slots = [request.slot for request in plan.requests]
        table = empty_table(slots * len(self.methods), self.methods[0], plan.width)
        if len(self.methods) > 1:
            table.methods[:] = self.method_ids.repeat(len(slots))
        self.index.look_up(
            slots,
            [request.max_tokens for request in plan.requests],
            [request.unverified for request in plan.requests],
            lengths=table.lengths,
            token_ids=table.token_ids,
            confidences=table.confidences,
        )
        return Proposals(table=table)

    def commit(self, slots: Sequence[int], counts: Sequence[int], token_ids: Sequence[int]) -> None:
        self.index.extend(slots, counts, token_ids)

    def release(self, slot: int) -> None:
        self.index.close(slot)

    def rebuild(self, method: str, slot: int | None, /) -> bool:
        return method in self.methods and self.index.rebuild(slot)


def prediction_prefix(start: SequenceStart) -> tuple[int, ...]:
    """The tokens to put before those of a sequence; empty without a prediction."""
    if not start.predicted_token_ids:
        return ()
    context = start.token_ids[max(0, start.prompt_len - MAX_CONTEXT) : start.prompt_len]
    return (*context, *start.predicted_token_ids)


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


def ngram_table(library: ctypes.CDLL, model: NgramModel) -> NgramTable:
    return NgramTable(library, model.contexts, model.following, model.chances)
