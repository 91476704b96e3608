"""ServerConfig: every setting of the HTTP server, each declared once. Checked when it is built, then frozen."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from faser.config.adapters import AdapterModule, module_problems, read_module
from faser.config.declaration import MODEL, OUTPUT, SERVER, Kind, Label, raise_problems, setting
from faser.errors import RequestError
from faser.types.sampling import SAMPLING_DEFAULTS, SamplingParams

_LAST_PORT = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """All settings of the HTTP server. Raises ConfigError that names every problem in one line."""

    host: str = setting(SERVER, Kind.TEXT, "127.0.0.1", "Address to listen on.", metavar="address", common=True)
    port: int = setting(
        SERVER, Kind.INTEGER, 8000, "Port to listen on. 0: any free port.", low=0, high=65535, common=True
    )
    data_parallel_size: int = setting(
        SERVER,
        Kind.COUNT,
        1,
        "Number of engines that each hold the whole model. A request goes to the engine that has seen the "
        "beginning of its prompt, else to the least busy one. On a CPU each has its share of the cores, on GPUs "
        "a device.",
        aliases=("-dp",),
        low=1,
        high=64,
    )
    data_parallel_first_port: int | None = setting(
        SERVER,
        Kind.INTEGER,
        None,
        "Port that reaches the first engine alone, for routers that choose an engine; those of the others "
        "follow. Default: all are reached through --port only.",
        low=1,
        high=65535,
    )
    served_model_name: tuple[str, ...] = setting(
        MODEL,
        Kind.TEXTS,
        (),
        "Model names accepted in requests; the first is returned in responses. Default: the model's own name.",
        aliases=("--alias", "-a"),
        one_flag_many=True,
        common=True,
    )
    lora_modules: tuple[str, ...] = setting(
        MODEL,
        Kind.TEXTS,
        (),
        "LoRA adapters to serve, each as name=path, or as JSON with name, path and base_model_name: a folder in "
        "PEFT's format, a GGUF file or a hub id. A request that has the name as its model is answered with the "
        "adapter. Implies --enable-lora. Default: none.",
        metavar="name=path",
        one_flag_many=True,
    )
    allow_runtime_lora_updating: bool = setting(
        SERVER,
        Kind.SWITCH,
        False,
        "Let clients load and unload LoRA adapters, by POST /v1/load_lora_adapter and /v1/unload_lora_adapter. "
        "Implies --enable-lora. Off: these routes answer 403.",
    )
    lora_dir: str | None = setting(
        SERVER,
        Kind.TEXT,
        None,
        "Folder of the adapters that clients may load: a lora_path is relative to it, and cannot leave it. "
        "Default: a client may name any path and hub id.",
        metavar="folder",
    )
    api_key: tuple[str, ...] = setting(
        SERVER,
        Kind.TEXTS,
        (),
        "API key that requests must have. Can be repeated; in the variable, commas separate several keys. "
        "Default: no key is needed.",
        metavar="key",
        secret=True,
        common=True,
    )
    api_key_file: str | None = setting(
        SERVER,
        Kind.FILE,
        None,
        "File with further keys, one per line; SIGHUP reloads it. Default: none.",
        metavar="file",
    )
    key_max_parallel_requests: int | None = setting(
        SERVER, Kind.COUNT, None, "Maximum number of unfinished requests per API key. Default: no limit.", low=1
    )
    key_rpm_limit: int | None = setting(
        SERVER, Kind.COUNT, None, "Maximum requests per minute and API key. Default: no limit.", low=1
    )
    key_tpm_limit: int | None = setting(
        SERVER,
        Kind.COUNT,
        None,
        "Maximum tokens per minute and API key, prompts and answers together. Default: no limit.",
        low=1,
    )
    share_cache_across_keys: bool = setting(
        SERVER,
        Kind.SWITCH,
        False,
        "Let requests with different API keys reuse each other's prefixes and past answers. "
        "Answers then report neither drafts nor cached tokens.",
    )
    metrics_require_key: bool = setting(SERVER, Kind.SWITCH, False, "Require the API key on /metrics as well.")
    page: bool = setting(
        SERVER,
        Kind.SWITCH,
        True,
        "Serve a web page at / with a chat and a live view of the server. Its files need no API key; its "
        "requests to the server do.",
        aliases=("--webui",),
    )
    root_path: str | None = setting(
        SERVER,
        Kind.TEXT,
        None,
        "URL prefix when behind a proxy, whether or not the proxy strips it. Default: none.",
        metavar="path",
    )
    ssl_keyfile: str | None = setting(
        SERVER,
        Kind.FILE,
        None,
        "Private key for HTTPS; SIGHUP reloads it. Default: plain HTTP.",
        aliases=("--ssl-key-file",),
        metavar="file",
    )
    ssl_certfile: str | None = setting(
        SERVER,
        Kind.FILE,
        None,
        "Certificate for HTTPS; SIGHUP reloads it. Default: plain HTTP.",
        aliases=("--ssl-cert-file",),
        metavar="file",
    )
    allowed_hosts: tuple[str, ...] = setting(
        SERVER,
        Kind.LIST,
        (),
        "Additional Host names that a server without API keys accepts, such as a proxy's. Can be repeated, or a "
        "JSON list. *.example.org: all names below example.org; *: all names. Default: only what is always "
        "accepted: IP addresses, this machine's name, names without a dot, and names that end in .localhost, "
        ".local, .internal or .home.arpa.",
        metavar="name",
    )
    allowed_origins: tuple[str, ...] = setting(
        SERVER,
        Kind.LIST,
        (),
        "Origins whose web pages may use the server (CORS). Can be repeated, or a JSON list. *: all origins. "
        "Default: none.",
        metavar="origin",
    )
    allowed_methods: tuple[str, ...] = setting(
        SERVER, Kind.LIST, ("*",), "Methods that pages of allowed origins may use.", metavar="method"
    )
    allowed_headers: tuple[str, ...] = setting(
        SERVER, Kind.LIST, ("*",), "Headers that pages of allowed origins may send.", metavar="header"
    )
    allow_credentials: bool = setting(SERVER, Kind.SWITCH, False, "Let pages of allowed origins send cookies.")
    request_timeout: float | None = setting(
        SERVER,
        Kind.NUMBER,
        None,
        "Maximum seconds from a request's arrival to its end; then it is aborted (504). A request may ask for "
        "less. Default: no limit.",
        metavar="seconds",
        low=0,
        above=True,
    )
    max_request_bytes: int = setting(
        SERVER, Kind.BYTES, 32 << 20, "Maximum size of a request's body.", low=1 << 10, high=1 << 32
    )
    responses_store: int | None = setting(
        SERVER,
        Kind.BYTES,
        None,
        "Memory for stored responses, which later requests get by id or continue (previous_response_id). "
        "Default: no response is stored.",
        low=1 << 20,
        high=1 << 40,
    )
    h11_max_incomplete_event_size: int = setting(
        SERVER, Kind.BYTES, 64 << 10, "Maximum size of a request line with its headers.", low=1 << 10, high=1 << 24
    )
    h11_max_header_count: int = setting(
        SERVER, Kind.INTEGER, 256, "Maximum number of headers per request.", low=1, high=1 << 16
    )
    timeout_request_headers: float = setting(
        SERVER,
        Kind.NUMBER,
        10.0,
        "Maximum seconds for the request line and headers to arrive.",
        metavar="seconds",
        low=0,
        above=True,
        high=3600,
    )
    timeout_request_body: float = setting(
        SERVER,
        Kind.NUMBER,
        60.0,
        "Maximum seconds for the body of a request to arrive.",
        metavar="seconds",
        low=0,
        above=True,
        high=3600,
    )
    timeout_keep_alive: float = setting(
        SERVER,
        Kind.NUMBER,
        5.0,
        "Seconds after which an idle connection is closed.",
        metavar="seconds",
        low=0,
        above=True,
        high=3600,
    )
    limit_concurrency: int | None = setting(
        SERVER,
        Kind.COUNT,
        None,
        "Maximum number of open connections. Default: as many as the limit on open files allows.",
        low=8,
        high=1 << 20,
    )
    strict_request_fields: bool = setting(
        SERVER, Kind.SWITCH, False, "Reject requests with unknown fields. Off: such fields are only logged."
    )
    shutdown_timeout: float = setting(
        SERVER,
        Kind.NUMBER,
        25.0,
        "Seconds that running requests get to finish after SIGTERM. 0: they are aborted at once.",
        metavar="seconds",
        low=0,
        high=3600,
    )
    engine_restarts: int = setting(
        SERVER,
        Kind.INTEGER,
        3,
        "Maximum number of engine restarts within ten minutes, after it died or hung. Then the server exits with "
        "status 1.",
        low=0,
        high=1000,
    )
    engine_timeout: float = setting(
        SERVER,
        Kind.NUMBER,
        120.0,
        "Seconds of silence after which the engine counts as hung: its requests fail, and it is killed and "
        "restarted. Must be longer than any step.",
        metavar="seconds",
        low=5,
        high=86400,
    )
    log_level: str = setting(
        SERVER,
        Kind.TEXT,
        "info",
        "Minimum log level.",
        aliases=("--uvicorn-log-level",),
        choices=("debug", "info", "warning", "error", "critical"),
        common=True,
    )
    log_format: str = setting(
        SERVER,
        Kind.TEXT,
        "text",
        "Format of the log. json: each line is a JSON object, progress included.",
        choices=("text", "json"),
    )
    otlp_traces_endpoint: str | None = setting(
        SERVER,
        Kind.TEXT,
        None,
        "URL to which a span of each request is sent, by OTLP over HTTP. Needs the packages of the extra otel. "
        "Default: no spans.",
        metavar="url",
        example="http://127.0.0.1:4318/v1/traces",
    )
    disable_uvicorn_access_log: bool = setting(SERVER, Kind.SWITCH, False, "Do not log a line for each request.")
    record_traffic: str | None = setting(
        SERVER,
        Kind.OUTPUT_FILE,
        None,
        "File to which finished answers are appended, as JSON lines for faser distill --from-traffic. Requests "
        "with a cache_salt, or with store false, are left out. Default: nothing is recorded.",
        metavar="file",
    )
    chat_template: str | None = setting(
        OUTPUT,
        Kind.FILE,
        None,
        "Jinja file that turns messages into a prompt. Default: the model's own.",
        aliases=("--chat-template-file",),
    )
    tool_call_parser: str = setting(
        OUTPUT,
        Kind.TEXT,
        "auto",
        "Format in which the model writes tool calls. auto: as its chat template suggests; "
        "--help=tool-call-parser lists the others.",
        metavar="format",
        choices=(
            "auto",
            "gemma4",
            "glm4",
            "granite",
            "hermes",
            "lfm2",
            "llama3_json",
            "mistral",
            "muse_glimmer",
            "openai",
            "phi4_mini_json",
            "pythonic",
            "qwen3_coder",
        ),
        synonyms=(
            ("llama4_json", "llama3_json"),
            ("llama4_pythonic", "pythonic"),
            ("qwen3_xml", "qwen3_coder"),
            ("qwen", "hermes"),
        ),
    )
    enable_auto_tool_choice: bool = setting(
        OUTPUT, Kind.SWITCH, True, "Accept requests that let the model decide whether it calls a tool."
    )
    reasoning_parser: str = setting(
        OUTPUT,
        Kind.TEXT,
        "auto",
        "How answers are split into reasoning and content. auto: as the chat template suggests. none: they are "
        "not split. qwen3: reasoning is between <think> and </think>. deepseek_r1: <think> may be missing. "
        "openai_gptoss: reasoning is in the channel analysis of the harmony format. muse_glimmer: it is in "
        "messages to=self. gemma4, granite and mistral: it is between the marks of Gemma 4, Granite 3.2 and "
        "Magistral.",
        choices=(
            *("auto", "none", "qwen3", "deepseek_r1", "openai_gptoss", "muse_glimmer", "gemma4", "granite"),
            "mistral",
        ),
    )
    generation_config: str = setting(
        OUTPUT,
        Kind.TEXT,
        "auto",
        "Sampling defaults. auto: those of the model's generation_config.json; for the embedded model, which has "
        "none there, temperature 0; none: those of the OpenAI API.",
        choices=("auto", "none"),
        synonyms=(("vllm", "none"),),
    )
    override_generation_config: Mapping[str, float] | None = setting(
        OUTPUT,
        Kind.JSON,
        None,
        "Sampling defaults that replace the model's. Default: none.",
        example='{"temperature": 0.2}',
    )
    enable_force_include_usage: bool = setting(
        OUTPUT, Kind.SWITCH, False, "End every stream with its usage, whether or not the request asks for it."
    )
    enable_per_request_metrics: bool = setting(
        OUTPUT,
        Kind.SWITCH,
        False,
        "Add the times of a request to the metrics of its answer: queue, first token, mean time per token.",
    )
    shorten_max_tokens: bool = setting(
        OUTPUT,
        Kind.SWITCH,
        False,
        "Lower a max_tokens that exceeds the context to what the prompt leaves, as /v1/messages always does. Off: "
        "other routes reject such a request.",
    )

    def __post_init__(self) -> None:
        raise_problems(self)

    @property
    def adapter_modules(self) -> tuple[AdapterModule, ...]:
        """Return the values of lora_modules."""
        return tuple(map(read_module, self.lora_modules))

    @property
    def needs_lora(self) -> bool:
        """Return whether a setting asks for adapters."""
        return bool(self.lora_modules) or self.allow_runtime_lora_updating

    @staticmethod
    def conflicts(values: Mapping[str, Any], label: Label) -> list[str]:
        """Problems between settings, and those that limits cannot express."""
        found = []
        for one, other in (("ssl_keyfile", "ssl_certfile"), ("ssl_certfile", "ssl_keyfile")):
            if values[one] is not None and values[other] is None:
                found.append(f"{label(one)} is {values[one]}; it needs {label(other)}, which is not set")
        if values["root_path"] is not None and not values["root_path"].startswith("/"):
            found.append(f"{label('root_path')} is {values['root_path']}; it must begin with /")
        found += module_problems(
            values["lora_modules"] or (), values["served_model_name"] or (), label("lora_modules")
        )
        if (folder := values["lora_dir"]) is not None and not Path(folder).is_dir():
            found.append(f"{label('lora_dir')} is {folder}; it must be the path of a folder")
        size = values["data_parallel_size"] or 1
        if (first := values["data_parallel_first_port"]) is not None and first + size - 1 > _LAST_PORT:
            found.append(
                f"{label('data_parallel_first_port')} is {first}; {size} engines need ports up to {_LAST_PORT}"
            )
        found += [f"{label('api_key')} is ***; {problem}" for problem in key_problems(values["api_key"] or ())]
        if not values["api_key"] and values["api_key_file"] is None:
            found += [
                f"{label(limit)} is {values[limit]}; it needs API keys, and there are none"
                for limit in ("key_max_parallel_requests", "key_rpm_limit", "key_tpm_limit")
                if values[limit] is not None
            ]
        if values["record_traffic"] is not None and keeps_keys_apart(values):
            found.append(
                f"{label('record_traffic')} is {values['record_traffic']}; with API keys it needs "
                f"{label('share_cache_across_keys')}: requests of one key are kept from other clients, and "
                "nothing would be recorded"
            )
        found += _host_problems(values["allowed_hosts"] or (), label("allowed_hosts"))
        found += _cors_problems(values, label)
        found += _traces_problems(values["otlp_traces_endpoint"], label("otlp_traces_endpoint"))
        found += sampling_problems(values["override_generation_config"] or {}, label("override_generation_config"))
        return found


GENERATION_KEYS = tuple(SAMPLING_DEFAULTS)


def sampling_problems(values: Mapping[str, Any], label: str) -> list[str]:
    """Sampling defaults have the limits of requests. Files of models call max_tokens max_new_tokens."""
    found = []
    for key, value in values.items():
        name = "max_tokens" if key == "max_new_tokens" else key
        if name not in GENERATION_KEYS:
            found.append(f"{label}: unknown key '{key}'. Known keys: {', '.join(GENERATION_KEYS)}")
            continue
        whole = isinstance(SAMPLING_DEFAULTS[name], int)
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            found.append(f"{label}: {key} is {value!r}; it must be a {'whole ' if whole else ''}number")
            continue
        sampling: dict[str, Any] = {name: value}
        try:
            SamplingParams(**sampling)
        except RequestError as error:
            found.append(f"{label}: {error}")
    return found


def keeps_keys_apart(values: Mapping[str, Any]) -> bool:
    """Return whether there are API keys, each with a namespace of its own."""
    has_keys = bool(values["api_key"]) or values["api_key_file"] is not None
    return has_keys and not values["share_cache_across_keys"]


def key_problems(keys: Iterable[str]) -> list[str]:
    """Return why clients could not present these API keys, one text for each such key."""
    found = []
    for key in keys:
        if key != key.strip():
            found.append("it begins or ends with a space, and no client could present it")
        elif not key.isprintable():
            found.append("it has a character that is not printable, and no client could present it")
    return found


def _traces_problems(endpoint: str | None, named: str) -> list[str]:
    if endpoint is None:
        return []
    try:
        url = urlsplit(endpoint)
        fits = url.scheme in ("http", "https") and url.hostname and url.port != 0
    except ValueError:
        fits = False
    else:
        if url.username is not None or url.query:
            variable = "OTEL_EXPORTER_OTLP_TRACES_HEADERS"
            return [f"{named} has a user or a query; send credentials in the variable {variable}"]
    if not fits:
        return [f"{named} is {endpoint}; it must be a URL such as http://127.0.0.1:4318/v1/traces"]
    if url.path in ("", "/"):  # 4317 is where collectors take gRPC
        port = 4318 if url.port in (None, 4317) else url.port
        usual = f"{url.scheme}://{url.hostname}:{port}/v1/traces"
        return [f"{named} is {endpoint}; it must be a URL with a path, mostly {usual}: spans are sent over HTTP"]
    return []


_HOST = re.compile(r"(\*\.)?[\w-]+(\.[\w-]+)*")


def _host_problems(names: Iterable[str], named: str) -> list[str]:
    return [
        f"{named} has {name}; it must be a name without scheme and port, such as llm.example.org or "
        "*.example.org, or *"
        for name in names
        if name != "*" and not _HOST.fullmatch(name)
    ]


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")  # as browsers send it: without a path


def _cors_problems(values: Mapping[str, Any], label: Label) -> list[str]:
    origins = values["allowed_origins"] or ()
    found = [
        f"{label('allowed_origins')} has {origin}; it must be * or an origin such as https://example.org"
        for origin in origins
        if origin != "*" and not _ORIGIN.fullmatch(origin)
    ]
    found += [
        f"{label(name)} is {' '.join(values[name])}; it needs {label('allowed_origins')}, which is not set"
        for name in ("allowed_methods", "allowed_headers")
        if not origins and values[name] not in (None, ("*",))
    ]
    if values["allow_credentials"] and (not origins or "*" in origins):
        found.append(
            f"{label('allow_credentials')} is true; it needs {label('allowed_origins')} with origins by name: any "
            "page could otherwise act for its visitor"
        )
    return found
