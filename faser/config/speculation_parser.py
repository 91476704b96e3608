"""From the JSON of `--speculative-config` to a SpeculationConfig, with every problem in one go.

Owns the order of reading, the choice of the policy, and the messages about names. The keys are declared in
speculation_keys.py; speculation_values.py reads those that hold a list or an object.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from faser import __version__
from faser.config.declaration import complaint, did_you_mean
from faser.config.drafters import DRAFTERS, PASS_METHODS, TEXT_METHODS
from faser.config.speculation import AUTO, MAX_DRAFT_TOKENS, NONE, SpeculationConfig
from faser.config.speculation_keys import KEYS, Key
from faser.config.speculation_values import (
    RATES,
    TABLE,
    as_given,
    merged_slo,
    read_classes,
    read_rates,
    read_table,
)
from faser.config.vllm_speculation_keys import (
    FOREIGN_KEYS,
    FOREIGN_METHODS,
    OLD_REJECTION_METHODS,
    REMOVED_METHODS,
)
from faser.types import NO_TARGETS, Slo, SpeculationParams

_KEYS = {key.name: key for key in KEYS}
_ADAPTIVE = "enable_adaptive_verification"
_QUOTED = [f"'{each}'" for each in (*TEXT_METHODS, *PASS_METHODS)]
_OWN_METHODS = f"{', '.join(_QUOTED[:-1])} or {_QUOTED[-1]}"


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
    parser = _Parser({name: value for name, value in (given or {}).items() if value is not None})
    parser.check_names()
    fields = parser.simple_fields()
    parser.widen_ngram_lengths(fields)
    fields["policy"] = parser.policy(policy, policy_label)
    fields["table"] = parser.table(fields)
    fields["synthetic_acceptance_rates"] = parser.acceptance_rates(fields)
    fields["slo"] = parser.slo(slo)
    fields["classes"] = parser.classes(_cap(fields), fields["slo"])
    parser.check_method(fields)
    return Parsed(
        config=None if parser.problems else SpeculationConfig(**fields),
        problems=tuple(parser.problems),
        warnings=tuple(parser.warnings),
    )


class _Parser:
    """Reads one object and gathers its problems and warnings. A value with a problem reads as absent."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.problems: list[str] = []
        self.warnings: list[str] = []
        self._given = given
        self._names = frozenset(given)

    def check_names(self) -> None:
        """Take out every key that FASER does not have, with a message if it asks for something."""
        for name in [name for name in self._given if name not in _KEYS]:
            value = self._given.pop(name)
            if name == "tensor_parallel_size":
                self.problems.append(
                    "'tensor_parallel_size' does not apply to the drafter; set 'draft_tensor_parallel_size' to 1 "
                    "or to the target's size."
                )
            elif name in FOREIGN_KEYS:
                self._check_foreign(name, value)
            else:
                near = did_you_mean(name, [*_KEYS, *FOREIGN_KEYS])
                self.problems.append(f"unknown key '{name}'.{near} Known keys: {', '.join(_KEYS)}")

    def simple_fields(self) -> dict[str, Any]:
        """The fields of SpeculationConfig that are one key each, as far as they are given and sound."""
        self._take_foreign_values()
        fields = {}
        for key in KEYS:
            value = None if key.structured else self._value(key)
            if value is not None and key.field is not None:
                fields[key.field] = value
        return fields

    def widen_ngram_lengths(self, fields: dict[str, Any]) -> None:
        """Where one limit of n-gram lookup is given, move the other's default so that both hold."""
        low, high = fields.get("prompt_lookup_min"), fields.get("prompt_lookup_max")
        default = SpeculationConfig()
        if low is not None and high is not None and low > high:
            self.problems.append(f"prompt_lookup_min is {low}; it must be at most prompt_lookup_max, {high}")
        elif low is not None and high is None:
            fields["prompt_lookup_max"] = max(low, default.prompt_lookup_max)
        elif high is not None and low is None:
            fields["prompt_lookup_min"] = min(high, default.prompt_lookup_min)

    def policy(self, flag: str | None, flag_label: str) -> str:
        """The one policy that all keys and the flag ask for."""
        asked = [("'policy'", self._given.get("policy")), (flag_label, flag)]
        asked.append((f"'{TABLE}'", "table" if TABLE in self._given else None))
        asked.append((f"'{_ADAPTIVE}'", "survival" if self._given.get(_ADAPTIVE) is True else None))
        named = [(name, policy) for name, policy in asked if policy is not None]
        if not named:
            return SpeculationConfig().policy
        first, chosen = named[0]
        for name, policy in named[1:]:
            if policy != chosen:
                self.problems.append(
                    f"{first} and {name} ask for different policies ({chosen}, {policy}); keep one."
                )
        if chosen == "table" and TABLE not in self._given:
            self.problems.append(f"{first} is table; it needs '{TABLE}'")
        return str(chosen)

    def table(self, fields: dict[str, Any]) -> tuple[tuple[int, int, int], ...]:
        """The table of policy table. Its largest entry becomes num_speculative_tokens where none is given."""
        if TABLE not in self._given:
            return ()
        cap = fields.get("num_speculative_tokens", MAX_DRAFT_TOKENS)
        table = read_table(self._given[TABLE], cap, self.problems)
        if table:
            fields.setdefault("num_speculative_tokens", max(1, *(tokens for _, _, tokens in table)))
        return table

    def acceptance_rates(self, fields: dict[str, Any]) -> tuple[float, ...]:
        """Those of synthetic rejection. Their number becomes num_speculative_tokens where none is given."""
        synthetic, given = fields.get("rejection_sample_method") == "synthetic", RATES in self._given
        if synthetic and not self._names & {RATES, "synthetic_acceptance_length"}:
            self.problems.append(f"rejection_sample_method is synthetic; it needs '{RATES}'")
        if given and not synthetic:
            self.problems.append(f"'{RATES}' needs rejection_sample_method synthetic")
        if not (given and synthetic):
            return ()
        rates = read_rates(self._given[RATES], fields.get("num_speculative_tokens"), self.problems)
        if rates:
            fields["num_speculative_tokens"] = len(rates)
        return rates

    def slo(self, flags: Slo) -> Slo:
        return merged_slo(flags, self._given.get("slo"), self.problems)

    def classes(self, cap: int, slo: Slo) -> dict[str, SpeculationParams]:
        return read_classes(self._given.get("classes") or {}, cap, slo, self.problems)

    def check_method(self, fields: dict[str, Any]) -> None:
        """The method has what it needs, and uses every key that is given."""
        method = fields.get("method", AUTO)
        loads = method != AUTO and (DRAFTERS[method].needs_draft_model or DRAFTERS[method].needs_head)
        if loads and ("model" not in self._names or fields.get("model") == NONE):
            self.problems.append(f"method is {method}; it needs 'model'")
        for key in KEYS:
            if key.methods and key.name in self._names and method not in key.methods:
                self.warnings.append(f"'{key.name}' has no effect with method {method}")

    def _check_foreign(self, name: str, value: Any) -> None:
        foreign = FOREIGN_KEYS[name]
        if foreign.asks_nothing(value):
            return
        if foreign.only_speed:
            self.warnings.append(f"'{name}' has no effect: {foreign.reason}")
        else:
            self.problems.append(_not_supported(name, foreign.reason, foreign.instead))

    def _take_foreign_values(self) -> None:
        """Take out values that vLLM has and FASER does not, so that each gets one message."""
        method = self._given.get("method")
        if isinstance(method, str) and (method in FOREIGN_METHODS or method.endswith("_mtp")):
            reason = FOREIGN_METHODS.get(method, FOREIGN_METHODS["mtp"])
            self.problems.append(_not_supported(method, reason, _OWN_METHODS))
            del self._given["method"]
        elif isinstance(method, str) and method in REMOVED_METHODS:
            self.problems.append(f"'{method}' was removed: {REMOVED_METHODS[method]}. Use {_OWN_METHODS}.")
            del self._given["method"]
        rejection = self._given.get("rejection_sample_method")
        if rejection in OLD_REJECTION_METHODS:
            self.problems.append(
                f"rejection_sample_method '{rejection}' is an older name; use 'standard', 'block' or 'synthetic'."
            )
            del self._given["rejection_sample_method"]

    def _value(self, key: Key) -> Any:
        """The value of a key; None if it is absent, or has a problem and is absent from now on."""
        value = self._given.get(key.name)
        if isinstance(value, str):
            value = dict(key.setting.synonyms).get(value, value)
        if value is not None and (reason := complaint(key.setting, value)) is not None:
            self.problems.append(f"{key.name} is {as_given(value)}; {reason}")
            del self._given[key.name]
            return None
        return value


def _not_supported(name: str, reason: str, instead: str) -> str:
    alternative = f"Remove it or use {instead}." if instead else "Remove it."
    return f"'{name}' is known from vLLM but not supported by FASER {__version__}: {reason}. {alternative}"


def _cap(fields: Mapping[str, Any]) -> int:
    """The most drafted tokens that these fields allow."""
    return SpeculationConfig(
        **{name: fields[name] for name in ("method", "num_speculative_tokens") if name in fields}
    ).cap
