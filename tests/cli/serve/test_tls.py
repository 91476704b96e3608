"""Certificates that cannot be used: one line each, before anything is loaded. Oracle of the good ones: OpenSSL."""

import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from faser.cli.serve.tls import check_certificate, reload_certificate
from faser.config.server import ServerConfig
from faser.errors import ConfigError
from tests.cli.serve.certificates import ENCRYPTED_KEY, ONE, TWO


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
    thread.join(10)
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
