"""The JSON of `--speculative-config`: its keys, and how it becomes a SpeculationConfig. All problems in one go.

The keys are vLLM's, as far as FASER has what they stand for, and FASER's own. Each is declared once, as a setting;
reading, messages and the documentation's table follow from it. Those that hold a list or an object are read below.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from faser.config.declaration import SPECULATION, Kind, Setting, as_given, did_you_mean, read_keys
from faser.config.foreign import not_supported
from faser.config.speculation import (
    AUTO,
    DFLASH,
    DRAFT_SAMPLE_METHODS,
    DRAFTERS,
    DSPARK,
    HEAD_METHODS,
    MAX_DRAFT_TOKENS,
    METHODS,
    MTP,
    NONE,
    PASS_METHODS,
    POLICIES,
    REJECTION_METHODS,
    TEXT_METHODS,
    SpeculationConfig,
)
from faser.config.vllm_names import (
    FOREIGN_KEYS,
    FOREIGN_METHODS,
    MTP_NAMES,
    OLD_REJECTION_METHODS,
    REFUSED_HEADS,
    REMOVED_METHODS,
)
from faser.types.request import DEFAULT_CLASS, NO_TARGETS, REFUSE, WAIT, Slo, SpeculationParams

MAX_CLASSES = 32  # each is a label value of a dozen metrics


def _key(name: str, kind: Kind, help: str, **limits: Any) -> Setting:
    return Setting(name=name, kind=kind, help=help, group=SPECULATION, **limits)


KEYS: tuple[Setting, ...] = (
    _key(
        "method",
        Kind.TEXT,
        "Drafting method. auto: drafts from text, and from the draft model or the head if there is one, chosen "
        "per request. mtp: the layer for drafting in the model's own checkpoint (Qwen3.5), or with `model` an "
        "assistant of Gemma 4.",
        choices=METHODS,
        synonyms=(("ngram_gpu", "ngram"), *((name, MTP) for name in MTP_NAMES)),
    ),
    _key("policy", Kind.TEXT, "Policy that chooses the number of drafted and verified tokens.", choices=POLICIES),
    _key(
        "num_speculative_tokens",
        Kind.INTEGER,
        "Draft tokens per sequence and step: the number under policy fixed, the maximum under every other policy.",
        low=1,
        high=MAX_DRAFT_TOKENS,
    ),
    _key(
        "model",
        Kind.TEXT,
        "Draft model: directory, .gguf file or hub id. It needs the vocabulary of the model it drafts for. Or a "
        "head (EAGLE-3, DFlash, DSpark, or an assistant of Gemma 4, method mtp): directory or hub id. Default: "
        "with auto the model's own MTP layer, if its checkpoint has one. 'none': no model.",
    ),
    _key(
        "model_method",
        Kind.TEXT,
        "With auto, the kind of `model`: draft_model, or a kind of head; mtp: without `model` the model's own "
        "layer. Default: as its files say.",
        choices=("draft_model", *HEAD_METHODS),
    ),
    _key("revision", Kind.TEXT, "Branch, tag or commit of a draft model or head."),
    _key(
        "max_model_len",
        Kind.INTEGER,
        "Maximum context in which the draft model drafts, in tokens.",
        low=1,
        high=1 << 24,
    ),
    _key(
        "draft_vocab_size",
        Kind.INTEGER,
        "How many tokens an MTP layer chooses from, or a block drafter of the whole vocabulary: the first, "
        "its commonest, and those that end generation. None: 32768; for MTP on a CPU 8192, 16384, 32768 or "
        "65536, chosen while serving by the tokens that the model generates, or all of a vocabulary of at most "
        "65536. Not below the size of the vocabulary: all.",
        low=1,
        high=1 << 24,
    ),
    _key("prompt_lookup_min", Kind.INTEGER, "Minimum match of n-gram lookup, in tokens.", low=1, high=64),
    _key("prompt_lookup_max", Kind.INTEGER, "Maximum match of n-gram lookup, in tokens.", low=1, high=64),
    _key(
        "suffix_decoding_max_cached_requests",
        Kind.INTEGER,
        "Maximum number of past answers that suffix lookup drafts from. 0: none.",
        low=0,
        high=1 << 30,
    ),
    _key(
        "ngram_model",
        Kind.TEXT,
        "File of the n-gram model, or 'none'. Default: one counted with the model's tokenizer in the package's "
        "answers.",
    ),
    _key(
        "num_speculative_tokens_per_batch_size",
        Kind.JSON,
        "[[first, last, tokens], …] by number of sequences, from 1 on, without gap or overlap; policy table.",
    ),
    _key("enable_adaptive_verification", Kind.SWITCH, "true: policy survival."),
    _key(
        "rejection_sample_method",
        Kind.TEXT,
        "How drafts are verified. synthetic accepts at given rates: answers are not the model's.",
        choices=REJECTION_METHODS,
        refused=OLD_REJECTION_METHODS,
    ),
    _key(
        "draft_sample_method",
        Kind.TEXT,
        "How a model drafts. greedy: its likeliest token; coupled: with the random numbers that the target will "
        "use; probabilistic: with its own.",
        choices=DRAFT_SAMPLE_METHODS,
    ),
    _key(
        "synthetic_acceptance_rates",
        Kind.JSON,
        "With synthetic: for each position the share of drafts that are accepted up to there; never rising.",
    ),
    _key("slo", Kind.JSON, "{ttft_ms, tpot_ms}: latency targets of requests that have none of their own."),
    _key(
        "admission",
        Kind.TEXT,
        "What happens to a request whose target cannot be met: wait, refuse, or the name of the class that it "
        "runs in instead.",
    ),
    _key(
        "classes", Kind.JSON, "{name: {enabled, max_tokens, slo, admission}}: settings of each class of requests."
    ),
)

_QUOTED = [f"'{each}'" for each in (*TEXT_METHODS, *PASS_METHODS)]
_OWN_METHODS = f"{', '.join(_QUOTED[:-1])} or {_QUOTED[-1]}"

# Keys that only some methods use.
_OWN_MODEL = (AUTO, *(each for each in PASS_METHODS if not DRAFTERS[each].in_checkpoint))
_USED_BY = {
    **dict.fromkeys(("model", "revision"), (*_OWN_MODEL, MTP)),
    "max_model_len": _OWN_MODEL,
    **dict.fromkeys(("prompt_lookup_min", "prompt_lookup_max"), (AUTO, "ngram")),
    "model_method": (AUTO,),
    "draft_vocab_size": (AUTO, MTP, DFLASH, DSPARK),
    "suffix_decoding_max_cached_requests": (AUTO, "suffix"),
    "ngram_model": (AUTO, "ngram_model"),
    "draft_sample_method": (AUTO, *PASS_METHODS),
}

TABLE, RATES, ADAPTIVE = (
    "num_speculative_tokens_per_batch_size",
    "synthetic_acceptance_rates",
    "enable_adaptive_verification",
)
# Fields of SpeculationConfig that have another name than their key.
FIELDS = {
    "max_model_len": "draft_max_model_len",
    "suffix_decoding_max_cached_requests": "suffix_max_cached_requests",
    TABLE: "table",
}
SLO_KEYS = ("ttft_ms", "tpot_ms")
_CLASS_KEYS = ("enabled", "max_tokens", "slo", "admission")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """config: None exactly when there are problems. warnings: what was accepted without effect."""

    config: SpeculationConfig | None
    problems: tuple[str, ...]
    warnings: tuple[str, ...]


def parse_speculation(
    given: Mapping[str, Any] | None = None,
    *,
    policy: str | None = None,
    policy_label: str = "policy",
    slo: Slo = NO_TARGETS,
) -> Parsed:
    """given: the JSON object. policy, slo: from flags of their own; policy_label: what messages call that flag."""
    problems: list[str] = []
    warnings: list[str] = []
    given = {name: value for name, value in (given or {}).items() if value is not None}
    names = frozenset(given)
    _take_foreign_method(given, problems)
    values = read_keys(given, KEYS, FOREIGN_KEYS, problems, warnings)
    fields = {
        FIELDS.get(key.name, key.name): values[key.name]
        for key in KEYS
        if key.name in values and key.kind is not Kind.JSON and key.name != ADAPTIVE
    }
    _widen_ngram_lengths(fields, problems)
    fields["policy"] = _policy(values, policy, policy_label, problems)
    fields["table"] = _table(values, fields, problems)
    fields["synthetic_acceptance_rates"] = _acceptance_rates(values, fields, names, problems)
    fields["slo"] = merged_slo(slo, values.get("slo"), problems)
    fields["classes"] = read_classes(values.get("classes") or {}, _cap(fields), fields["slo"], problems)
    _check_admission(fields, problems)
    _check_method(fields, names, problems, warnings)
    config = None if problems else SpeculationConfig(**fields)
    return Parsed(config=config, problems=tuple(problems), warnings=tuple(warnings))


def _take_foreign_method(given: dict[str, Any], problems: list[str]) -> None:
    """Take out a method that vLLM has and FASER does not, or does not any more."""
    method = given.get("method")
    if not isinstance(method, str) or method in MTP_NAMES:
        return
    if method in FOREIGN_METHODS or method.endswith("_mtp"):
        reason = FOREIGN_METHODS.get(method, REFUSED_HEADS[MTP])
        problems.append(f"'{method}' {not_supported(reason, _OWN_METHODS)}")
        del given["method"]
    elif method in REMOVED_METHODS:
        problems.append(f"'{method}' was removed: {REMOVED_METHODS[method]}. Use {_OWN_METHODS}.")
        del given["method"]


def _widen_ngram_lengths(fields: dict[str, Any], problems: list[str]) -> None:
    """Move the default of one n-gram length limit where only the other is given, so that both hold."""
    default = SpeculationConfig()
    low = fields.get("prompt_lookup_min", default.prompt_lookup_min)
    high = fields.get("prompt_lookup_max", default.prompt_lookup_max)
    if low <= high:
        return
    if "prompt_lookup_max" not in fields:
        fields["prompt_lookup_max"] = low
    elif "prompt_lookup_min" not in fields:
        fields["prompt_lookup_min"] = high
    else:
        problems.append(f"prompt_lookup_min is {low}; it must be at most prompt_lookup_max, {high}")


def _policy(values: Mapping[str, Any], flag: str | None, flag_label: str, problems: list[str]) -> str:
    """The one policy that all keys and the flag ask for."""
    asked = [
        ("'policy'", values.get("policy")),
        (flag_label, flag),
        (f"'{TABLE}'", "table" if TABLE in values else None),
        (f"'{ADAPTIVE}'", "survival" if values.get(ADAPTIVE) is True else None),
    ]
    named = [(name, policy) for name, policy in asked if policy is not None]
    if not named:
        return SpeculationConfig().policy
    first, chosen = named[0]
    problems += [
        f"{first} and {name} ask for different policies ({chosen}, {policy}); keep one."
        for name, policy in named[1:]
        if policy != chosen
    ]
    if chosen == "table" and TABLE not in values:
        problems.append(f"{first} is table; it needs '{TABLE}'")
    return str(chosen)


def _table(
    values: Mapping[str, Any], fields: dict[str, Any], problems: list[str]
) -> tuple[tuple[int, int, int], ...]:
    """The table of policy table. Its largest entry becomes num_speculative_tokens where none is given."""
    if TABLE not in values:
        return ()
    table = read_table(values[TABLE], fields.get("num_speculative_tokens", MAX_DRAFT_TOKENS), problems)
    if table:
        fields.setdefault("num_speculative_tokens", max(1, *(tokens for _, _, tokens in table)))
    return table


def _acceptance_rates(
    values: Mapping[str, Any], fields: dict[str, Any], names: frozenset[str], problems: list[str]
) -> tuple[float, ...]:
    """Those of synthetic rejection. Their number becomes num_speculative_tokens where none is given."""
    synthetic, given = fields.get("rejection_sample_method") == "synthetic", RATES in values
    if synthetic and not names & {RATES, "synthetic_acceptance_length"}:
        problems.append(f"rejection_sample_method is synthetic; it needs '{RATES}'")
    if given and not synthetic:
        problems.append(f"'{RATES}' needs rejection_sample_method synthetic")
    if not (given and synthetic):
        return ()
    rates = read_rates(values[RATES], fields.get("num_speculative_tokens"), problems)
    if rates:
        fields["num_speculative_tokens"] = len(rates)
    return rates


def _check_method(
    fields: Mapping[str, Any], names: frozenset[str], problems: list[str], warnings: list[str]
) -> None:
    """The method has what it needs, and uses every key that is given."""
    method = fields.get("method", AUTO)
    if method != AUTO and method in _OWN_MODEL and ("model" not in names or fields.get("model") == NONE):
        problems.append(f"method is {method}; it needs 'model'")
    warnings += [
        f"'{name}' has no effect with method {method}"
        for name, methods in _USED_BY.items()
        if name in names and method not in methods
    ]


def _cap(fields: Mapping[str, Any]) -> int:
    """The most drafted tokens that these fields allow."""
    return SpeculationConfig(
        **{name: fields[name] for name in ("method", "num_speculative_tokens") if name in fields}
    ).cap


def read_table(ranges: Any, cap: int, problems: list[str]) -> tuple[tuple[int, int, int], ...]:
    """(first, last, tokens) by number of sequences, no entry above cap; empty if they are not sound."""
    if not isinstance(ranges, list) or not ranges or not all(map(_is_range, ranges)):
        form = "it must be a list of [first, last, tokens], three whole numbers each"
        problems.append(f"{TABLE} is {as_given(ranges)}; {form}")
        return ()
    expected = 1
    for at, (first, last, tokens) in enumerate(ranges):
        if first != expected or last < first:
            problems.append(
                f"{TABLE}.{at} is {ranges[at]}; it must begin at {expected} and not end before: "
                f"ranges ascend without gap or overlap"
            )
            break
        if not 0 <= tokens <= cap:
            problems.append(f"{TABLE}.{at} is {ranges[at]}; tokens must be at least 0 and at most {cap}")
        expected = last + 1
    return tuple((first, last, tokens) for first, last, tokens in ranges)


def read_rates(rates: Any, num_tokens: int | None, problems: list[str]) -> tuple[float, ...]:
    """A share of accepted drafts for each position; empty if not sound. num_tokens: how many, if known."""
    most = num_tokens or MAX_DRAFT_TOKENS
    sound = isinstance(rates, list | tuple) and all(_is_number(rate) and 0 <= rate <= 1 for rate in rates)
    if not sound or not (num_tokens or 1) <= len(rates) <= most or sorted(rates, reverse=True) != list(rates):
        number = f"{num_tokens}" if num_tokens else f"1 to {most}"
        problems.append(f"{RATES} is {as_given(rates)}; it must be {number} numbers from 0 to 1 that never rise")
        return ()
    return tuple(map(float, rates))


def read_slo(given: Any, path: str, default: Slo, problems: list[str]) -> Slo:
    """Latency targets; default has those that are not given. path: what messages call the value."""
    if given is None:
        return default
    if not isinstance(given, Mapping):
        problems.append(f"{path} is {as_given(given)}; it must be an object of {', '.join(SLO_KEYS)}")
        return default
    _check_keys(given, path, SLO_KEYS, problems)
    targets = {"ttft_ms": default.ttft_ms, "tpot_ms": default.tpot_ms}
    for name in SLO_KEYS:
        value = given.get(name)
        if _is_number(value) and 0 < value < math.inf:
            targets[name] = value
        elif value is not None:
            problems.append(f"{path}.{name} is {as_given(value)}; it must be a number of milliseconds above 0")
    return Slo(**targets)


def merged_slo(flags: Slo, given: Any, problems: list[str]) -> Slo:
    """The server's targets: those of the flags, else those of the key slo."""
    own = read_slo(given, "slo", NO_TARGETS, problems)
    for name in SLO_KEYS:
        flag, key = getattr(flags, name), getattr(own, name)
        if flag is not None and key is not None and flag != key:
            problems.append(f"'slo.{name}' is {key} and the flag for it is {flag}; keep one")
    return Slo(ttft_ms=flags.ttft_ms or own.ttft_ms, tpot_ms=flags.tpot_ms or own.tpot_ms)


