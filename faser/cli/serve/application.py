"""build_application: the engine and the HTTP application of a fetched model, from the settings of a command."""

import asyncio
from pathlib import Path

from fastapi import FastAPI

from faser import __version__
from faser.api.app import create_app
from faser.api.middleware.key_limits import KeyLimits
from faser.api.middleware.keys import ApiKeys
from faser.api.requests.service import ApiSettings, CorsSettings
from faser.cli.serve.generation import sampling_defaults
from faser.config.engine import EngineConfig
from faser.config.server import ServerConfig
from faser.engine.client.async_engine import AsyncEngine
from faser.engine.client.engine_host import LaunchedEngine
from faser.engine.client.head_refresh import HeadRefresher
from faser.engine.client.supervisor import Supervision
from faser.engine.client.traffic import AnswerTaker
from faser.engine.text.tokenizer import load_tokenizer
from faser.metrics.server import Metrics
from faser.tracing.span import Tracer
from faser.types import ProgressCallback

_EMBEDDED_NAME = "SmolLM2-135M-Instruct"
_MOST_VIEWERS = 32
_EMBEDDED_HUB_ID = f"HuggingFaceTB/{_EMBEDDED_NAME}"


def served_names(engine_config: EngineConfig, server_config: ServerConfig) -> tuple[str, ...]:
    """Names of the model in requests; the first is that of answers."""
    return server_config.served_model_name or (engine_config.model or _EMBEDDED_NAME,)


def make_metrics(engine_config: EngineConfig, server_config: ServerConfig) -> Metrics:
    """All series at zero; they need no model."""
    return Metrics(
        model_name=served_names(engine_config, server_config)[0],
        max_model_len=engine_config.max_model_len or 0,
        speculation=engine_config.speculation,
    )


async def build_application(
    directory: Path,
    engine_config: EngineConfig,
    server_config: ServerConfig,
    keys: ApiKeys,
    chat_template: str | None,
    metrics: Metrics,
    report: ProgressCallback,
    launched: LaunchedEngine | None = None,
    tracer: Tracer | None = None,
    recorder: AnswerTaker | None = None,
    refresher: HeadRefresher | None = None,
) -> tuple[AsyncEngine, FastAPI]:
    """The engine has not been configured.

    directory: of the model. chat_template: replaces the model's. metrics: of make_metrics. report: of the engine's
    start. launched, recorder, refresher: as of AsyncEngine. tracer: as of create_app. Raises ModelError.
    """
    names = served_names(engine_config, server_config)
    tokenizer = await asyncio.to_thread(load_tokenizer, Path(engine_config.tokenizer or directory))
    supervision = Supervision(max_restarts=server_config.engine_restarts, timeout_s=server_config.engine_timeout)
    engine = AsyncEngine(
        engine_config,
        directory,
        tokenizer,
        supervision=supervision,
        metrics=metrics,
        on_progress=report,
        launched=launched,
        recorder=recorder,
        refresher=refresher,
    )
    settings = ApiSettings(
        served_model_names=names,
        model=engine_config.model or _EMBEDDED_HUB_ID,
        share_cache_across_keys=server_config.share_cache_across_keys,
        max_request_bytes=server_config.max_request_bytes,
        strict_request_fields=server_config.strict_request_fields,
        chat_template=chat_template,
        tool_call_parser=server_config.tool_call_parser,
        enable_auto_tool_choice=server_config.enable_auto_tool_choice,
        reasoning_parser=server_config.reasoning_parser,
        generation_defaults=sampling_defaults(directory, server_config),
        version=__version__,
        force_include_usage=server_config.enable_force_include_usage,
        max_logprobs=engine_config.max_logprobs,
        enable_metrics_auth=server_config.metrics_require_key,
        key_limits=_key_limits(server_config),
        cors=_cors(server_config),
        request_timeout_s=server_config.request_timeout,
        speculation=engine_config.speculation,
        spec_decode_metrics=engine_config.per_request_spec_decode_metrics,
        page=server_config.page,
        most_viewers=_most_viewers(server_config),
    )
    return engine, create_app(engine, settings=settings, metrics=metrics, keys=keys, tracer=tracer)


def _most_viewers(config: ServerConfig) -> int:
    """Of the live view. They hold a connection each, and requests need more of them."""
    return _MOST_VIEWERS if config.limit_concurrency is None else min(_MOST_VIEWERS, config.limit_concurrency // 4)


def _key_limits(config: ServerConfig) -> KeyLimits:
    return KeyLimits(
        parallel_requests=config.key_max_parallel_requests,
        requests_per_minute=config.key_rpm_limit,
        tokens_per_minute=config.key_tpm_limit,
    )


def _cors(config: ServerConfig) -> CorsSettings:
    return CorsSettings(
        origins=config.allowed_origins,
        methods=config.allowed_methods,
        headers=config.allowed_headers,
        credentials=config.allow_credentials,
    )
