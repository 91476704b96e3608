"""The certificate and the key of HTTPS: checked before the model is loaded, and read again without a restart."""

import ssl

from faser.config.declaration import Label, flag_label
from faser.config.server import ServerConfig
from faser.errors import ConfigError


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
    """What went wrong, without the places in OpenSSL's sources."""
    if isinstance(error, ssl.SSLError):
        return (error.reason or "no such thing is in it").replace("_", " ").lower()
    return error.strerror or type(error).__name__