def read_classes(given: Any, server_cap: int, slo: Slo, problems: list[str]) -> dict[str, SpeculationParams]:
    """Settings of each class of requests. A class has the server's cap and targets where it gives none."""
    if not isinstance(given, Mapping) or len(given) > MAX_CLASSES:
        form = f"it must be an object of at most {MAX_CLASSES} classes, such as {{'batch': {{'enabled': false}}}}"
        problems.append(f"classes is {as_given(given)}; {form}")
        return {}
    return {name: _read_class(name, each, server_cap, slo, problems) for name, each in given.items()}


def _read_class(name: str, given: Any, server_cap: int, slo: Slo, problems: list[str]) -> SpeculationParams:
    path = f"classes.{name}"
    if not isinstance(given, Mapping) or not 0 < len(name) <= 64 or not name.isprintable():
        problems.append(
            f"{path} is {as_given(given)}; it must be a name of at most 64 characters and an object of "
            f"{', '.join(_CLASS_KEYS)}"
        )
        return SpeculationParams()
    _check_keys(given, path, _CLASS_KEYS, problems)
    enabled = given.get("enabled", True)
    if not (isinstance(enabled, bool) or enabled == AUTO):
        problems.append(f"{path}.enabled is {as_given(enabled)}; it must be true, false or auto")
    cap = server_cap if given.get("max_tokens") is None else given["max_tokens"]
    if not _is_whole(cap) or not 0 <= cap <= server_cap:
        problems.append(f"{path}.max_tokens is {as_given(cap)}; it must be at least 0 and at most {server_cap}")
    return SpeculationParams(
        enabled=enabled is not False and cap != 0,
        max_tokens=cap,
        class_name=name,
        slo=read_slo(given.get("slo"), f"{path}.slo", slo, problems),
        admission=_admission(given.get("admission"), f"{path}.admission", problems),
    )


