"""`faser serve [MODEL]`: reads and checks the settings, takes the port, and starts the server.

Reports every error in the settings before it loads anything: first flags and the files that they name, then the
port, then the model's files. Starts the engine's process as soon as the settings are known to be sound: both
processes import for seconds, at the same time. Imports server.py last, so that help and errors appear at once.
"""

import logging
import sys
import time
from collections.abc import Sequence
from typing import cast

from faser.cli.flags.help import help_text
from faser.cli.flags.parser import parse
from faser.cli.flags.sources import SETTINGS, Findings, UsageError, add_environment, add_file, settle
from faser.cli.serve.keys import read_api_keys
from faser.cli.serve.listener import listen
from faser.cli.serve.notices import failed, notice
from faser.cli.serve.text_file import read_text
from faser.cli.serve.tls import check_certificate
from faser.cli.serve.tracing import FLUSH_TIMEOUT_S, open_tracer
from faser.config.checks import Label, find_problems
from faser.config.declaration import settings_of
from faser.config.engine import EngineConfig
from faser.config.server import ServerConfig
from faser.engine.client.engine_host import LaunchedEngine, launch
from faser.errors import FaserError, ModelError
from faser.logs.setup import FRONT_END, start_logging
from faser.machine import may_have_gpu
from faser.processes import exit_on_sigterm

PROG = "faser serve"

SYNTHETIC_BANNER = """\
********************************************************************************
** SYNTHETIC ACCEPTANCE: drafts are accepted by given rates, not by the model.**
** Answers are not the model's. For measuring costs only.                     **
********************************************************************************"""


def serve(arguments: Sequence[str]) -> int:
    """Serve until a signal; returns the exit status. Raises ConfigError if the server cannot start."""
    began_s = time.monotonic()
    parsed = parse(PROG, arguments, SETTINGS)
    if parsed.topic is not None:
        print(help_text(PROG, parsed.topic, SETTINGS))
        return 0
    add_environment(parsed.findings, SETTINGS)
    if parsed.config_file is not None:
        add_file(parsed.findings, parsed.config_file, SETTINGS)
    engine_config, server_config = _configs(parsed.findings)
    _start_logging(server_config)
    for warning in parsed.findings.warnings:
        notice(f"warning: {warning}", logging.WARNING)
    if engine_config.speculation.synthetic:
        _warn_of_synthetic_acceptance(server_config)
    try:
        return _listen_and_serve(engine_config, server_config, parsed.findings.label, began_s)
    except FaserError as error:
        return failed(error)


def _listen_and_serve(
    engine_config: EngineConfig, server_config: ServerConfig, label: Label, began_s: float
) -> int:
    keys = read_api_keys(server_config, label)
    chat_template = read_chat_template(server_config.chat_template, label("chat_template"))
    check_certificate(server_config, label)
    with exit_on_sigterm(0), listen(server_config.host, server_config.port, label) as listener:
        tracer = open_tracer(server_config, label)
        launched = _launched()
        try:
            from faser.cli.serve.server import serve_on

            return serve_on(
                listener, engine_config, server_config, label, keys, chat_template, began_s, launched, tracer
            )
        finally:
            if launched is not None:
                launched.discard()
            if tracer is not None:
                tracer.close(FLUSH_TIMEOUT_S)


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
    engine_config, server_config = settle(findings, (EngineConfig, ServerConfig))
    if not may_have_gpu() and (
        problems := problems_without_gpu(cast(EngineConfig, engine_config), findings.label)
    ):
        raise UsageError(problems)
    for warning in cast(EngineConfig, engine_config).speculation_warnings:
        findings.warnings.append(f"{findings.label('speculative_config')}: {warning}")
    return cast(EngineConfig, engine_config), cast(ServerConfig, server_config)


def problems_without_gpu(config: EngineConfig, label: Label) -> list[str]:
    """What needs a GPU, on a machine without one. The engine would find it too, after the model was fetched."""
    if config.on_gpu:
        return [f"{label('device')} is {config.device}; this machine has no GPU"]
    values = {each.name: getattr(config, each.name) for each in settings_of(EngineConfig)} | {"device": "cpu"}

    def named(name: str) -> str:
        return "the device" if name == "device" and config.device == "auto" else label(name)

    return find_problems(EngineConfig, values, named)


def read_chat_template(path: str | None, named: str) -> str | None:
    """The template in the file. named: what messages call it. Raises UsageError if it does not compile."""
    if path is None:
        return None
    from faser.api.requests.chat_template import ChatTemplate

    source = read_text(named, path)
    try:
        ChatTemplate(source, bos_token=None, eos_token=None)
    except ModelError as error:
        raise UsageError([f"{named} is {path}; {error}"]) from None
    return source


def _start_logging(config: ServerConfig) -> None:
    start_logging(config.log_level, config.log_format, FRONT_END)
    if config.log_level != "debug":
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        logging.getLogger("httpx").setLevel(logging.WARNING)
