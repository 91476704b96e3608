"""SpeculationConfig: how an engine speculates, as `--speculative-config` and the flags of speculation say.

What one request asks for is SpeculationParams, in types.py. No value here changes a token of any answer, except
rejection_sample_method synthetic.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from faser.config.drafters import DRAFT_METHODS, DRAFTERS, TEXT_METHODS, DrafterInfo
from faser.types import DEFAULT_CLASS, NO_TARGETS, Slo, SpeculationParams

AUTO = "auto"
NONE = "none"  # in place of a file: none, not even one that comes with the package
METHODS = (AUTO, *DRAFT_METHODS)
POLICIES = ("off", "fixed", "table", "goodput", "survival", "faser")
REJECTION_METHODS = ("standard", "block", "synthetic")
DRAFT_SAMPLE_METHODS = ("greedy", "coupled", "probabilistic")
MAX_DRAFT_TOKENS = 32  # the largest gamma; the arrays of the policies are this wide


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """How the engine speculates.

    method: one drafter, or auto: those that draft from text, and a model if there is one; one of them is chosen
    per request. model: directory, file or hub id; NONE, None: none. num_speculative_tokens: gamma of policy
    `fixed`, its maximum under every other; None: 16 for drafts from text, 8 for a model's. model_method: with
    auto, what `model` is, draft_model or a kind of head; None: its files say it, and until they are read it is a
    draft model. suffix_max_cached_requests: past
    answers that suffix lookup drafts from. ngram_model: file of the n-gram model; NONE: none; None: the one of the
    package, for the default model. table:
    (first, last, gamma) by number of sequences, ascending without gaps. classes: settings of each class of
    requests, by name.
    """

    method: str = AUTO
    policy: str = "faser"
    num_speculative_tokens: int | None = None
    model: str | None = None
    model_method: str | None = None
    revision: str | None = None
    draft_max_model_len: int | None = None
    prompt_lookup_min: int = 1
    prompt_lookup_max: int = 5
    suffix_max_cached_requests: int = 10_000
    ngram_model: str | None = None
    table: tuple[tuple[int, int, int], ...] = ()
    rejection_sample_method: str = "standard"
    draft_sample_method: str = "coupled"
    synthetic_acceptance_rates: tuple[float, ...] = ()
    slo: Slo = NO_TARGETS
    classes: Mapping[str, SpeculationParams] = field(default_factory=dict)

    @property
    def synthetic(self) -> bool:
        """Whether drafts are accepted at given rates. The answers are then not the model's."""
        return self.rejection_sample_method == "synthetic" and self.policy != "off"

    @property
    def class_names(self) -> tuple[str, ...]:
        """The default class, then the operator's."""
        return tuple(dict.fromkeys((DEFAULT_CLASS, *self.classes)))

    def params_of(self, class_name: str) -> SpeculationParams:
        """Settings of a request of this class that has none of its own. class_name: one of class_names."""
        if class_name in self.classes:
            return self.classes[class_name]
        assert class_name == DEFAULT_CLASS, f"there is no class {class_name}"
        return SpeculationParams(max_tokens=self.cap, slo=self.slo)

    @property
    def drafters(self) -> tuple[DrafterInfo, ...]:
        """The drafters that the engine makes: from text in order of preference, then one that runs a model."""
        if self.policy == "off":
            return ()
        if self.method != AUTO:
            return (DRAFTERS[self.method],)
        by_model = (self.model_method or "draft_model",) if self.model not in (None, NONE) else ()
        return tuple(DRAFTERS[name] for name in (*TEXT_METHODS, *by_model))

    @property
    def needs_draft_model(self) -> bool:
        """Whether a second model is loaded, to draft with."""
        return any(each.needs_draft_model for each in self.drafters)

    @property
    def needs_head(self) -> bool:
        """Whether a head is loaded, which drafts from the target's hidden states."""
        return any(each.needs_head for each in self.drafters)

    @property
    def needs_passes(self) -> bool:
        """Whether drafts may come from forward passes of a model."""
        return any(each.needs_passes for each in self.drafters)

    @property
    def pass_method(self) -> str | None:
        """The drafter that takes forward passes; None: there is none."""
        return next((each.name for each in self.drafters if each.needs_passes), None)

    @property
    def drafts_from_text(self) -> bool:
        """Whether drafts may be copied from text."""
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
        return 8 if self.num_speculative_tokens is None else self.num_speculative_tokens
