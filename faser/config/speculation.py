"""Settings of speculation: the table of drafters, and SpeculationConfig. Loads no torch.

What one request asks for is SpeculationParams, in types.py. No value here changes a token of any answer, except
rejection_sample_method synthetic.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum

from faser.optional import or_else, present
from faser.types.request import DEFAULT_CLASS, NO_TARGETS, WAIT, Slo, SpeculationParams


class Confidence(StrEnum):
    """Meanings of a drafted token's confidence. The acceptance model chooses its feature by it."""

    MARGIN = "nats between the two largest logits"
    PROBABILITY = "estimated probability"
    MATCH_LENGTH = "tokens of the match"


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """One drafter.

    prior_acceptance: share of drafted tokens that are expected to be accepted before any was verified.
    prior_slope, prior_centre: of the logistic curve from confidence to acceptance: its slope before any token was
    verified, and the feature of the confidence at which it predicts prior_acceptance.
    needs_passes: each drafted token costs a forward pass of a model, and there is a draft whenever one is asked
    for. Otherwise drafts are copied from text. needs_draft_model: a second model is loaded. needs_head: a head is
    loaded, a small model that reads the target's hidden states. in_checkpoint: without `model` the head is part of
    the target's checkpoint. in_blocks: one pass drafts all tokens, each as a row of it.
    """

    name: str
    confidence: Confidence
    prior_acceptance: float
    prior_slope: float
    prior_centre: float
    _: KW_ONLY
    needs_passes: bool = False
    needs_draft_model: bool = False
    needs_head: bool = False
    in_checkpoint: bool = False
    in_blocks: bool = False


MTP = "mtp"  # multi-token prediction, as vLLM names it
DFLASH, DSPARK = "dflash", "dspark"  # drafters of whole blocks, as vLLM names them

# To add a drafter, write its class, add its row here and its row in engine/execution/drafting/registry.py,
# and describe it in docs/speculation.md. The order is that of methods in arrays and metrics: models first.
DRAFTERS = {
    each.name: each
    for each in (
        DrafterInfo("draft_model", Confidence.MARGIN, 0.7, 0.5, 2.5, needs_passes=True, needs_draft_model=True),
        DrafterInfo("eagle3", Confidence.MARGIN, 0.6, 0.5, 2.5, needs_passes=True, needs_head=True),
        DrafterInfo(MTP, Confidence.MARGIN, 0.7, 0.5, 2.5, needs_passes=True, needs_head=True, in_checkpoint=True),
        DrafterInfo(DFLASH, Confidence.MARGIN, 0.6, 0.5, 2.5, needs_passes=True, needs_head=True, in_blocks=True),
        DrafterInfo(DSPARK, Confidence.MARGIN, 0.7, 1.0, 0.85, needs_passes=True, needs_head=True, in_blocks=True),
        DrafterInfo("suffix", Confidence.PROBABILITY, 0.6, 0.7, 0.5),
        DrafterInfo("ngram", Confidence.MATCH_LENGTH, 0.55, 1.4, 1.1),
        DrafterInfo("ngram_model", Confidence.PROBABILITY, 0.23, 0.75, 0.0),
        DrafterInfo("grammar", Confidence.PROBABILITY, 0.97, 0.7, 4.6),
    )
}
DRAFT_METHODS = tuple(DRAFTERS)
PASS_METHODS = tuple(each.name for each in DRAFTERS.values() if each.needs_passes)
HEAD_METHODS = tuple(each.name for each in DRAFTERS.values() if each.needs_head)
MOST_STATES_READ = 1024  # positions: a head that has paused reads the states of the latest ones, and no others
# Rows of one sequence in a step from which on they are those of a prompt: a head reads their states in that step,
# and states of fewer rows with its next draft.
PROMPT_ROWS = 32
TEXT_METHODS = tuple(each.name for each in DRAFTERS.values() if not each.needs_passes)
assert DRAFT_METHODS == PASS_METHODS + TEXT_METHODS, "drafters that run a model come first"