def _admission(given: Any, path: str, problems: list[str]) -> str:
    """Parse an admission: `wait` where nothing is given, `refuse`, or the name of a class."""
    if given is None:
        return WAIT
    if not isinstance(given, str):
        problems.append(f"{path} is {as_given(given)}; it must be {WAIT}, {REFUSE} or the name of a class")
        return WAIT
    return given


def _check_admission(fields: Mapping[str, Any], problems: list[str]) -> None:
    """Classes as which requests run instead exist, and none leads back to itself."""
    classes: Mapping[str, SpeculationParams] = fields["classes"]
    problems += [
        f"classes.{name} is the name of a rule; call the class otherwise"
        for name in (WAIT, REFUSE)
        if name in classes
    ]
    following = {name: each.admission for name, each in classes.items()}
    following.setdefault(DEFAULT_CLASS, fields.get("admission", WAIT))
    for name, instead in following.items():
        path = "admission" if name == DEFAULT_CLASS and name not in classes else f"classes.{name}.admission"
        seen = {name}
        if instead not in (WAIT, REFUSE) and instead not in following:
            problems.append(f"{path} is {as_given(instead)}; it must be {WAIT}, {REFUSE} or the name of a class")
        while instead in following:
            if instead in seen:
                problems.append(
                    f"{path} is {as_given(following[name])}; a request would come back to class {instead}"
                )
                break
            seen.add(instead)
            instead = following[instead]


def _check_keys(given: Mapping[str, Any], path: str, known: Sequence[str], problems: list[str]) -> None:
    for name in given:
        if name not in known:
            paths = [f"{path}.{each}" for each in known]
            near = did_you_mean(name, known).replace("'", f"'{path}.", 1)
            problems.append(f"unknown key '{path}.{name}'.{near} Known keys: {', '.join(paths)}")


def _is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_range(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 3 and all(map(_is_whole, value))
