"""The keys of `--speculative-config`: vLLM's, as far as FASER has what they stand for, and FASER's own.

Each key is declared once, as a setting; reading, messages and the documentation's table follow from it.
"""

from dataclasses import dataclass
from typing import Any

from faser.config.declaration import Kind, Setting
from faser.config.drafters import DRAFTERS, HEAD_METHODS, PASS_METHODS
from faser.config.speculation import (
    AUTO,
    DRAFT_SAMPLE_METHODS,
    MAX_DRAFT_TOKENS,
    METHODS,
    POLICIES,
    REJECTION_METHODS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key. setting: its name, limits and help. field: the field of SpeculationConfig that takes its value.

    methods: the methods that use it; empty: all. structured: a list or an object, which the parser reads itself.
    """

    setting: Setting
    field: str | None = None
    methods: tuple[str, ...] = ()
    structured: bool = False

    @property
    def name(self) -> str:
        return self.setting.name


def _key(
    name: str,
    help: str,
    kind: Kind,
    *,
    field: str | None = None,
    methods: tuple[str, ...] = (),
    structured: bool = False,
    **limits: Any,
) -> Key:
    described = Setting(name=name, help=help, group="speculation", kind=kind, **limits)
    return Key(setting=described, field=field, methods=methods, structured=structured)


_OWN_MODEL = (AUTO, *(each.name for each in DRAFTERS.values() if each.needs_draft_model or each.needs_head))
_NGRAM = (AUTO, "ngram")
_SUFFIX = (AUTO, "suffix")

MAX_CLASSES = 32  # each is a label value of a dozen metrics

KEYS: tuple[Key, ...] = (
    _key(
        "method",
        "The drafter. auto: those that draft from text, and the draft model or the head if there is one; chosen "
        "per request.",
        Kind.TEXT,
        field="method",
        choices=METHODS,
        synonyms=(("ngram_gpu", "ngram"),),
    ),
    _key(
        "policy",
        "How the number of drafted and verified tokens is chosen.",
        Kind.TEXT,
        choices=POLICIES,
    ),
    _key(
        "num_speculative_tokens",
        "Drafted tokens of a sequence in a step: the number under policy fixed, the maximum under every other.",
        Kind.INTEGER,
        field="num_speculative_tokens",
        low=1,
        high=MAX_DRAFT_TOKENS,
    ),
    _key(
        "model",
        "Draft model: directory, .gguf file or hub id. It needs the vocabulary of the model it drafts for. Or a "
        "head (EAGLE-3): directory or hub id. None, or 'none': no model.",
        Kind.TEXT,
        field="model",
        methods=_OWN_MODEL,
    ),
    _key(
        "model_method",
        "With auto, what `model` is: draft_model, or a kind of head. None: its files say it.",
        Kind.TEXT,
        field="model_method",
        methods=(AUTO,),
        choices=("draft_model", *HEAD_METHODS),
    ),
    _key(
        "revision",
        "Branch, tag or commit of a draft model or head.",
        Kind.TEXT,
        field="revision",
        methods=_OWN_MODEL,
    ),
    _key(
        "max_model_len",
        "Context up to which the draft model drafts, in tokens.",
        Kind.INTEGER,
        field="draft_max_model_len",
        methods=_OWN_MODEL,
        low=1,
        high=1 << 24,
    ),
    _key(
        "prompt_lookup_min",
        "Shortest match of n-gram lookup, in tokens.",
        Kind.INTEGER,
        field="prompt_lookup_min",
        methods=_NGRAM,
        low=1,
        high=64,
    ),
    _key(
        "prompt_lookup_max",
        "Longest match of n-gram lookup, in tokens.",
        Kind.INTEGER,
        field="prompt_lookup_max",
        methods=_NGRAM,
        low=1,
        high=64,
    ),
    _key(
        "suffix_decoding_max_cached_requests",
        "Past answers that suffix lookup drafts from. 0: none.",
        Kind.INTEGER,
        field="suffix_max_cached_requests",
        methods=_SUFFIX,
        low=0,
        high=1 << 30,
    ),
    _key(
        "ngram_model",
        "File of the n-gram model, or 'none'. None: the default model's own, and no n-gram model for others.",
        Kind.TEXT,
        field="ngram_model",
        methods=(AUTO, "ngram_model"),
    ),
    _key(
        "num_speculative_tokens_per_batch_size",
        "[[first, last, tokens], …] by number of sequences, from 1 on, without gap or overlap; policy table.",
        Kind.JSON,
        structured=True,
    ),
    _key("enable_adaptive_verification", "true: policy survival.", Kind.SWITCH),
    _key(
        "rejection_sample_method",
        "How drafts are verified. synthetic accepts at given rates: answers are not the model's.",
        Kind.TEXT,
        field="rejection_sample_method",
        choices=REJECTION_METHODS,
    ),
    _key(
        "draft_sample_method",
        "How a model drafts. greedy: its likeliest token; coupled: with the random numbers that the target will "
        "use; probabilistic: with its own.",
        Kind.TEXT,
        field="draft_sample_method",
        methods=(AUTO, *PASS_METHODS),
        choices=DRAFT_SAMPLE_METHODS,
    ),
    _key(
        "synthetic_acceptance_rates",
        "With synthetic: for each position the share of drafts that are accepted up to there; never rising.",
        Kind.JSON,
        structured=True,
    ),
    _key(
        "slo",
        "{ttft_ms, tpot_ms}: latency targets of requests that have none of their own.",
        Kind.JSON,
        structured=True,
    ),
    _key(
        "classes",
        "{name: {enabled, max_tokens, slo}}: settings of each class of requests.",
        Kind.JSON,
        structured=True,
    ),
)
