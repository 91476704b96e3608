"""Checks and openings before anything is loaded, and the messages about them for the operator.

Files with a template, keys or a certificate; the port, so that one in use is reported at once; the tracer.
Messages are plain text, or lines of the log where that is JSON. Imports nothing heavy: errors appear at once.
"""

import errno
import logging
import socket
import ssl
import sys
from importlib.util import find_spec
from pathlib import Path

from faser import __version__
from faser.config.declaration import Label, flag_label
from faser.config.environment import traces_protocol
from faser.config.server import ServerConfig, key_problems
from faser.config.sources import UsageError
from faser.errors import ConfigError, FaserError, ModelError
from faser.logs import log_format
from faser.tracing import Tracer

_PROG = "faser serve"
_log = logging.getLogger("faser.serve")

# After the last answer. Spans are sent every few seconds, so few are left; supervisors wait 5 s longer than the
# drain before they kill.
FLUSH_TIMEOUT_S = 2.0
_NEEDED = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")
_PROTOCOL = "http/protobuf"


def read_text(named: str, path: str) -> str:
    """The text in a file. named: what messages call the setting.

    Raises UsageError for a file that is not UTF-8 or cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError([f"{named} is {path}; it is not UTF-8: {error.reason}"]) from None
    except OSError as error:
        raise UsageError([f"{named} is {path}; it cannot be read: {error.strerror}"]) from None


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


def read_api_keys(config: ServerConfig, label: Label = flag_label) -> tuple[str, ...]:
    """All keys that requests may present; spaces around those in the file are dropped.

    label: what messages call a setting.
    Raises UsageError for a key file that cannot be read, has no key, or has one that no client can present.
    """
    path = config.api_key_file
    if path is None:
        return config.api_key
    named = label("api_key_file")
    lines = [line.strip() for line in read_text(named, path).splitlines()]
    if not any(lines):
        raise UsageError([f"{named} is {path}; it contains no key"])
    for number, line in enumerate(lines, start=1):
        if problems := key_problems([line]):
            raise UsageError([f"{named} is {path}; line {number}: {problems[0]}"])
    return config.api_key + tuple(line for line in lines if line)


def check_certificate(config: ServerConfig, label: Label = flag_label) -> None:
    """Raises ConfigError, in one line, for files with which no connection could be served.

    label: what messages call a setting.
    """
    if config.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(config.ssl_certfile)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"{label('ssl_certfile')} is {config.ssl_certfile}; it must hold a certificate in PEM form: "
            f"{_reason(error)}"
        ) from None
    _load(context, config, label)


def reload_certificate(context: ssl.SSLContext, config: ServerConfig, label: Label = flag_label) -> None:
    """Use what the files hold now for new connections; those that are open go on as they are.

    Raises ConfigError for files that cannot be used; then the context is as it was.
    """
    check_certificate(config, label)
    _load(context, config, label)


def _load(context: ssl.SSLContext, config: ServerConfig, label: Label) -> None:
    assert config.ssl_certfile is not None
    assert config.ssl_keyfile is not None
    named = f"{label('ssl_keyfile')} is {config.ssl_keyfile}"

    def refuse_password() -> str:
        raise ConfigError(f"{named}; it is encrypted; it must need no password")

    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, refuse_password)
    except (ssl.SSLError, OSError) as error:
        if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
            problem = f"it is not the key of the certificate in {config.ssl_certfile}"
        else:
            problem = f"it must hold a private key in PEM form: {_reason(error)}"
        raise ConfigError(f"{named}; {problem}") from None


def _reason(error: OSError) -> str:
    """Return what went wrong, without the places in OpenSSL's sources."""
    if isinstance(error, ssl.SSLError):
        return (error.reason or "no such thing is in it").replace("_", " ").lower()
    return error.strerror or type(error).__name__


def listen(host: str, port: int, label: Label = flag_label) -> socket.socket:
    """A socket bound to host and port; connections queue until the server accepts them.

    label: what messages call a setting.
    Raises ConfigError: the port is in use or needs privileges, or the address is not of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(
            f"{label('host')} is {host}; it must be an address of this machine: {error.strerror}"
        ) from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(1)  # makes a second server on this port fail now; the server sets the real backlog
    except OSError as error:
        listener.close()
        raise ConfigError(_problem(host, port, label, error)) from None
    return listener


def _problem(host: str, port: int, label: Label, error: OSError) -> str:
    """Return which setting is wrong, and what to give instead."""
    match error.errno:
        case errno.EADDRNOTAVAIL:
            named = f"{label('host')} is {host}"
            return f"{named}; it must be an address of this machine, such as 127.0.0.1 or 0.0.0.0 for all"
        case errno.EADDRINUSE:
            other = port + 1 if port < 65535 else port - 1
            advice = f"stop the program that uses it, or choose another port, such as --port {other}"
        case errno.EACCES:
            advice = "choose a port from 1024 on, such as --port 8000"
        case _:
            advice = "choose another one with --port"
    return f"{label('port')} is {port}; {host}:{port} cannot be used: {error.strerror}; {advice}"


def open_tracer(config: ServerConfig, label: Label) -> Tracer | None:
    """None: no traces are asked for. label: what messages call a setting.

    Raises ConfigError if the packages are missing, or if the environment asks for another protocol.
    """
    endpoint = config.otlp_traces_endpoint
    if endpoint is None:
        return None
    named = f"{label('otlp_traces_endpoint')} is {endpoint}"
    if not all(map(_is_there, _NEEDED)):
        raise ConfigError(f"{named}; it needs OpenTelemetry, which is missing: pip install 'faser[otel]'")
    variable, protocol = traces_protocol()
    if protocol not in (None, _PROTOCOL):
        raise ConfigError(f"{variable} is {protocol}; spans are sent as {_PROTOCOL} only, mostly to port 4318")
    from faser.tracing_sdk import OpenTelemetryTracer

    return OpenTelemetryTracer(endpoint, version=__version__)


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def notice(text: str, level: int = logging.INFO, *, to_stdout: bool = False) -> None:
    """text: one line. to_stdout: where plain text goes; else to standard error."""
    if log_format() == "json":
        _log.log(level, "%s", text)
        return
    print(f"{_PROG}: {text}", file=sys.stdout if to_stdout else sys.stderr, flush=True)


def progress_line(text: str) -> None:
    """One line about a stage of the start."""
    if log_format() == "json":
        _log.info("%s", text)
    else:
        print(text, file=sys.stderr, flush=True)


def failed(error: FaserError) -> int:
    """The exit status of an error that has been logged here. Raises it instead where the log is plain text."""
    if log_format() == "text":
        raise error
    for problem in getattr(error, "problems", None) or [str(error)]:
        notice(problem, logging.CRITICAL)
    return 2 if isinstance(error, ConfigError) else 1
