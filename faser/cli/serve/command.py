"""`faser serve [MODEL]`: reads and checks the settings, takes the port, and starts the server.

Reports every error in the settings before it loads anything: first flags and the files that they name, then the
port, then the model's files. Imports server.py last, so that help and errors appear at once.
"""

import logging
import sys
import time
from collections.abc import Sequence
from typing import cast

from faser.cli.flags.help import help_text
from faser.cli.flags.parser import parse
from faser.cli.flags.sources import SETTINGS, Findings, add_environment, add_file, settle
from faser.cli.serve.keys import read_api_keys
from faser.cli.serve.listener import listen
from faser.cli.serve.tls import check_certificate
from faser.config.engine import EngineConfig
from faser.config.server import ServerConfig

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
    for warning in parsed.findings.warnings:
        print(f"{PROG}: warning: {warning}", file=sys.stderr)
    if engine_config.speculation.synthetic:
        print(SYNTHETIC_BANNER, file=sys.stderr)
    _start_logging(server_config.log_level)
    keys = read_api_keys(server_config)
    check_certificate(server_config)
    with listen(server_config.host, server_config.port) as listener:
        from faser.cli.serve.server import serve_on

        return serve_on(listener, engine_config, server_config, keys, began_s)


def _configs(findings: Findings) -> tuple[EngineConfig, ServerConfig]:
    engine_config, server_config = settle(findings, (EngineConfig, ServerConfig))
    for warning in cast(EngineConfig, engine_config).speculation_warnings:
        findings.warnings.append(f"--speculative-config: {warning}")
    return cast(EngineConfig, engine_config), cast(ServerConfig, server_config)


def _start_logging(level: str) -> None:
    logging.basicConfig(level=level.upper(), format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    if level != "debug":
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        logging.getLogger("httpx").setLevel(logging.WARNING)
