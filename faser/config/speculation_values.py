"""The keys of `--speculative-config` that hold a list or an object: table, acceptance rates, targets, classes.

Each function reads one JSON value and appends what is wrong with it to problems, one sentence each.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from faser.config.declaration import did_you_mean
from faser.config.speculation import AUTO, MAX_DRAFT_TOKENS
from faser.config.speculation_keys import MAX_CLASSES
from faser.types import NO_TARGETS, Slo, SpeculationParams

TABLE, RATES = "num_speculative_tokens_per_batch_size", "synthetic_acceptance_rates"
SLO_KEYS = ("ttft_ms", "tpot_ms")
_CLASS_KEYS = ("enabled", "max_tokens", "slo")


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
    )


def _check_keys(given: Mapping[str, Any], path: str, known: Sequence[str], problems: list[str]) -> None:
    for name in given:
        if name not in known:
            paths = [f"{path}.{each}" for each in known]
            near = did_you_mean(name, known).replace("'", f"'{path}.", 1)
            problems.append(f"unknown key '{path}.{name}'.{near} Known keys: {', '.join(paths)}")


def as_given(value: Any) -> str:
    """A value as it stood in the JSON, a text without its quotes."""
    return value if isinstance(value, str) else json.dumps(value, default=repr)


def _is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_range(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 3 and all(map(_is_whole, value))
