"""The parts of a server, made from its settings: the fetched model, the engine, the HTTP application.

Also sampling defaults and the file of recorded answers. `faser run-batch` and replicas on Ray use it too.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI

from faser import __version__
from faser.api.app import create_app
from faser.api.middleware.key_limits import KeyLimits
from faser.api.middleware.keys import SECRET_BYTES, ApiKeys
from faser.api.requests.adapters import Adapters, ReadAdapter, read_modules
from faser.api.requests.service import ApiSettings, CorsSettings
from faser.config.declaration import Label
from faser.config.engine import EngineConfig
from faser.config.environment import cache_dir
from faser.config.kv_events import of_engine
from faser.config.server import GENERATION_KEYS, ServerConfig, sampling_problems
from faser.engine.checkpoints.adapter import read_adapter
from faser.engine.checkpoints.downloads import Downloads
from faser.engine.checkpoints.files import SAMPLING_ADVICE
from faser.engine.checkpoints.source import SMOLLM2_ID, check_source, resolve, resolve_adapter
from faser.engine.client.async_engine import AsyncEngine
from faser.engine.client.engine_host import LaunchedEngine, Place
from faser.engine.client.replicas import Replicas
from faser.engine.client.supervisor import Supervision
from faser.engine.client.traffic import Outcome, TrafficRecorder
from faser.engine.text.tokenizer import load_tokenizer
from faser.errors import ConfigError, ModelError
from faser.files import kept_secret, make_private_folder, parse_json
from faser.machine import core_shares, may_have_gpu
from faser.metrics.replicas import ReplicaMetrics, ServerMetrics
from faser.metrics.server import Metrics
from faser.optional import given, maybe, or_else
from faser.tracing import Tracer
from faser.types.engine import ProgressCallback

T = TypeVar("T")

_EMBEDDED_NAME = "SmolLM2-135M-Instruct"
_MOST_VIEWERS = 32
_FLUSH_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Application:
    """replicas: applications of the single engines, where each is to have a port of its own."""

    engine: AsyncEngine | Replicas
    app: FastAPI
    replicas: tuple[FastAPI, ...] = ()


async def build_application(
    directory: Path,
    engine_config: EngineConfig,
    server_config: ServerConfig,
    keys: ApiKeys,
    chat_template: str | None,
    metrics: ServerMetrics,
    report: ProgressCallback,
    launched: LaunchedEngine | None = None,
    tracer: Tracer | None = None,
    recorder: TrafficRecorder | None = None,
) -> Application:
    """The engine has not been configured.

    directory: of the model. chat_template: replaces the model's. metrics: of make_metrics. report: of the engine's
    start. launched, recorder: as of AsyncEngine. tracer: as of create_app.
    Raises ModelError, and ConfigError where kv_cache_dir cannot be used.
    """
    tokenizer = await asyncio.to_thread(load_tokenizer, Path(engine_config.tokenizer or directory))
    read = adapter_reader(engine_config, report)
    modules = await read_modules(server_config.adapter_modules, read)
    supervision = Supervision(max_restarts=server_config.engine_restarts, timeout_s=server_config.engine_timeout)
    own = metrics.each if isinstance(metrics, ReplicaMetrics) else (metrics,)
    engines = [
        AsyncEngine(
            of_replica(engine_config, number, len(own)),
            directory,
            tokenizer,
            supervision=supervision,
            observer=each,
            on_progress=(lambda *_: None) if number else report,
            launched=None if number else launched,
            recorder=recorder,
            place=place,
            adapters=[adapter for adapter, _ in modules],
        )
        for number, (each, place) in enumerate(
            zip(own, _places(len(own), engine_config.tensor_parallel_size), strict=True)
        )
    ]
    settings = api_settings(directory, engine_config, server_config, keys, chat_template)
    engine = engines[0] if len(engines) == 1 else Replicas(engines)
    adapters = Adapters(
        engine,
        read,
        served_names=settings.served_model_names,
        modules=modules,
        enabled=engine_config.enable_lora,
        folder=maybe(Path, server_config.lora_dir),
    )
    if isinstance(engine, AsyncEngine):
        app = create_app(engine, settings=settings, metrics=metrics, keys=keys, tracer=tracer, adapters=adapters)
        return Application(engine, app)
    apps = (
        create_app(each, settings=settings, metrics=counted, keys=keys, tracer=tracer, adapters=adapters)
        for each, counted in zip(engines, own, strict=True)
    )
    without_page = replace(settings, page=False)  # it shows one engine
    joint = create_app(engine, settings=without_page, metrics=metrics, keys=keys, tracer=tracer, adapters=adapters)
    return Application(engine, joint, tuple(apps) if server_config.data_parallel_first_port else ())


def api_settings(
    directory: Path | None,
    engine_config: EngineConfig,
    server_config: ServerConfig,
    keys: ApiKeys,
    chat_template: str | None,
) -> ApiSettings:
    """The settings of a front-end. directory: of its model; None: it has none. chat_template: replaces its own.

    Raises ModelError for sampling defaults that cannot be used.
    """
    return ApiSettings(
        served_model_names=served_names(engine_config, server_config),
        model=engine_config.model or SMOLLM2_ID,
        share_cache_across_keys=server_config.share_cache_across_keys,
        max_request_bytes=server_config.max_request_bytes,
        strict_request_fields=server_config.strict_request_fields,
        chat_template=chat_template,
        tool_call_parser=server_config.tool_call_parser,
        enable_auto_tool_choice=server_config.enable_auto_tool_choice,
        reasoning_parser=server_config.reasoning_parser,
        generation_defaults={} if directory is None else sampling_defaults(directory, server_config),
        version=__version__,
        force_include_usage=server_config.enable_force_include_usage,
        per_request_metrics=server_config.enable_per_request_metrics,
        shorten_max_tokens=server_config.shorten_max_tokens,
        max_logprobs=engine_config.max_logprobs,
        enable_metrics_auth=server_config.metrics_require_key,
        key_limits=_key_limits(server_config),
        cors=_cors(server_config),
        allowed_hosts=allowed_hosts(server_config),
        request_timeout_s=server_config.request_timeout,
        speculation=engine_config.speculation,
        spec_decode_metrics=engine_config.per_request_spec_decode_metrics,
        responses_store_bytes=server_config.responses_store or 0,
        page=server_config.page,
        most_viewers=_most_viewers(server_config),
        has_one_user=has_one_user(server_config, keys),
        namespace_secret=namespace_secret(engine_config),
        runtime_adapters=server_config.allow_runtime_lora_updating,
    )


def adapter_reader(config: EngineConfig, report: ProgressCallback) -> ReadAdapter:
    """Return what reads the adapters of an engine with these settings. report: of a fetch from the hub."""
    return lambda name, path: read_adapter(
        name, resolve_adapter(path, progress=report), max_rank=config.max_lora_rank
    )


@asynccontextmanager
async def started(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    keys: ApiKeys,
    chat_template: str | None,
    metrics: ServerMetrics,
    report: ProgressCallback,
) -> AsyncIterator[Application]:
    """An application whose engine is ready; the engine is stopped on exit. Arguments as of build_application."""
    directory = await fetch_model(engine_config, report)
    built = await build_application(directory, engine_config, server_config, keys, chat_template, metrics, report)
    try:
        await built.engine.start()
        await built.engine.wait_ready()
        yield built
    finally:
        await built.engine.stop()


async def while_alive(working: Coroutine[Any, Any, T], engine: AsyncEngine | Replicas) -> T:
    """The outcome of the work. Raises the error with which the engine ends for good."""
    work, death = asyncio.create_task(working), asyncio.create_task(engine.wait_dead())
    try:
        await asyncio.wait({work, death}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise death.result()
        return work.result()
    finally:
        work.cancel()
        death.cancel()
        await asyncio.gather(work, death, return_exceptions=True)


def _places(count: int, ranks: int) -> list[Place]:
    """The cores and the GPUs of each of `count` engines. ranks: of each, which take a GPU each."""
    if count == 1:
        return [Place()]
    each = ranks if may_have_gpu() else 0
    gpus = [tuple(range(number * each, (number + 1) * each)) for number in range(count)]
    return [Place(cores=cores, gpus=of) for cores, of in zip(core_shares(count), gpus, strict=True)]


def served_names(engine_config: EngineConfig, server_config: ServerConfig) -> tuple[str, ...]:
    """Names of the model in requests; the first is that of answers."""
    return server_config.served_model_name or (engine_config.model or _EMBEDDED_NAME,)


def make_metrics(
    engine_config: EngineConfig, server_config: ServerConfig, *, engine: str | None = None
) -> ServerMetrics:
    """All series at zero; they need no model. engine: the label of the only engine; None: engines have numbers."""
    each = [
        Metrics(
            model_name=served_names(engine_config, server_config)[0],
            max_model_len=engine_config.max_model_len or 0,
            engine=engine or str(number),
            speculation=engine_config.speculation,
            max_loras=engine_config.max_loras if engine_config.enable_lora else 0,
        )
        for number in range(server_config.data_parallel_size)
    ]
    return each[0] if len(each) == 1 else ReplicaMetrics(each)


def _most_viewers(config: ServerConfig) -> int:
    """Return the maximum number of live viewers: each holds a connection, and requests need more of them."""
    return min(_MOST_VIEWERS, or_else(config.limit_concurrency, 4 * _MOST_VIEWERS) // 4)


def _key_limits(config: ServerConfig) -> KeyLimits:
    limits = {
        "parallel_requests": config.key_max_parallel_requests,
        "requests_per_minute": config.key_rpm_limit,
        "tokens_per_minute": config.key_tpm_limit,
    }
    return KeyLimits(**given(limits))


def _cors(config: ServerConfig) -> CorsSettings:
    return CorsSettings(
        origins=config.allowed_origins,
        methods=config.allowed_methods,
        headers=config.allowed_headers,
        credentials=config.allow_credentials,
    )


def allowed_hosts(config: ServerConfig) -> tuple[str, ...]:
    """Return all names where FASER has a certificate: browsers accept it for the server's own names only."""
    return ("*",) if config.ssl_certfile is not None else config.allowed_hosts


