"""SIGHUP: the key file and the certificate are read again while the server runs. No connection is closed."""

import logging
import ssl

from faser.api.middleware.keys import ApiKeys
from faser.cli.serve.keys import read_api_keys
from faser.cli.serve.tls import reload_certificate
from faser.config.checks import Label
from faser.config.server import ServerConfig
from faser.errors import ConfigError

_log = logging.getLogger("faser.serve")


def has_files(config: ServerConfig) -> bool:
    """Whether there is anything to read again. If not, SIGHUP ends the server, as it does most programs."""
    return config.api_key_file is not None or config.ssl_certfile is not None


def reload_files(config: ServerConfig, label: Label, keys: ApiKeys, tls: ssl.SSLContext | None) -> None:
    """Use what the files hold now. A file that cannot be used is reported; what it held before stays in use.

    label: what messages call a setting.
    """
    if config.api_key_file is not None:
        try:
            keys.replace(read_api_keys(config, label))
        except ConfigError as error:
            _log.error("SIGHUP: the API keys stay as they are: %s", error)
        else:
            _log.info("SIGHUP: %d API keys are accepted now", len(keys))
    if tls is not None:
        try:
            reload_certificate(tls, config, label)
        except ConfigError as error:
            _log.error("SIGHUP: the certificate stays as it is: %s", error)
        else:
            _log.info("SIGHUP: new connections get the certificate in %s", config.ssl_certfile)
