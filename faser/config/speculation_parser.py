"""From the JSON of `--speculative-config` to a SpeculationConfig, with every problem in one go.

Owns the words for what can be wrong with it. Which keys there are is declared in config/speculation_keys.py; knows
no flags, no drafter and no policy by class.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from faser import __version__
from faser.config.declaration import complaint, did_you_mean
from faser.config.speculation import AUTO, MAX_DRAFT_TOKENS, SpeculationConfig
from faser.config.speculation_keys import (
    FOREIGN_KEYS,
    FOREIGN_METHODS,
    KEYS,
    LATER_KEYS,
    MAX_CLASSES,
    ForeignKey,
    Key,
)
from faser.types import NO_TARGETS, Slo, SpeculationParams

_KEYS = {key.name: key for key in KEYS}
_TABLE = "num_speculative_tokens_per_batch_size"
_ADAPTIVE = "enable_adaptive_verification"
_RATES, _LENGTH = "synthetic_acceptance_rates", "synthetic_acceptance_length"
_OLD_REJECTION = ("strict", "probabilistic", "rejection_sampler", "typical_acceptance_sampler")
_SLO_KEYS = ("ttft_ms", "tpot_ms")
_CLASS_KEYS = ("enabled", "max_tokens", "slo")
_RANGE_FORM = "it must be a list of [first, last, tokens], three whole numbers each"


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
    """given: the JSON object. policy, slo: from flags of their own; policy_label: what that flag is called."""
    reading = _Reading({name: value for name, value in (given or {}).items() if value is not None})
    reading.check_names()
    fields = reading.simple_fields()
    reading.adjust_lookup(fields)
    fields["policy"] = reading.policy(policy, policy_label)
    fields["table"] = reading.table(fields)
    fields["synthetic_acceptance_rates"] = reading.synthetic(fields)
    fields["slo"] = reading.targets(slo)
    fields["classes"] = reading.classes(_cap(fields), fields["slo"])
    reading.check_method(fields)
    return Parsed(
        config=None if reading.problems else SpeculationConfig(**fields),
        problems=tuple(reading.problems),
        warnings=tuple(reading.warnings),
    )


class _Reading:
    """One object while it is read. Problems and warnings gather; what is wrong reads as absent."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.problems: list[str] = []
        self.warnings: list[str] = []
        self._given = given
        self._names = frozenset(given)

    def check_names(self) -> None:
        """Take out every key that is not ours to read, with a word about it where it asks for something."""
        for name in [name for name in self._given if name not in _KEYS]:
            value = self._given.pop(name)
            if name == "tensor_parallel_size":
                self.problems.append(
                    "'tensor_parallel_size' does not apply to the drafter; set 'draft_tensor_parallel_size' to 1 "
                    "or to the target's size."
                )
            elif name in FOREIGN_KEYS:
                self._foreign(name, FOREIGN_KEYS[name], value)
            elif name in LATER_KEYS:
                self._later(name, LATER_KEYS[name], value)
            else:
                near = did_you_mean(name, [*_KEYS, *FOREIGN_KEYS, *LATER_KEYS])
                self.problems.append(f"unknown key '{name}'.{near} Known keys: {', '.join(_KEYS)}")

    def simple_fields(self) -> dict[str, Any]:
        """Fields of SpeculationConfig that are one key each, as far as they are given and sound."""
        self._check_old_words()
        fields = {}
        for key in KEYS:
            value = None if key.structured else self._value(key)
            if value is not None and key.field is not None:
                fields[key.field] = value
        return fields

    def adjust_lookup(self, fields: dict[str, Any]) -> None:
        """One limit of n-gram lookup alone moves the other's default out of its way."""
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
        asked.append((f"'{_TABLE}'", "table" if _TABLE in self._given else None))
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
        if chosen == "table" and _TABLE not in self._given:
            self.problems.append(f"{first} is table; it needs '{_TABLE}'")
        return str(chosen)

    def table(self, fields: dict[str, Any]) -> tuple[tuple[int, int, int], ...]:
        """The ranges of policy table. Without num_speculative_tokens their largest gamma becomes the cap."""
        ranges = self._given.get(_TABLE)
        if ranges is None:
            return ()
        if not isinstance(ranges, list) or not ranges or not all(map(_is_range, ranges)):
            self.problems.append(f"{_TABLE} is {_word(ranges)}; {_RANGE_FORM}")
            return ()
        cap = fields.get("num_speculative_tokens", MAX_DRAFT_TOKENS)
        expected = 1
        for at, (first, last, gamma) in enumerate(ranges):
            if first != expected or last < first:
                self.problems.append(
                    f"{_TABLE}.{at} is {ranges[at]}; it must begin at {expected} and not end before: "
                    f"ranges ascend without gap or overlap"
                )
                break
            if not 0 <= gamma <= cap:
                self.problems.append(f"{_TABLE}.{at} is {ranges[at]}; tokens must be at least 0 and at most {cap}")
            expected = last + 1
        fields.setdefault("num_speculative_tokens", max(1, *(gamma for _, _, gamma in ranges)))
        return tuple((first, last, gamma) for first, last, gamma in ranges)

    def synthetic(self, fields: dict[str, Any]) -> tuple[float, ...]:
        """Unconditional acceptance by position, as long as the cap; empty without synthetic."""
        rates, length = self._given.get(_RATES), self._given.get(_LENGTH)
        wanted = fields.get("rejection_sample_method") == "synthetic"
        if len(self._names & {_RATES, _LENGTH}) != (1 if wanted else 0):
            self.problems.append(
                f"'synthetic' needs exactly one of '{_RATES}' and '{_LENGTH}' (and they need 'synthetic')."
            )
            return ()
        if rates is not None:
            return self._rates(rates, fields)
        return () if length is None else self._rates_of_length(length, fields)

    def targets(self, flags: Slo) -> Slo:
        """The server's targets: of the flags, else of the key slo."""
        own = self._slo(self._given.get("slo"), "slo", NO_TARGETS)
        for name in _SLO_KEYS:
            one, other = getattr(flags, name), getattr(own, name)
            if one is not None and other is not None and one != other:
                self.problems.append(f"'slo.{name}' is {other} and the flag for it is {one}; keep one")
        return Slo(ttft_ms=flags.ttft_ms or own.ttft_ms, tpot_ms=flags.tpot_ms or own.tpot_ms)

    def classes(self, cap: int, slo: Slo) -> dict[str, SpeculationParams]:
        """What requests of each class get. What a class leaves out is the server's, cap and slo."""
        given = self._given.get("classes") or {}
        if not isinstance(given, Mapping) or len(given) > MAX_CLASSES:
            form = (
                f"it must be an object of at most {MAX_CLASSES} classes, such as {{'batch': {{'enabled': false}}}}"
            )
            self.problems.append(f"classes is {_word(given)}; {form}")
            return {}
        return {name: self._class(name, wishes, cap, slo) for name, wishes in given.items()}

    def check_method(self, fields: dict[str, Any]) -> None:
        """The method has what it needs, and every key has a method that looks at it."""
        method = fields.get("method", AUTO)
        if method == "draft_model" and "model" not in self._names:
            self.problems.append("method is draft_model; it needs 'model'")
        for key in KEYS:
            if key.methods and key.name in self._names and method not in key.methods:
                self.warnings.append(f"'{key.name}' has no effect with method {method}")

    def _foreign(self, name: str, foreign: ForeignKey, value: Any) -> None:
        if _asks_nothing(foreign, value):
            return
        if foreign.only_speed:
            self.warnings.append(f"'{name}' has no effect: {foreign.reason}")
            return
        self.problems.append(_not_supported(name, foreign.reason, foreign.instead))

    def _later(self, name: str, later: ForeignKey, value: Any) -> None:
        if not _asks_nothing(later, value):
            allowed = " or ".join(dict.fromkeys(_word(each) for each in later.neutral))
            self.problems.append(
                f"'{name}' is {_word(value)}; FASER {__version__} takes {allowed} only: {later.reason}"
            )

    def _check_old_words(self) -> None:
        """Values that vLLM has and FASER has not; taken out, so that they are complained of once."""
        method = self._given.get("method")
        if isinstance(method, str) and (method in FOREIGN_METHODS or method.endswith("_mtp")):
            reason = FOREIGN_METHODS.get(method, FOREIGN_METHODS["mtp"])
            self.problems.append(
                _not_supported(method, reason, "'suffix', 'ngram', 'draft_model' or 'layer_skip'")
            )
            del self._given["method"]
        rejection = self._given.get("rejection_sample_method")
        if rejection in _OLD_REJECTION:
            self.problems.append(
                f"rejection_sample_method '{rejection}' is an older name; use 'standard', 'block' or 'synthetic'."
            )
            del self._given["rejection_sample_method"]

    def _value(self, key: Key) -> Any:
        """None: absent, or complained of, and then absent for what follows."""
        value = self._given.get(key.name)
        if isinstance(value, str):
            value = dict(key.setting.synonyms).get(value, value)
        if value is not None and (reason := complaint(key.setting, value)) is not None:
            self.problems.append(f"{key.name} is {_word(value)}; {reason}")
            del self._given[key.name]
            return None
        return value

    def _rates(self, rates: Any, fields: dict[str, Any]) -> tuple[float, ...]:
        """Without num_speculative_tokens there are as many drafted tokens as rates."""
        size = fields.get("num_speculative_tokens")
        most = size or MAX_DRAFT_TOKENS
        sound = isinstance(rates, list | tuple) and all(_is_number(rate) and 0 <= rate <= 1 for rate in rates)
        if not sound or not (size or 1) <= len(rates) <= most or sorted(rates, reverse=True) != list(rates):
            number = f"{size}" if size else f"1 to {most}"
            self.problems.append(
                f"{_RATES} is {_word(rates)}; it must be {number} numbers from 0 to 1 that never rise"
            )
            return ()
        fields["num_speculative_tokens"] = len(rates)
        return tuple(map(float, rates))

    def _rates_of_length(self, length: float, fields: dict[str, Any]) -> tuple[float, ...]:
        """Leading ones, one fraction, zeros: 2.5 of four drafted tokens is 1, 0.5, 0, 0."""
        size = _cap(fields)
        if length > size + 1:
            self.problems.append(
                f"{_LENGTH} is {length}; it must be at least 1 and at most {size + 1}, one more than "
                f"num_speculative_tokens"
            )
            return ()
        return tuple(min(1.0, max(0.0, length - 1 - at)) for at in range(size))

    def _class(self, name: str, given: Any, server_cap: int, slo: Slo) -> SpeculationParams:
        path = f"classes.{name}"
        if not isinstance(given, Mapping) or not 0 < len(name) <= 64 or not name.isprintable():
            self.problems.append(
                f"{path} is {_word(given)}; it must be a name of at most 64 characters and an object of "
                f"{', '.join(_CLASS_KEYS)}"
            )
            return SpeculationParams()
        self._check_keys(given, path, _CLASS_KEYS)
        enabled = given.get("enabled", True)
        if not (isinstance(enabled, bool) or enabled == AUTO):
            self.problems.append(f"{path}.enabled is {_word(enabled)}; it must be true, false or auto")
        cap = server_cap if given.get("max_tokens") is None else given["max_tokens"]
        if not _is_whole(cap) or not 0 <= cap <= server_cap:
            self.problems.append(
                f"{path}.max_tokens is {_word(cap)}; it must be at least 0 and at most {server_cap}"
            )
        return SpeculationParams(
            enabled=enabled is not False and cap != 0,
            max_tokens=cap,
            class_name=name,
            slo=self._slo(given.get("slo"), f"{path}.slo", slo),
        )

    def _slo(self, given: Any, path: str, default: Slo) -> Slo:
        if given is None:
            return default
        if not isinstance(given, Mapping):
            self.problems.append(f"{path} is {_word(given)}; it must be an object of {', '.join(_SLO_KEYS)}")
            return default
        self._check_keys(given, path, _SLO_KEYS)
        targets = {"ttft_ms": default.ttft_ms, "tpot_ms": default.tpot_ms}
        for name in _SLO_KEYS:
            value = given.get(name)
            if _is_number(value) and 0 < value < math.inf:
                targets[name] = value
            elif value is not None:
                self.problems.append(
                    f"{path}.{name} is {_word(value)}; it must be a number of milliseconds above 0"
                )
        return Slo(**targets)

    def _check_keys(self, given: Mapping[str, Any], path: str, known: Sequence[str]) -> None:
        for name in given:
            if name not in known:
                paths = [f"{path}.{each}" for each in known]
                near = did_you_mean(name, known).replace("'", f"'{path}.", 1)
                self.problems.append(f"unknown key '{path}.{name}'.{near} Known keys: {', '.join(paths)}")


def _not_supported(name: str, reason: str, instead: str) -> str:
    alternative = f"Remove it or use {instead}." if instead else "Remove it."
    return f"'{name}' is known from vLLM but not supported by FASER {__version__}: {reason}. {alternative}"


def _asks_nothing(foreign: ForeignKey, value: Any) -> bool:
    return any(value == neutral and type(value) is type(neutral) for neutral in foreign.neutral)


def _is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_range(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 3 and all(map(_is_whole, value))


def _cap(fields: Mapping[str, Any]) -> int:
    """The most drafted tokens that these fields allow."""
    return SpeculationConfig(
        **{name: fields[name] for name in ("method", "num_speculative_tokens") if name in fields}
    ).cap


def _word(value: Any) -> str:
    """A value as it stood in the JSON, a text without its quotes."""
    return value if isinstance(value, str) else json.dumps(value, default=repr)
