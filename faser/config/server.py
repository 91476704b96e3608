"""ServerConfig: every setting of the HTTP server, each declared once. Checked when it is built, then frozen."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from faser.config.checks import Label, raise_problems, sampling_problems
from faser.config.declaration import Kind, setting
from faser.config.groups import MODEL, OUTPUT, SERVER


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """All settings of the HTTP server. Raises ConfigError that names every problem in one line."""

    host: str = setting(
        "127.0.0.1", "Address to listen on.", group=SERVER, kind=Kind.TEXT, metavar="address", common=True
    )
    port: int = setting(
        8000,
        "Port to listen on. 0: any free one.",
        group=SERVER,
        kind=Kind.INTEGER,
        low=0,
        high=65535,
        common=True,
    )
    served_model_name: tuple[str, ...] = setting(
        (),
        "Names of the model in requests; answers have the first one. Empty: the model's own name.",
        group=MODEL,
        kind=Kind.TEXTS,
        one_flag_many=True,
        common=True,
    )
    api_key: tuple[str, ...] = setting(
        (),
        "API key that requests must have. May be repeated.",
        group=SERVER,
        kind=Kind.TEXTS,
        metavar="key",
        secret=True,
        common=True,
    )
    api_key_file: str | None = setting(
        None, "File with further keys, one a line.", group=SERVER, kind=Kind.FILE, metavar="file"
    )
    metrics_require_key: bool = setting(
        False, "Require the API key on /metrics as well.", group=SERVER, kind=Kind.SWITCH
    )
    root_path: str | None = setting(
        None, "Path under which a proxy serves FASER.", group=SERVER, kind=Kind.TEXT, metavar="path"
    )
    ssl_keyfile: str | None = setting(None, "Private key for HTTPS.", group=SERVER, kind=Kind.FILE, metavar="file")
    ssl_certfile: str | None = setting(
        None, "Certificate for HTTPS.", group=SERVER, kind=Kind.FILE, metavar="file"
    )
    max_request_bytes: int = setting(
        32 << 20,
        "Largest body of a request.",
        group=SERVER,
        kind=Kind.BYTES,
        low=1 << 10,
        high=1 << 32,
    )
    strict_request_fields: bool = setting(
        False,
        "Refuse requests with unknown fields. Off: they are named in the log.",
        group=SERVER,
        kind=Kind.SWITCH,
    )
    shutdown_timeout: float = setting(
        25.0,
        "Seconds that running requests have to finish after SIGTERM. 0: they are aborted at once.",
        group=SERVER,
        kind=Kind.NUMBER,
        metavar="seconds",
        low=0,
        high=3600,
    )
    log_level: str = setting(
        "info",
        "Lowest level of messages that are logged.",
        group=SERVER,
        kind=Kind.TEXT,
        aliases=("--uvicorn-log-level",),
        choices=("debug", "info", "warning", "error", "critical"),
        common=True,
    )
    disable_uvicorn_access_log: bool = setting(
        False, "Do not log a line for each request.", group=SERVER, kind=Kind.SWITCH
    )
    chat_template: str | None = setting(
        None, "Jinja file that turns messages into a prompt. None: the model's.", group=OUTPUT, kind=Kind.FILE
    )
    generation_config: str = setting(
        "auto",
        "Sampling defaults. auto: those of the model's generation_config.json, or else of its model card, which "
        "FASER knows for the embedded model; none: those of the OpenAI API.",
        group=OUTPUT,
        kind=Kind.TEXT,
        choices=("auto", "none"),
        synonyms=(("vllm", "none"),),
    )
    override_generation_config: Mapping[str, float] | None = setting(
        None,
        "Sampling defaults that replace the model's.",
        group=OUTPUT,
        kind=Kind.JSON,
        example='{"temperature": 0.2}',
    )
    enable_force_include_usage: bool = setting(
        False,
        "End every stream with its usage, whether or not the request asks for it.",
        group=OUTPUT,
        kind=Kind.SWITCH,
    )

    def __post_init__(self) -> None:
        raise_problems(self)

    @staticmethod
    def conflicts(values: Mapping[str, Any], label: Label) -> list[str]:
        """Problems between settings, and those that limits cannot express."""
        found = []
        for one, other in (("ssl_keyfile", "ssl_certfile"), ("ssl_certfile", "ssl_keyfile")):
            if values[one] is not None and values[other] is None:
                found.append(f"{label(one)} is {values[one]}; it needs {label(other)}, which is not set")
        if values["root_path"] is not None and not values["root_path"].startswith("/"):
            found.append(f"{label('root_path')} is {values['root_path']}; it must begin with /")
        if any(key != key.strip() or not key.isprintable() for key in values["api_key"] or ()):
            found.append(
                f"{label('api_key')} is ***; it must not begin or end with a space, nor have a line break: no "
                f"request could bring it"
            )
        found += sampling_problems(values["override_generation_config"] or {}, label("override_generation_config"))
        return found
