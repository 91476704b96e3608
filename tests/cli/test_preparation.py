"""What a server checks before it loads anything: keys, the port, certificates, the tracer.

Oracle of certificates that can be used: OpenSSL.
"""

import socket
import ssl
import subprocess
import sys
import threading
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from faser.cli import preparation as tracing
from faser.cli.preparation import check_certificate, listen, open_tracer, read_api_keys, reload_certificate
from faser.config.declaration import flag_label
from faser.config.server import ServerConfig
from faser.config.sources import UsageError
from faser.errors import ConfigError
from tests.cli.certificates import ENCRYPTED_KEY, ONE, TWO
from tests.waiting import PATIENCE_S


def keys_of(folder: Path, content: bytes, *flags: str) -> tuple[str, ...]:
    path = folder / "keys.txt"
    path.write_bytes(content)
    return read_api_keys(ServerConfig(api_key=flags, api_key_file=str(path)))


def test_flags_and_file_add_up_and_spaces_around_a_line_are_dropped(tmp_path: Path) -> None:
    assert keys_of(tmp_path, b"one\n\n  two \r\ndr\xc3\xa9i\n", "flag") == ("flag", "one", "two", "dréi")


@pytest.mark.parametrize(
    "content, problem",
    [
        (b"", "it contains no key"),
        (b" \n\n", "it contains no key"),
        (b"ok\n\xff\xfe\n", "it is not UTF-8: invalid start byte"),
        (b"ok\nhalf\x00way\n", "line 2: it has a character that is not printable, and no client could present it"),
    ],
)
def test_a_file_without_usable_keys_is_refused_in_one_line(tmp_path: Path, content: bytes, problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        keys_of(tmp_path, content)
    assert str(caught.value) == f"--api-key-file is {tmp_path / 'keys.txt'}; {problem}"


def test_a_file_that_has_gone_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.txt"
    path.write_text("one")
    config = ServerConfig(api_key_file=str(path))
    path.unlink()
    with pytest.raises(UsageError, match="it cannot be read: No such file or directory"):
        read_api_keys(config)


def test_port_0_is_any_free_one() -> None:
    with listen("127.0.0.1", 0) as listener:
        assert listener.getsockname()[1] > 0


def test_a_second_server_on_a_port_is_refused_before_it_loads_anything() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            listen("127.0.0.1", port)
    assert str(caught.value) == (
        f"--port is {port}; 127.0.0.1:{port} cannot be used: Address already in use; stop the program that uses "
        f"it, or choose another port, such as --port {port + 1}"
    )


def test_a_port_is_free_again_right_after_a_connection_ended() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        served, _ = listener.accept()
        served.close()
        client.close()
    listen("127.0.0.1", port).close()


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host"])
def test_an_address_that_is_not_ours_is_named_and_the_port_is_not_blamed(host: str) -> None:
    with pytest.raises(ConfigError, match=f"--host is {host}; it must be an address of this machine") as caught:
        listen(host, 8123)
    assert "--port" not in str(caught.value)


def config(folder: Path, certificate: str, key: str) -> ServerConfig:
    files = folder / "cert.pem", folder / "key.pem"
    for file, content in zip(files, (certificate, key), strict=True):
        file.write_text(content)
    return ServerConfig(ssl_certfile=str(files[0]), ssl_keyfile=str(files[1]))


def presented(context: ssl.SSLContext) -> bytes:
    """The certificate, in DER form, that a client is shown."""
    ours, theirs = socket.socketpair()

    def serve() -> None:
        with context.wrap_socket(theirs, server_side=True) as connection:
            connection.recv(1)

    thread = threading.Thread(target=serve)
    thread.start()
    client = ssl.create_default_context()
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    with client.wrap_socket(ours, server_hostname="localhost") as connection:
        shown = connection.getpeercert(binary_form=True)
        connection.sendall(b"x")
    thread.join(PATIENCE_S)
    assert shown is not None
    return shown


def test_a_certificate_with_its_key_is_accepted(tmp_path: Path) -> None:
    check_certificate(config(tmp_path, ONE.certificate, ONE.key))
    check_certificate(ServerConfig())


@pytest.mark.parametrize(
    "certificate, key, problem",
    [
        ("nothing", ONE.key, "--ssl-certfile is {0}; it must hold a certificate in PEM form: "),
        ("", ONE.key, "--ssl-certfile is {0}; it must hold a certificate in PEM form: "),
        (ONE.key, ONE.key, "--ssl-certfile is {0}; it must hold a certificate in PEM form: "),
        (ONE.certificate[:300], ONE.key, "--ssl-certfile is {0}; it must hold a certificate in PEM form: "),
        (ONE.certificate, "nothing", "--ssl-keyfile is {1}; it must hold a private key in PEM form: "),
        (ONE.certificate, ONE.certificate, "--ssl-keyfile is {1}; it must hold a private key in PEM form: "),
        (ONE.certificate, TWO.key, "--ssl-keyfile is {1}; it is not the key of the certificate in {0}"),
        (ONE.certificate, ENCRYPTED_KEY, "--ssl-keyfile is {1}; it is encrypted; it must need no password"),
    ],
)
def test_files_that_cannot_serve_are_named(tmp_path: Path, certificate: str, key: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_certificate(config(tmp_path, certificate, key))
    message = str(caught.value)
    assert message.startswith(problem.format(tmp_path / "cert.pem", tmp_path / "key.pem"))
    assert "\n" not in message
    assert ".c:" not in message


def test_new_connections_get_the_reloaded_certificate(tmp_path: Path) -> None:
    first = config(tmp_path, ONE.certificate, ONE.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    assert presented(context) == ssl.PEM_cert_to_DER_cert(ONE.certificate)
    config(tmp_path, TWO.certificate, TWO.key)
    reload_certificate(context, first)
    assert presented(context) == ssl.PEM_cert_to_DER_cert(TWO.certificate)


@pytest.mark.parametrize("certificate, key", [(TWO.certificate, ONE.key), ("", TWO.key), (TWO.certificate, "")])
def test_files_that_cannot_be_used_leave_the_certificate_as_it_was(
    tmp_path: Path, certificate: str, key: str
) -> None:
    first = config(tmp_path, ONE.certificate, ONE.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    config(tmp_path, certificate, key)
    with pytest.raises(ConfigError):
        reload_certificate(context, first)
    assert presented(context) == ssl.PEM_cert_to_DER_cert(ONE.certificate)


def test_the_server_says_so_before_it_looks_for_a_model(tmp_path: Path) -> None:
    bad = config(tmp_path, "nothing", "nothing")
    flags = ["--ssl-certfile", str(bad.ssl_certfile), "--ssl-keyfile", str(bad.ssl_keyfile), "--port", "0"]
    done = subprocess.run(
        [sys.executable, "-m", "faser", "serve", str(tmp_path / "no-such-model"), *flags],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"faser serve: --ssl-certfile is {bad.ssl_certfile}; it must hold a certificate")


URL = "http://127.0.0.1:9/v1/traces"


def test_without_the_flag_nothing_of_the_sdk_is_imported() -> None:
    """FastAPI itself imports OpenTelemetry's API, which does nothing without an SDK."""
    program = (
        "import sys\n"
        "from faser.cli.serve import open_tracer\n"
        "import faser.cli.server\n"
        "from faser.config.declaration import flag_label\n"
        "from faser.config.server import ServerConfig\n"
        "assert open_tracer(ServerConfig(), flag_label) is None\n"
        "parts = ('opentelemetry.sdk', 'opentelemetry.exporter', 'google.protobuf', 'requests')\n"
        "print([name for name in sys.modules if name.startswith(parts)])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_flag_needs_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> ModuleSpec | None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(tracing, "find_spec", missing)
    with pytest.raises(ConfigError) as caught:
        open_tracer(ServerConfig(otlp_traces_endpoint=URL), flag_label)
    assert str(caught.value) == (
        f"--otlp-traces-endpoint is {URL}; it needs OpenTelemetry, which is missing: pip install 'faser[otel]'"
    )


def test_another_protocol_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL is grpc; spans are sent as http/protobuf"):
        open_tracer(ServerConfig(otlp_traces_endpoint=URL), flag_label)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    tracer = open_tracer(ServerConfig(otlp_traces_endpoint=URL), flag_label)
    assert tracer is not None
    tracer.close(1.0)
