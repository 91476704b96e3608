"""A server with several models, from the listening socket to its end. server.py does the same for one model."""

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fastapi import FastAPI

from faser.api.dialects.responses_store import ResponseStore
from faser.api.middleware.keys import ApiKeys
from faser.api.several_models import create_models_app
from faser.cli.application import api_settings
from faser.cli.model_source import FileSource
from faser.cli.preparation import notice
from faser.cli.server import has_files, http_server, reload_files, run_until_stopped, url_of
from faser.config.declaration import Label, show_bytes
from faser.config.server import ServerConfig, memory_of
from faser.config.several_models import ModelSettings
from faser.engine.client.model_pool import ModelPool, PoolLimits
from faser.machine import available_memory, may_have_gpu
from faser.metrics.models import ModelsMetrics
from faser.metrics.server import Metrics
from faser.tracing import Tracer

_SHARE_OF_FREE = 0.8  # of the memory that is free at the start; other programs, and this one, need some too


def serve_models_on(
    listener: socket.socket,
    models: Sequence[ModelSettings],
    config: ServerConfig,
    label: Label,
    keys: tuple[str, ...],
    templates: Mapping[str, str | None],
    began_s: float,
    tracer: Tracer | None = None,
) -> int:
    """Serve until a signal; returns the exit status. Arguments as of serve_on.

    templates: that replace a model's, by its name. Raises ConfigError or EngineError if a model that is to be
    loaded at the start cannot be.
    """
    accepted = ApiKeys(keys)
    metrics = ModelsMetrics(
        {
            model.names[0]: Metrics(
                model_name=model.names[0],
                max_model_len=model.engine.max_model_len or 0,
                speculation=model.engine.speculation,
                max_loras=model.engine.max_loras if model.engine.enable_lora else 0,
            )
            for model in models
        }
    )
    store = ResponseStore(config.responses_store or 0)
    limits = pool_limits(config, on_gpu=may_have_gpu() and any(each.engine.device != "cpu" for each in models))
    sources = [
        FileSource(
            model,
            templates[model.names[0]],
            accepted,
            metrics.of[model.names[0]],
            store,
            num_shares=limits.max_models or 1,
        )
        for model in models
    ]
    pool = ModelPool(sources, limits, metrics, preloaded=preloaded(models, config, label))
    settings = replace(
        api_settings(None, models[0].engine, config, accepted, None),
        served_model_names=tuple(name for model in models for name in model.names),
    )
    app = create_models_app(pool, settings=settings, metrics=metrics, store=store, keys=accepted, tracer=tracer)
    server = http_server(app, config)
    server.config.load()  # reads the certificate, so that SIGHUP finds one to replace

    async def prepare() -> ModelPool[FastAPI]:
        return pool

    def announce(_: None) -> None:
        loaded = ", ".join(each.name for each in pool.models if each.engine is not None)
        most = "" if limits.max_models is None else f", at most {limits.max_models} at once"
        notice(
            f"ready at {url_of(listener, config)} · {len(models)} models · loaded: {loaded or 'none yet'} · "
            f"{show_bytes(limits.memory_bytes)} for all{most} · {time.monotonic() - began_s:.1f} s",
            to_stdout=True,
        )

    def reload() -> None:
        reload_files(config, label, accepted, [server.config.ssl])

    return run_until_stopped(
        [(server, listener)],
        prepare,
        config.shutdown_timeout,
        announce,
        reload if has_files(config) else None,
    )


def pool_limits(config: ServerConfig, *, on_gpu: bool) -> PoolLimits:
    """The limits of a server's models. on_gpu: they share a GPU, whose memory is divided by their number."""
    given = None if config.models_memory is None else memory_of(config.models_memory)
    return PoolLimits(
        max_models=config.models_max or (1 if on_gpu else None),
        memory_bytes=int(available_memory() * _SHARE_OF_FREE) if given is None else given,
        load_timeout_s=config.models_load_timeout,
        idle_timeout_s=config.models_idle_timeout,
        drain_s=config.shutdown_timeout,
    )


def preloaded(models: Sequence[ModelSettings], config: ServerConfig, label: Label) -> tuple[str, ...]:
    """Names of the models that are loaded at the start: as given, else the first one that the operator names.

    label: what messages call a setting.
    """
    if config.models_preload:
        return config.models_preload
    first = models[0]
    return () if first.label("model") == label("models_dir") else first.names[:1]
