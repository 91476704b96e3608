"""`faser serve [MODEL]`: reads and checks the settings, takes the port, and starts the server.

Reports every error in the settings before it loads anything: first flags and the files that they name, then the
port, then the model's files. Starts the engine's process as soon as the settings are known to be sound: both
processes import for seconds, at the same time. Imports server.py last, so that help and errors appear at once.
"""

import logging
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NoReturn

from faser.cli.preparation import (
    FLUSH_TIMEOUT_S,
    check_certificate,
    failed,
    listen,
    notice,
    open_tracer,
    read_api_keys,
    read_chat_template,
)
from faser.config.declaration import Label, find_problems, settings_of
from faser.config.engine import EngineConfig
from faser.config.environment import child_environment, rank_place
from faser.config.help import help_text
from faser.config.kv_events import shared_ports
from faser.config.server import ServerConfig
from faser.config.several_models import ModelSettings, settings_of_models
from faser.config.sources import SETTINGS, Findings, UsageError, parse, server_settings
from faser.engine.client.engine_host import LaunchedEngine, launch
from faser.errors import FaserError
from faser.logs import FRONT_END, start_logging
from faser.machine import may_have_gpu
from faser.processes import exit_on_sigterm, python_command

PROG = "faser serve"

SYNTHETIC_BANNER = """\
********************************************************************************
** SYNTHETIC ACCEPTANCE: drafts are accepted by given rates, not by the model.**
** Answers are not the model's. For measuring costs only.                     **
********************************************************************************"""


def serve(arguments: Sequence[str]) -> int:
    """Serve until a signal; returns the exit status. Raises ConfigError if the server cannot start."""
    began_s = time.monotonic()
    findings = parse(PROG, arguments, SETTINGS)
    if findings.topic is not None:
        print(help_text(PROG, findings.topic, SETTINGS))
        return 0
    engine_config, server_config = _configs(findings)
    models = _several_models(findings, server_config)
    place = rank_place()
    if place is not None and place.rank:
        _follow(server_config)
    _start_logging(server_config)
    for warning in findings.warnings:
        notice(f"warning: {warning}", logging.WARNING)
    if engine_config.speculation.synthetic:
        _warn_of_synthetic_acceptance(server_config)
    try:
        if models:
            return _listen_and_serve_several(models, server_config, findings.label, began_s)
        return _listen_and_serve(engine_config, server_config, findings.label, began_s)
    except FaserError as error:
        return failed(error)


def _follow(config: ServerConfig) -> NoReturn:
    """Become a rank of the model that the first one serves. It says what to load."""
    module = "faser.engine.execution.startup.follower"
    command = python_command(module, config.log_level.upper(), config.log_format)
    os.execve(command[0], command, child_environment())


def _listen_and_serve(
    engine_config: EngineConfig, server_config: ServerConfig, label: Label, began_s: float
) -> int:
    keys = read_api_keys(server_config, label)
    chat_template = read_chat_template(server_config.chat_template, label("chat_template"))
    check_certificate(server_config, label)
    with (
        exit_on_sigterm(0),
        listen(server_config.host, server_config.port, label) as listener,
        _replica_listeners(server_config, label) as replica_listeners,
    ):
        tracer = open_tracer(server_config, label)
        launched = _launched() if server_config.data_parallel_size == 1 else None
        try:
            from faser.cli.server import serve_on

            return serve_on(
                listener,
                engine_config,
                server_config,
                label,
                keys,
                chat_template,
                began_s,
                launched,
                tracer,
                replica_listeners,
            )
        finally:
            if launched is not None:
                launched.discard()
            if tracer is not None:
                tracer.close(FLUSH_TIMEOUT_S)


def _several_models(findings: Findings, config: ServerConfig) -> list[ModelSettings]:
    """The settings of each of several models; none: there is one model. Raises ConfigError."""
    if not findings.models and config.models_dir is None:
        return []
    from faser.cli.model_source import models_in

    if rank_place() is not None:
        raise UsageError(
            ["several models cannot be served by ranks that torchrun starts; start faser serve alone"]
        )
    found = {} if config.models_dir is None else models_in(Path(config.models_dir), findings.label("models_dir"))
    models = settings_of_models(findings, found)
    if not may_have_gpu():
        problems = [each for model in models for each in problems_without_gpu(model.engine, model.label)]
        if problems:
            raise UsageError(list(dict.fromkeys(problems)))
    return models


def _listen_and_serve_several(
    models: Sequence[ModelSettings], config: ServerConfig, label: Label, began_s: float
) -> int:
    keys = read_api_keys(config, label)
    templates = {
        model.names[0]: read_chat_template(model.server.chat_template, model.label("chat_template"))
        for model in models
    }
    check_certificate(config, label)
    with exit_on_sigterm(0), listen(config.host, config.port, label) as listener:
        tracer = open_tracer(config, label)
        try:
            from faser.cli.models_server import serve_models_on

            return serve_models_on(listener, models, config, label, keys, templates, began_s, tracer)
        finally:
            if tracer is not None:
                tracer.close(FLUSH_TIMEOUT_S)


@contextmanager
def _replica_listeners(config: ServerConfig, label: Label) -> Iterator[list[socket.socket]]:
    """Sockets of the single engines, where these have ports of their own. Raises ConfigError as listen does."""
    first, count = config.data_parallel_first_port, config.data_parallel_size
    with ExitStack() as stack:
        ports = () if first is None or count == 1 else range(first, first + count)
        yield [stack.enter_context(listen(config.host, port, label)) for port in ports]


def _launched() -> LaunchedEngine | None:
    """The engine's process, which imports while this one does. None: none starts; the supervisor says why."""
    try:
        return launch("process")
    except OSError:
        return None


def _warn_of_synthetic_acceptance(config: ServerConfig) -> None:
    if config.log_format == "json":
        notice("synthetic acceptance: answers are not the model's; for measuring costs only", logging.WARNING)
    else:
        print(SYNTHETIC_BANNER, file=sys.stderr)


def _configs(findings: Findings) -> tuple[EngineConfig, ServerConfig]:
    engine_config, server_config = server_settings(findings, several=True)
    if not may_have_gpu() and (problems := problems_without_gpu(engine_config, findings.label)):
        raise UsageError(problems)
    if problem := shared_ports(engine_config.kv_events_config, server_config.data_parallel_size):
        raise UsageError([f"{findings.label('kv_events_config')}: {problem}"])
    for warning in engine_config.speculation_warnings:
        findings.warnings.append(f"{findings.label('speculative_config')}: {warning}")
    return engine_config, server_config


def problems_without_gpu(config: EngineConfig, label: Label) -> list[str]:
    """Return the settings that need a GPU on a machine without one, before the model is fetched."""
    if config.on_gpu:
        return [f"{label('device')} is {config.device}; this machine has no GPU"]
    values = {each.name: getattr(config, each.name) for each in settings_of(EngineConfig)} | {"device": "cpu"}

    def named(name: str) -> str:
        return "the device" if name == "device" and config.device == "auto" else label(name)

    return find_problems(EngineConfig, values, named)


def _start_logging(config: ServerConfig) -> None:
    start_logging(config.log_level, config.log_format, FRONT_END)
    if config.log_level != "debug":
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        logging.getLogger("httpx").setLevel(logging.WARNING)
