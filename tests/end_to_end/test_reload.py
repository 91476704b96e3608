"""SIGHUP: keys and certificate are replaced while a stream goes on, over the connection that is open."""

import os
import signal
import ssl
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.cli.certificates import ONE, TWO, Certificate
from tests.end_to_end.server import Server, serving
from tests.waiting import until

BODY = {"prompt": "the quick brown fox", "max_tokens": 200, "ignore_eos": True, "stream": True}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    ONE.write(tmp_path)
    (tmp_path / "keys.txt").write_text("old\n")
    return tmp_path


@pytest.fixture
def guarded(tiny_checkpoint: Path, folder: Path, files: Path) -> Iterator[Server]:
    flags = ["--ssl-certfile", str(files / "cert.pem"), "--ssl-keyfile", str(files / "key.pem")]
    with serving(tiny_checkpoint, folder, *flags, "--api-key-file", str(files / "keys.txt")) as server:
        yield server


def status(http: httpx.Client, key: str) -> int:
    return http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code


def presents(server: Server, certificate: Certificate) -> bool:
    """Whether a new connection is shown this certificate."""
    address = urlsplit(server.url)
    assert address.hostname is not None
    assert address.port is not None
    shown = ssl.get_server_certificate((address.hostname, address.port), timeout=10)
    return ssl.PEM_cert_to_DER_cert(shown) == ssl.PEM_cert_to_DER_cert(certificate.certificate)


def hang_up(server: Server, saying: str) -> None:
    """Send SIGHUP to the server and its engine, as a terminal does, and wait until the log says something new."""
    before = server.log.count(saying)
    os.kill(server.engine_process().pid, signal.SIGHUP)
    server.process.send_signal(signal.SIGHUP)
    until(lambda: server.log.count(saying) > before)


def test_keys_and_certificate_are_replaced_and_no_connection_is_dropped(guarded: Server, files: Path) -> None:
    assert guarded.url.startswith("https://")
    assert presents(guarded, ONE)
    with httpx.Client(base_url=guarded.url, verify=False, timeout=60, trust_env=False) as http:
        assert (status(http, "old"), status(http, "new")) == (200, 401)
        headers = {"Authorization": "Bearer old"}
        with http.stream("POST", "/v1/completions", json=BODY, headers=headers) as answer:
            connection = answer.extensions["network_stream"]
            lines = answer.iter_lines()
            next(lines)
            (files / "keys.txt").write_text("new\nnewer\n")
            TWO.write(files)
            hang_up(guarded, "SIGHUP: new connections get the certificate")
            assert "SIGHUP: 2 API keys are accepted now" in guarded.log
            rest = list(lines)
        assert rest[-2:] == ["data: [DONE]", ""] or rest[-1] == "data: [DONE]"
        again = http.get("/v1/models", headers={"Authorization": "Bearer new"})
        assert again.status_code == 200
        assert again.extensions["network_stream"] is connection, "the connection was not kept"
        assert (status(http, "old"), status(http, "newer")) == (401, 200)
    assert presents(guarded, TWO)

    (files / "keys.txt").write_text("\n")
    (files / "key.pem").write_text(ONE.key)
    hang_up(guarded, "SIGHUP: the certificate stays as it is: --ssl-keyfile")
    assert "SIGHUP: the API keys stay as they are: --api-key-file" in guarded.log
    assert presents(guarded, TWO)
    with httpx.Client(base_url=guarded.url, verify=False, timeout=60, trust_env=False) as http:
        assert (status(http, "new"), status(http, "old")) == (200, 401)

    guarded.process.send_signal(signal.SIGTERM)
    assert guarded.wait_end() == 0
