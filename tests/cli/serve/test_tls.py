"""A certificate and its key are tried before anything is loaded, and the file that is wrong is named.

The certificate was made for these tests, with `openssl req -x509`; nothing trusts it.
"""

from pathlib import Path

import pytest

from faser.cli.flags.sources import UsageError
from faser.cli.main import main
from faser.cli.serve.tls import check_certificate
from faser.config.server import ServerConfig

CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBfzCCASWgAwIBAgIUCqB0+UZ2zWh27WEunX4qa9Mvwv0wCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyMjIwMDAyNVoYDzIxMjYxMDI5
MjAwMDI1WjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAAQtAeu3C9o1TrvIdFQYhIWMM+X2YoIvtpem1HrFcXCMb1oYWy5izoPh
nQdSqgy5NZWwGYqAoQX+y+A+KwH1TpsVo1MwUTAdBgNVHQ4EFgQUJqIibrmh5T6H
NVxVeORKEiAFi8QwHwYDVR0jBBgwFoAUJqIibrmh5T6HNVxVeORKEiAFi8QwDwYD
VR0TAQH/BAUwAwEB/zAKBggqhkjOPQQDAgNIADBFAiAyD4/z6bQTFnKu4ioU6NjI
um+pNcbRPM59ny3yFqI+XgIhAO/F7I+tdXM6xAO0l9ybb5J5IazF5UIa4Jksey0y
aiw0
-----END CERTIFICATE-----
"""
KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgM2OGnqE7IYaWJd/o
E2a+dNRH6RbB4xf8MNDvFCZ+OZ+hRANCAAQtAeu3C9o1TrvIdFQYhIWMM+X2YoIv
tpem1HrFcXCMb1oYWy5izoPhnQdSqgy5NZWwGYqAoQX+y+A+KwH1TpsV
-----END PRIVATE KEY-----
"""
OTHER_KEY = """\
-----BEGIN EC PRIVATE KEY-----
MHcCAQEEIB0pyAP1GmK74nm4VJgAEeodmKmpjwYB53y/jvieDZ7AoAoGCCqGSM49
AwEHoUQDQgAEVYMhRHtAlFP3dKUphnXYsv0UQDPaLAslQXIUmYwRztM7OBRNqjzv
WupRkeLcnmh0Mw4uqSjm8Z3cPDKwNEcWYQ==
-----END EC PRIVATE KEY-----
"""
ENCRYPTED_KEY = """\
-----BEGIN EC PRIVATE KEY-----
Proc-Type: 4,ENCRYPTED
DEK-Info: AES-128-CBC,C6F0AE2C2269464971575DF02F90ACEA

4qJoZXpmV4EFTEN3JavTwBPA4ENWqhhp0AkGNHdvy1eq5eGTUe4bdAkAM8wmCo3H
qwXWWjHl9S0HcnIDwc2Fu3LzWN2ObVqKNq/mqYBMB0bxmGW4daC5cHR6ghSmOTC6
ZdbsPBC4ldD9W/rj+f2NHQOWhRfhkBRdRX+BE24KsXs=
-----END EC PRIVATE KEY-----
"""


def config(folder: Path, certificate: str, key: str) -> ServerConfig:
    (folder / "cert.pem").write_text(certificate)
    (folder / "key.pem").write_text(key)
    return ServerConfig(ssl_certfile=str(folder / "cert.pem"), ssl_keyfile=str(folder / "key.pem"))


def test_a_certificate_with_its_key_is_fine(tmp_path: Path) -> None:
    check_certificate(config(tmp_path, CERTIFICATE, KEY))
    check_certificate(ServerConfig())


@pytest.mark.parametrize(
    "certificate, key, flag, problem",
    [
        ("no PEM", KEY, "--ssl-certfile", "cert.pem; it must hold a certificate in PEM form"),
        (KEY, KEY, "--ssl-certfile", "cert.pem; it must hold a certificate in PEM form"),
        (CERTIFICATE, "no PEM", "--ssl-keyfile", "key.pem; it must hold a private key in PEM form"),
        (CERTIFICATE, CERTIFICATE, "--ssl-keyfile", "key.pem; it must hold a private key in PEM form"),
        (CERTIFICATE, ENCRYPTED_KEY, "--ssl-keyfile", "key.pem; it must hold a key without a passphrase"),
        (CERTIFICATE, OTHER_KEY, "--ssl-keyfile", "cert.pem, and holds another"),
    ],
)
def test_the_file_that_is_wrong_is_named(
    tmp_path: Path, certificate: str, key: str, flag: str, problem: str
) -> None:
    with pytest.raises(UsageError) as caught:
        check_certificate(config(tmp_path, certificate, key))
    (line,) = caught.value.problems
    assert line.startswith(f"{flag} is {tmp_path}/")
    assert line.endswith(problem)


def test_a_wrong_certificate_is_one_line_before_the_model_is_looked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = config(tmp_path, "no PEM", KEY)
    flags = ["--ssl-certfile", str(made.ssl_certfile), "--ssl-keyfile", str(made.ssl_keyfile)]
    assert main(["serve", "/no/such/model", "--port", "0", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("faser serve: --ssl-certfile is ")
