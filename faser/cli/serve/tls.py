"""Whether the certificate and its key can be used, which is known before anything is loaded."""

import ssl

from faser.cli.flags.sources import UsageError
from faser.config.server import ServerConfig


class _EncryptedKey(Exception):
    """OpenSSL asks for a passphrase."""


def check_certificate(config: ServerConfig) -> None:
    """Raises UsageError that names the file that cannot be used. Without a certificate it does nothing."""
    certificate, key = config.ssl_certfile, config.ssl_keyfile
    if certificate is None or key is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(certificate)
    except ssl.SSLError:
        raise UsageError([f"--ssl-certfile is {certificate}; it must hold a certificate in PEM form"]) from None
    try:
        context.load_cert_chain(certificate, key, password=_refuse)
    except _EncryptedKey:
        raise UsageError([f"--ssl-keyfile is {key}; it must hold a key without a passphrase"]) from None
    except ssl.SSLError as error:
        match error.reason:
            case "KEY_VALUES_MISMATCH":
                problem = f"--ssl-keyfile is {key}; it must hold the key of {certificate}, and holds another"
            case reason if reason is not None and reason.startswith(("EE_", "CA_")):
                problem = (
                    f"--ssl-certfile is {certificate}; OpenSSL refuses it: {reason.lower().replace('_', ' ')}"
                )
            case _:
                problem = f"--ssl-keyfile is {key}; it must hold a private key in PEM form"
        raise UsageError([problem]) from None


def _refuse() -> str:
    raise _EncryptedKey