def of_replica(config: EngineConfig, number: int, count: int) -> EngineConfig:
    """The settings of one of `count` engines: ports of its own, and a part of the folder for KV."""
    config = replace(config, kv_events_config=of_engine(config.kv_events_config, number))
    if config.kv_cache_dir is None or count == 1:
        return config
    folder = Path(config.kv_cache_dir) / f"engine-{number}"
    return replace(config, kv_cache_dir=str(folder), kv_cache_dir_size=config.kv_cache_dir_size // count)


def namespace_secret(config: EngineConfig) -> bytes | None:
    """The secret that goes with the KV on disk; None: none is kept. Raises ConfigError."""
    if config.kv_cache_dir is None:
        return None
    folder = Path(config.kv_cache_dir)
    try:
        make_private_folder(folder)
        return kept_secret(folder / "secret", SECRET_BYTES)
    except OSError as error:
        raise ConfigError(f"kv_cache_dir is {folder}; it cannot be used: {error}") from None


def has_one_user(config: ServerConfig, keys: ApiKeys) -> bool:
    """Return whether only programs of this machine reach the server, without keys that tell them apart.

    A name or path of a proxy, or pages of other origins, bring others in.
    """
    try:
        is_loopback = config.host == "localhost" or ip_address(config.host).is_loopback
    except ValueError:
        is_loopback = False
    others = config.allowed_hosts or config.allowed_origins or config.root_path is not None
    return is_loopback and not keys.required and not others


def sampling_defaults(directory: Path, config: ServerConfig) -> dict[str, float]:
    """Defaults for fields that a request leaves out, by the names of SamplingParams.

    directory: of the model, or a GGUF file, which has no defaults. A model whose generation_config.json has no
    sampling parameter gets what SAMPLING_ADVICE has for it, if anything. Raises ModelError for invalid values.
    """
    defaults: dict[str, float] = {}
    if config.generation_config != "none":
        defaults = _model_defaults(directory / "generation_config.json") or dict(_advice(directory))
    return defaults | _by_param_name(config.override_generation_config or {})


def _advice(directory: Path) -> Mapping[str, float]:
    return SAMPLING_ADVICE.get(directory.resolve().name, {})


def _model_defaults(path: Path) -> dict[str, float]:
    """The keys that are sampling parameters; others, such as special token ids, are ignored. null is absent."""
    if not path.is_file():
        return {}
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path}: it must be a JSON object")
    found = _by_param_name(given(content))
    known = {key: value for key, value in found.items() if key in GENERATION_KEYS}
    if problems := sampling_problems(known, str(path)):
        raise ModelError(f"{'; '.join(problems)}. Or start with --generation-config none.")
    return known