AUTO = "auto"
NONE = "none"  # in place of a file: none, not even one that comes with the package
METHODS = (AUTO, *DRAFT_METHODS)
POLICIES = ("off", "fixed", "table", "goodput", "survival", "faser")
REJECTION_METHODS = ("standard", "block", "synthetic")
DRAFT_SAMPLE_METHODS = ("greedy", "coupled", "probabilistic")
DRAFT_VOCAB_SIZES = (8_192, 16_384, 32_768, 65_536)
DRAFT_VOCAB_SIZE = 32_768  # the first of them, before any text is known
MAX_DRAFT_TOKENS = 32  # the largest gamma; the arrays of the policies are this wide


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """Settings of speculation.

    method: one drafter, or auto: those that draft from text, and a model if there is one; one of them is
    chosen per request. model: directory, file or hub id; NONE: none; None: none but the target's own layer for
    drafting (MTP), if its checkpoint has one. num_speculative_tokens: gamma of policy `fixed`, its maximum
    under every other; None: 16 for drafts from text, 8 for a model's. model_method: with auto, what `model`
    is, draft_model or a kind of head; None: its files say it, and until they are read it is a draft model.
    MTP: the target's own layer, or with `model` an assistant of Gemma 4. draft_vocab_size: how many tokens
    that layer chooses from, or a block drafter of the whole vocabulary: the first ones; those that end generation
    are added. None: DRAFT_VOCAB_SIZE (of an MTP layer one of DRAFT_VOCAB_SIZES, chosen by what the model says), or
    all of a vocabulary that the largest of these would hold.
    suffix_max_cached_requests: past answers that suffix lookup drafts from. ngram_model: file of the n-gram
    model; NONE: none; None: counted with the tokenizer in the answers of the package. table: (first, last,
    gamma) by number of sequences, ascending without gaps. classes: settings of each class of requests, by
    name. admission: of requests without a class, as in SpeculationParams.
    """

    method: str = AUTO
    policy: str = "faser"
    num_speculative_tokens: int | None = None
    model: str | None = None
    model_method: str | None = None
    revision: str | None = None
    draft_max_model_len: int | None = None
    draft_vocab_size: int | None = None
    prompt_lookup_min: int = 1
    prompt_lookup_max: int = 5
    suffix_max_cached_requests: int = 10_000
    ngram_model: str | None = None
    table: tuple[tuple[int, int, int], ...] = ()
    rejection_sample_method: str = "standard"
    draft_sample_method: str = "coupled"
    synthetic_acceptance_rates: tuple[float, ...] = ()
    slo: Slo = NO_TARGETS
    admission: str = WAIT
    classes: Mapping[str, SpeculationParams] = field(default_factory=dict)

    @property
    def synthetic(self) -> bool:
        """Return whether drafts are accepted at given rates. The answers are then not the model's."""
        return self.rejection_sample_method == "synthetic" and self.policy != "off"

    @property
    def has_targets(self) -> bool:
        """Return whether requests without targets of their own have some."""
        return any(slo != NO_TARGETS for slo in (self.slo, *(each.slo for each in self.classes.values())))

    @property
    def class_names(self) -> tuple[str, ...]:
        """The default class, then the operator's."""
        return tuple(dict.fromkeys((DEFAULT_CLASS, *self.classes)))

    def params_of(self, class_name: str) -> SpeculationParams:
        """Settings of a request of this class that has none of its own. class_name: one of class_names."""
        if class_name in self.classes:
            return self.classes[class_name]
        assert class_name == DEFAULT_CLASS, f"there is no class {class_name}"
        return SpeculationParams(max_tokens=self.cap, slo=self.slo, admission=self.admission)

    @property
    def drafters(self) -> tuple[DrafterInfo, ...]:
        """The drafters that the engine makes: from text in order of preference, then one that runs a model."""
        if self.policy == "off":
            return ()
        if self.method != AUTO:
            return (DRAFTERS[self.method],)
        by_model = self.model_method
        if by_model != MTP:
            by_model = None if self.model in (None, NONE) else by_model or "draft_model"
        return tuple(DRAFTERS[name] for name in present((*TEXT_METHODS, by_model)))

    @property
    def needs_draft_model(self) -> bool:
        """Return whether a second model is loaded, to draft with."""
        return any(each.needs_draft_model for each in self.drafters)

    @property
    def needs_head(self) -> bool:
        """Return whether a head is loaded, which drafts from the target's hidden states."""
        return any(each.needs_head for each in self.drafters)

    @property
    def needs_model(self) -> bool:
        """Return whether `model` names a drafter: a draft model, or a head of its own."""
        return any(
            each.needs_draft_model or (each.needs_head and not (each.in_checkpoint and self.may_use_mtp))
            for each in self.drafters
        )

    @property
    def may_use_mtp(self) -> bool:
        """Return whether the target's own layer for drafting is asked for, or drafts if there is one."""
        if self.policy == "off" or self.method not in (AUTO, MTP) or self.model not in (None, NONE):
            return False
        return MTP in (self.method, self.model_method) or self.model is None

    @property
    def needs_passes(self) -> bool:
        """Return whether drafts may come from forward passes of a model."""
        return any(each.needs_passes for each in self.drafters)

    @property
    def pass_method(self) -> str | None:
        """The drafter that takes forward passes; None: there is none."""
        return next((each.name for each in self.drafters if each.needs_passes), None)

    @property
    def drafts_from_text(self) -> bool:
        """Return whether drafts may be copied from text."""
        return not all(each.needs_passes for each in self.drafters)

    @property
    def cap(self) -> int:
        """The largest gamma any sequence may get."""
        if self.num_speculative_tokens is not None:
            return self.num_speculative_tokens
        return self.model_cap if self.method != AUTO and DRAFTERS[self.method].needs_passes else 16

    @property
    def model_cap(self) -> int:
        """The most tokens that a model drafts; each of them takes a pass."""
        return or_else(self.num_speculative_tokens, 8)
