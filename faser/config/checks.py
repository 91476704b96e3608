"""Checks the values of settings: one line for each problem."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Any

from faser.config.declaration import complaint, settings_of, shown
from faser.errors import ConfigError, RequestError
from faser.types import SAMPLING_DEFAULTS, SamplingParams

Label = Callable[[str], str]


def flag_label(name: str) -> str:
    """A setting as its flag."""
    return "--" + name.replace("_", "-")


GENERATION_KEYS = tuple(SAMPLING_DEFAULTS)


def sampling_problems(values: Mapping[str, Any], label: str) -> list[str]:
    """Sampling defaults have the limits of requests. Files of models call max_tokens max_new_tokens."""
    found = []
    for key, value in values.items():
        name = "max_tokens" if key == "max_new_tokens" else key
        if name not in GENERATION_KEYS:
            found.append(f"{label}: unknown key '{key}'. Known keys: {', '.join(GENERATION_KEYS)}")
            continue
        whole = isinstance(SAMPLING_DEFAULTS[name], int)
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            found.append(f"{label}: {key} is {value!r}; it must be a {'whole ' if whole else ''}number")
            continue
        sampling: dict[str, Any] = {name: value}
        try:
            SamplingParams(**sampling)
        except RequestError as error:
            found.append(f"{label}: {error}")
    return found


def find_problems(
    config_type: Any, values: Mapping[str, Any], label: Label, unreadable: Collection[str] = ()
) -> list[str]:
    """Every reason why values cannot become a config, one line each.

    values: by field name; a missing one takes its default. label: what messages call a field.
    unreadable: fields whose text could not be read as a value; they are not checked again.
    """
    found = []
    sound = {each.name: values.get(each.name, each.default) for each in settings_of(config_type)}
    sound |= dict.fromkeys(unreadable)
    for each in settings_of(config_type):
        value = sound[each.name]
        if each.name not in unreadable and (reason := complaint(each, value)) is not None:
            found.append(f"{label(each.name)} is {shown(each, value)}; {reason}")
            sound[each.name] = None
    conflicts: list[str] = config_type.conflicts(sound, label)
    return found + conflicts


def raise_problems(config: Any) -> None:
    values = {each.name: getattr(config, each.name) for each in fields(config)}
    if problems := find_problems(type(config), values, lambda name: name):
        raise ConfigError("; ".join(problems))