def _by_param_name(values: Mapping[str, float]) -> dict[str, float]:
    return {"max_tokens" if key == "max_new_tokens" else key: value for key, value in values.items()}


async def fetch_model(
    config: EngineConfig, report: ProgressCallback, *, downloads: Downloads | None = None
) -> Path:
    """The directory of the model, or its GGUF file, in a thread; the event loop goes on.

    report: called with (stage, done, total) in bytes, several times a second. When the caller is cancelled, the
    thread ends with the next report, and leaves no files.
    Raises ModelError as resolve does; for the name of a draft model or head, too, before anything is fetched.
    """
    cancelled = threading.Event()

    def watched(stage: str, done: int, total: int) -> None:
        if cancelled.is_set():
            raise _Cancelled
        report(stage, done, total)

    speculation = config.speculation
    if speculation.needs_model:
        check_source(speculation.model, speculation.revision)
    try:
        return await asyncio.to_thread(
            resolve, config.model, cache_dir(), revision=config.revision, progress=watched, downloads=downloads
        )
    finally:
        cancelled.set()


class _Cancelled(Exception):
    """The server ends before the model is there."""


@contextmanager
def open_recorder(
    config: ServerConfig, label: Label, count: Callable[[Outcome], None]
) -> Iterator[TrafficRecorder | None]:
    """Within it answers can be recorded; None: the settings do not ask for it. count: as of TrafficRecorder.

    Raises ConfigError for a file that cannot be written.
    """
    if config.record_traffic is None:
        yield None
        return
    named = f"{label('record_traffic')} is {config.record_traffic}"
    try:
        recorder = TrafficRecorder(Path(config.record_traffic), count)
    except BlockingIOError:
        raise ConfigError(f"{named}; another process records to it") from None
    except OSError as error:
        raise ConfigError(f"{named}; it cannot be written: {error.strerror}") from None
    try:
        yield recorder
    finally:
        recorder.close(_FLUSH_TIMEOUT_S)
