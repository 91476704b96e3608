"""Settings of several models on one server: those of all of them, and what each has of its own.

A model's settings are the server's, and above them its entry in the config file's `models`. What can only be of
one model is refused where it is said of all.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from faser.config.declaration import Label
from faser.config.engine import EngineConfig
from faser.config.server import ServerConfig
from faser.config.sources import Findings, Given, UsageError, settle_server

_OF_ONE = (
    "served_model_name",
    "tokenizer",
    "revision",
    "chat_template",
    "speculative_config",
    "kv_cache_dir",
    "kv_events_config",
    "lora_modules",
)
_WITH_ONE = (  # what is not supported with several models at all
    ("data_parallel_size", "an engine of each model is enough"),
    ("data_parallel_first_port", "engines have no ports of their own"),
    ("tensor_parallel_size", "each model is in one process"),
    ("record_traffic", "a file of recorded answers is of one model"),
    ("allow_runtime_lora_updating", "clients could not say of which model an adapter is"),
)
_ASKS_FOR_NOTHING = (("1",), ("false",))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Settings of one of several models. names: in requests, the first is its own. label: what messages call them.

    server: with what belongs to its answers; the port and the like are the server's.
    """

    names: tuple[str, ...]
    engine: EngineConfig
    server: ServerConfig
    label: Label

    @property
    def adapters(self) -> dict[str, str]:
        """Return the paths of its LoRA adapters, by their names in requests."""
        return {each.name: each.path for each in self.server.adapter_modules}


def settings_of_models(findings: Findings, found: Mapping[str, str]) -> list[ModelSettings]:
    """The settings of each model. findings: after server_settings. found: names and paths of models in a folder.

    Raises UsageError with every problem: a value, a name that two models have, a setting that is of one model.
    """
    entries = list(findings.models)
    if found and not entries and "model" in findings.given:
        entries = [{"model": findings.given["model"]}]
    label = findings.label("models_dir")
    entries += [
        {"model": Given(texts=(path,), label=label), "served_model_name": Given(texts=(name,), label=label)}
        for name, path in found.items()
    ]
    problems, models = _common_problems(findings), list[ModelSettings]()
    shared = {name: given for name, given in findings.given.items() if name != "model"}
    for entry in entries:
        own = Findings(given={**shared, **entry})
        problems += [
            f"{own.given[name].label} is {' '.join(own.given[name].texts)}; with several models it is not "
            f"supported: {reason}"
            for name, reason in _WITH_ONE
            if name in entry
        ]
        try:
            engine, server = settle_server(own)
        except UsageError as error:
            problems += [each for each in error.problems if each not in problems]
            continue
        names = server.served_model_name or (engine.model or "",)
        models.append(ModelSettings(names=names, engine=engine, server=server, label=own.label))
    problems += _repeated(models) + _unknown_preloads(findings, models)
    if problems:
        raise UsageError(problems)
    return models


def _common_problems(findings: Findings) -> list[str]:
    """Return the settings of all models that can only be of one."""
    given = findings.given
    found = [
        f"{given[name].label} is {' '.join(given[name].texts)}; with several models it is not supported: {reason}"
        for name, reason in _WITH_ONE
        if name in given and given[name].texts not in _ASKS_FOR_NOTHING
    ]
    return found + [
        f"{given[name].label} is {' '.join(given[name].texts)}, and there are several models; give it to one of "
        "them, in the section models of a config file"
        for name in _OF_ONE
        if name in given and not _is_of_all(name, given[name])
    ]


def _is_of_all(name: str, given: Given) -> bool:
    """Return whether a value suits all models, as speculation without a draft model or head does."""
    return name == "speculative_config" and all('"model"' not in text for text in given.texts)


def _repeated(models: list[ModelSettings]) -> list[str]:
    names = [name for model in models for name in (*model.names, *model.adapters)]
    return [f"two models are called {name!r}; give one of them another name" for name in _twice(names)]


def _twice(names: list[str]) -> list[str]:
    return sorted({name for name in names if names.count(name) > 1})


def _unknown_preloads(findings: Findings, models: list[ModelSettings]) -> list[str]:
    if (given := findings.given.get("models_preload")) is None:
        return []
    known = [name for model in models for name in model.names]
    return [
        f"{given.label} has {name!r}, which is no model; models: {', '.join(known)}"
        for name in given.texts
        if name not in known
    ]
