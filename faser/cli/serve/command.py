"""`faser serve [MODEL]`: reads and checks the settings, takes the port, and starts the server.

Reports every error in the settings before it loads anything: first flags, then the port, then the model's
files. Imports server.py last, so that help and errors appear at once.
"""

import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from faser.cli.flags.help import help_text
from faser.cli.flags.parser import parse
from faser.cli.flags.sources import SETTINGS, Findings, UsageError, add_environment, add_file, settle
from faser.cli.serve.listener import listen
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
    keys = api_keys(server_config)
    with listen(server_config.host, server_config.port) as listener:
        from faser.cli.serve.server import serve_on

        return serve_on(listener, engine_config, server_config, keys, began_s)


def _configs(findings: Findings) -> tuple[EngineConfig, ServerConfig]:
    engine_config, server_config = settle(findings, (EngineConfig, ServerConfig))
    for warning in cast(EngineConfig, engine_config).speculation_warnings:
        findings.warnings.append(f"--speculative-config: {warning}")
    return cast(EngineConfig, engine_config), cast(ServerConfig, server_config)


def api_keys(config: ServerConfig) -> tuple[str, ...]:
    """All keys that requests may present. Raises UsageError for a key file without keys."""
    if config.api_key_file is None:
        return config.api_key
    lines = Path(config.api_key_file).read_text(encoding="utf-8").splitlines()
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        raise UsageError([f"--api-key-file is {config.api_key_file}; it contains no key"])
    return config.api_key + keys


def _start_logging(level: str) -> None:
    logging.basicConfig(level=level.upper(), format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    if level != "debug":
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        logging.getLogger("httpx").setLevel(logging.WARNING)
