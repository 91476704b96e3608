"""The sources of settings: flags override FASER_* variables, which override the config file and the defaults.

Merges the sources, collects all problems, and builds the configs. Every source provides texts with a label, so
that a problem names the flag, variable or key of the value.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from faser.config.checks import find_problems, flag_label
from faser.config.declaration import Kind, Setting, did_you_mean, read, settings_of, shortened
from faser.config.engine import EngineConfig
from faser.config.environment import flag_environment
from faser.config.server import ServerConfig
from faser.config.vllm_flags import FOREIGN_FLAGS, ForeignFlag, judge
from faser.errors import ConfigError

SETTINGS = settings_of(EngineConfig) + settings_of(ServerConfig)

ReadEnvironment = Callable[[Sequence[Setting]], tuple[dict[str, tuple[str, str]], list[str]]]

_KUBERNETES_VARIABLE = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)$")
_KUBERNETES_VALUE = re.compile(r"(tcp|udp|sctp)://")


class UsageError(ConfigError):
    """Settings that cannot be used. problems: one line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The value of one setting in one source. label: the name of the setting in that source."""

    texts: tuple[str, ...]
    label: str


@dataclass(slots=True)
class Findings:
    """The settings, problems and warnings of the sources read so far."""

    given: dict[str, Given] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add_foreign(self, foreign: ForeignFlag, label: str, text: str) -> None:
        problem, warning = judge(foreign, label, text)
        self.problems += [problem] if problem else []
        self.warnings += [warning] if warning else []

    def label(self, name: str) -> str:
        """What messages call a setting: the flag, variable or key that gives it; else its flag."""
        return self.given[name].label if name in self.given else flag_label(name)

    def fill(self, source: Mapping[str, Given]) -> None:
        """Add the settings that no earlier source has."""
        self.given = {**source, **self.given}


def settle(findings: Findings, config_types: Sequence[Any]) -> list[Any]:
    """Build one config of each type. Raises UsageError with every problem of every source."""
    values, unreadable = _read_all(findings, [each for kind in config_types for each in settings_of(kind)])
    problems = [*findings.problems, *unreadable.values()]

    def own(config_type: type) -> dict[str, Any]:
        return {each.name: values[each.name] for each in settings_of(config_type) if each.name in values}

    for config_type in config_types:
        names = [each.name for each in settings_of(config_type)]
        problems += find_problems(
            config_type, own(config_type), findings.label, [n for n in names if n in unreadable]
        )
    if problems:
        raise UsageError(problems)
    return [config_type(**own(config_type)) for config_type in config_types]


def _read_all(findings: Findings, settings: Iterable[Setting]) -> tuple[dict[str, Any], dict[str, str]]:
    """Values by name of the setting, and the problems of those that cannot be read."""
    values: dict[str, Any] = {}
    problems: dict[str, str] = {}
    for each in settings:
        if each.name in findings.given:
            given = findings.given[each.name]
            if not any(text.strip() for text in given.texts):
                problems[each.name] = f"{given.label} is empty; give it a value, or leave it out"
                continue
            try:
                values[each.name] = read(each, given.texts)
            except ValueError as reason:
                text = "***" if each.secret else shortened(" ".join(given.texts))
                problems[each.name] = f"{given.label} is {text}; {reason}"
    return values, problems


def add_environment(
    findings: Findings, settings: Sequence[Setting], read_environment: ReadEnvironment = flag_environment
) -> None:
    """Read the FASER_* variables, except those that Kubernetes sets for a service named faser.

    Several values of one variable are separated by commas.
    """
    multi_valued = {each.name for each in settings if each.one_flag_many or each.kind is Kind.TEXTS}
    found, unknown = read_environment(settings)
    source = {}
    for name, (variable, text) in found.items():
        if _KUBERNETES_VALUE.match(text) and _KUBERNETES_VARIABLE.search(variable):
            findings.warnings.append(
                f"{variable} is {text}: set by Kubernetes for a service, not read as a setting"
            )
            continue
        texts = tuple(part.strip() for part in text.split(",")) if name in multi_valued else (text,)
        source[name] = Given(texts=texts, label=variable)
    known = [each.variable for each in settings]
    for variable in unknown:
        if not _KUBERNETES_VARIABLE.search(variable):
            findings.problems.append(f"{variable}: unknown variable.{did_you_mean(variable, known)}")
    findings.fill(source)


def add_file(findings: Findings, path: str, settings: Sequence[Setting]) -> None:
    """Read the keys of a YAML file: the names of the flags, with dashes or underscores."""
    try:
        content = _Loader(Path(path).read_text(encoding="utf-8")).get_single_data()
    except (OSError, UnicodeDecodeError) as error:
        findings.problems.append(f"--config is {path}; it cannot be read: {_reason(error)}")
        return
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a number of thousands of digits
        findings.problems.append(f"--config is {path}; it is not YAML: {' '.join(str(error).split())}")
        return
    if content is None:
        return
    if not isinstance(content, dict):
        findings.problems.append(f"--config is {path}; it must contain keys and values, like port: 8000")
        return
    names = {alias.lstrip("-"): each.name for each in settings for alias in (each.flag, *each.aliases)}
    foreign = {each.key: each for each in FOREIGN_FLAGS}
    source = {}
    for key, value in content.items():
        name = str(key).replace("_", "-")
        label = f"{path}: {key}"
        try:
            texts = _texts(value)
        except (TypeError, ValueError, RecursionError):  # a binary value, a set, or a list that contains itself
            findings.problems.append(f"{label} has a value that JSON has no form for")
            continue
        if name in names:
            if value is not None:
                source[names[name]] = Given(texts=texts, label=label)
        elif name in foreign:
            findings.add_foreign(foreign[name], label, texts[0])
        else:
            findings.problems.append(f"{path}: unknown key '{key}'.{did_you_mean(name, [*names, *foreign])}")
    findings.fill(source)


class _Loader(yaml.SafeLoader):
    """YAML without dates: 2026-01-31 is a text, as it is in a flag."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - the library's own name and form
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def _texts(value: Any) -> tuple[str, ...]:
    """A YAML value as texts, like the values of a flag."""
    if isinstance(value, list):
        return tuple(_text(each) for each in value) or ("",)
    return (_text(value),)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value)


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
