"""The keys of `--speculative-config`: vLLM's, as far as they mean something here, and FASER's own.

Each key is declared once, as a setting; reading, messages and the documentation's table follow. Keys and
methods of vLLM's that FASER has not are known by name, so that each gets its own answer. Reads nothing itself.
"""

from dataclasses import dataclass
from typing import Any

from faser.config.declaration import Kind, Setting
from faser.config.drafters import PASS_METHODS
from faser.config.speculation import (
    AUTO,
    DRAFT_SAMPLE_METHODS,
    MAX_DRAFT_TOKENS,
    METHODS,
    POLICIES,
    REJECTION_METHODS,
)

MAX_CLASSES = 32  # each is a label value of a dozen metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """setting: name, limits and help. field: of SpeculationConfig, None where the value is read by hand.

    methods: those that look at it; empty: all. structured: a list or an object, read by hand.
    """

    setting: Setting
    field: str | None = None
    methods: tuple[str, ...] = ()
    structured: bool = False

    @property
    def name(self) -> str:
        return self.setting.name


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignKey:
    """A key of vLLM's that FASER has not. neutral: values, beside null, that ask for nothing.

    only_speed: the value is accepted with a warning, since it could only change speed.
    """

    reason: str
    neutral: tuple[Any, ...] = ()
    instead: str = ""
    only_speed: bool = False


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


_OWN_MODEL = (AUTO, "draft_model")
_LOOKUP = (AUTO, "ngram")
_SUFFIX = (AUTO, "suffix")

KEYS: tuple[Key, ...] = (
    _key(
        "method",
        "Who drafts. auto: suffix and n-gram lookup, and the model if one is named, chosen per request.",
        Kind.TEXT,
        field="method",
        choices=METHODS,
        synonyms=(("ngram_gpu", "ngram"),),
    ),
    _key(
        "policy",
        "Who decides how many tokens are drafted and verified.",
        Kind.TEXT,
        choices=POLICIES,
    ),
    _key(
        "num_speculative_tokens",
        "Drafted tokens a step: exactly so many under policy fixed, at most under every other.",
        Kind.INTEGER,
        field="num_speculative_tokens",
        low=1,
        high=MAX_DRAFT_TOKENS,
    ),
    _key(
        "model",
        "Draft model: directory, .gguf file or hub id. It needs the vocabulary of the model it drafts for.",
        Kind.TEXT,
        field="model",
        methods=_OWN_MODEL,
    ),
    _key("revision", "Branch, tag or commit of a draft model.", Kind.TEXT, field="revision", methods=_OWN_MODEL),
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
        "draft_layers",
        "Layers of the model that layer_skip drafts with. None: a quarter.",
        Kind.INTEGER,
        field="draft_layers",
        methods=("layer_skip",),
        low=1,
        high=1024,
    ),
    _key(
        "prompt_lookup_min",
        "Shortest match of n-gram lookup, in tokens.",
        Kind.INTEGER,
        field="prompt_lookup_min",
        methods=_LOOKUP,
        low=1,
        high=64,
    ),
    _key(
        "prompt_lookup_max",
        "Longest match of n-gram lookup, in tokens.",
        Kind.INTEGER,
        field="prompt_lookup_max",
        methods=_LOOKUP,
        low=1,
        high=64,
    ),
    _key(
        "suffix_decoding_max_tree_depth",
        "Longest match and draft of suffix lookup, in tokens.",
        Kind.INTEGER,
        field="suffix_max_tree_depth",
        methods=_SUFFIX,
        low=1,
        high=1024,
    ),
    _key(
        "suffix_decoding_max_cached_requests",
        "Past answers that suffix lookup remembers. 0: none.",
        Kind.INTEGER,
        field="suffix_max_cached_requests",
        methods=_SUFFIX,
        low=0,
        high=1 << 30,
    ),
    _key(
        "suffix_decoding_max_spec_factor",
        "Longest draft of suffix lookup, as a multiple of the match.",
        Kind.NUMBER,
        field="suffix_max_spec_factor",
        methods=_SUFFIX,
        low=0,
        above=True,
        high=1024,
    ),
    _key(
        "suffix_decoding_min_token_prob",
        "Estimated probability below which suffix lookup stops.",
        Kind.NUMBER,
        field="suffix_min_token_prob",
        methods=_SUFFIX,
        low=0,
        high=1,
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
        "How drafts are judged. synthetic accepts by given rates: answers are not the model's.",
        Kind.TEXT,
        field="rejection_sample_method",
        choices=REJECTION_METHODS,
    ),
    _key(
        "draft_sample_method",
        "How a draft model chooses: its likeliest token; one coupled to the request's noise; one at random.",
        Kind.TEXT,
        field="draft_sample_method",
        methods=(AUTO, *PASS_METHODS),
        choices=DRAFT_SAMPLE_METHODS,
    ),
    _key(
        "synthetic_acceptance_rates",
        "With synthetic: for each position, how often the draft is accepted up to there; never rising.",
        Kind.JSON,
        structured=True,
    ),
    _key(
        "synthetic_acceptance_length",
        "With synthetic: mean tokens a step, the target's own included.",
        Kind.NUMBER,
        low=1,
        high=MAX_DRAFT_TOKENS + 1,
    ),
    _key("slo", "{ttft_ms, tpot_ms}: targets of requests that bring none.", Kind.JSON, structured=True),
    _key(
        "classes",
        "{name: {enabled, max_tokens, slo}}: what requests of a class get.",
        Kind.JSON,
        structured=True,
    ),
)

_NO_CODE = "no code of a checkpoint is run"
_NO_SPLIT = "drafting and verifying take turns in this release"
_OLDER = "it belongs to older versions"

FOREIGN_KEYS: dict[str, ForeignKey] = {
    "code_revision": ForeignKey(reason=_NO_CODE),
    "quantization": ForeignKey(reason="weights are computed as they are, or dequantised (GGUF)"),
    "kv_cache_dtype": ForeignKey(reason="it is the target's: --kv-cache-dtype", neutral=(AUTO,)),
    "draft_load_config": ForeignKey(reason="how to load follows from the files", neutral=({},)),
    "hf_overrides": ForeignKey(reason="a checkpoint is served as it is", neutral=({},)),
    "draft_tensor_parallel_size": ForeignKey(reason="a model runs on one device", neutral=(1,), instead="1"),
    "use_heterogeneous_vocab": ForeignKey(
        reason="drafter and model must share a vocabulary", neutral=(False,), instead="method 'suffix'"
    ),
    "parallel_drafting": ForeignKey(reason="draft models draft token by token", neutral=(False,)),
    "attention_backend": ForeignKey(reason="it follows from --backend", neutral=(AUTO,), instead="--backend"),
    "moe_backend": ForeignKey(reason="it follows from --backend", neutral=(AUTO,), instead="--backend"),
    "speculative_token_tree": ForeignKey(reason="drafts are chains, not trees"),
    "disable_by_batch_size": ForeignKey(
        reason=_OLDER,
        neutral=(0,),
        instead='{"policy": "faser"}, which stops drafting where it does not pay, '
        'or {"num_speculative_tokens_per_batch_size": [[1, 16, 4], [17, 4096, 0]]}',
    ),
    "speculative_disable_by_batch_size": ForeignKey(reason=_OLDER, neutral=(0,), instead='{"policy": "faser"}'),
    "enforce_eager": ForeignKey(reason="--enforce-eager holds for both models", neutral=(False,), only_speed=True),
    "use_local_argmax_reduction": ForeignKey(
        reason="a model runs on one device", neutral=(False,), only_speed=True
    ),
    "disable_padded_drafter_batch": ForeignKey(
        reason="drafts are never padded", neutral=(False,), only_speed=True
    ),
}

# FASER's own keys of a later release. Values that ask for what is so anyway are accepted.
LATER_KEYS: dict[str, ForeignKey] = {
    "overlap": ForeignKey(reason=_NO_SPLIT, neutral=(AUTO, "serial")),
    "sm_share": ForeignKey(reason=_NO_SPLIT, neutral=(AUTO,)),
    "chunk": ForeignKey(reason=_NO_SPLIT, neutral=(AUTO,)),
    "pruning": ForeignKey(reason="drafts are trimmed before verification only", neutral=(AUTO, "off", False)),
    "audit_rate": ForeignKey(reason="this release has no shadow checks", neutral=(0, 0.0)),
}

_HIDDEN_STATES = "no drafter reads the model's hidden states"

FOREIGN_METHODS: dict[str, str] = {
    "eagle": _HIDDEN_STATES,
    "eagle3": _HIDDEN_STATES,
    "mtp": _HIDDEN_STATES,
    "medusa": _HIDDEN_STATES,
    "mlp_speculator": _HIDDEN_STATES,
    "dflash": _HIDDEN_STATES,
    "dspark": _HIDDEN_STATES,
    "custom_class": "no code of the operator's runs in the engine",
    "extract_hidden_states": "hidden states are not handed out",
}
