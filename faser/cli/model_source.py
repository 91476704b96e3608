"""The models of a server with several: which a folder has, what one takes in memory, and how it is loaded."""

import asyncio
import re
from dataclasses import replace
from pathlib import Path

from fastapi import FastAPI

from faser.api.dialects.responses_store import ResponseStore
from faser.api.middleware.keys import ApiKeys
from faser.api.requests.adapters import Adapters, read_modules
from faser.api.several_models import model_app
from faser.cli.application import adapter_reader, api_settings, fetch_model
from faser.config.engine import EngineConfig, cpu_kv_memory
from faser.config.several_models import ModelSettings
from faser.engine.checkpoints.files import read_model_config
from faser.engine.checkpoints.gguf.names import model_files
from faser.engine.checkpoints.source import SMOLLM2_ID
from faser.engine.checkpoints.stored import stored_weights
from faser.engine.client.async_engine import AsyncEngine
from faser.engine.client.model_pool import PROCESS_BYTES
from faser.engine.client.supervisor import Supervision
from faser.engine.text.tokenizer import Tokenizer, load_tokenizer
from faser.errors import ConfigError
from faser.machine import available_memory, may_have_gpu
from faser.metrics.server import Metrics
from faser.types.engine import ProgressCallback

_PART = re.compile(r"-\d{5}-of-\d{5}$")  # of the name of a file; see gguf/names.py


def models_in(folder: Path, label: str) -> dict[str, str]:
    """Paths of the models in a folder, by their names: of a folder, or of a .gguf file without its ending.

    Of a model in parts the first part counts. What is no model is left out. label: what messages call the setting.
    Raises ConfigError for a folder that cannot be read, or has no model.
    """
    try:
        entries = sorted(each for each in folder.expanduser().iterdir() if not each.name.startswith("."))
    except OSError as error:
        raise ConfigError(f"{label} is {folder}; it cannot be read: {error.strerror}") from None
    found = {each.name: str(each) for each in entries if each.is_dir() and _is_model(each)}
    for file in model_files(each.name for each in entries if each.is_file()).values():
        name = _PART.sub("", file.removesuffix(".gguf"))
        found[name] = str(folder.expanduser() / file)
    if not found:
        raise ConfigError(f"{label} is {folder}; it has neither folders with a config.json nor .gguf files")
    return found


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() or any(folder.glob("*.gguf"))


def memory_needed(path: Path, config: EngineConfig, free_bytes: int) -> int:
    """Bytes that a model on a CPU takes: weights as on disk, the KV cache, and its process.

    path: its directory or GGUF file. free_bytes: of the machine, from which the default of the KV cache follows; a
    cache holds one context at least, and no more than all sequences can fill. Raises ModelError for files that
    cannot be read.
    """
    model = read_model_config(path)
    weights = stored_weights(path, model).num_bytes
    kv_bytes = config.kv_cache_memory
    if kv_bytes is None:
        wide = "float32" in (config.dtype, model.dtype if config.dtype == "auto" else None)
        channels = sum(count * (head_dim + 2) for count, head_dim in model.spec.kv_heads)  # with scales
        token_bytes = 2 * channels * (1 if config.kv_cache_dtype in ("int8", "fp8") else 4 if wide else 2)
        context = token_bytes * (config.max_model_len or model.spec.max_position_embeddings)
        kv_bytes = max(context, min(cpu_kv_memory(free_bytes), context * config.max_num_seqs))
    return weights + kv_bytes + PROCESS_BYTES


class FileSource:
    """One model, from its files to its engine. num_shares: how many models share a GPU's memory."""

    def __init__(
        self,
        settings: ModelSettings,
        chat_template: str | None,
        keys: ApiKeys,
        metrics: Metrics,
        store: ResponseStore,
        *,
        num_shares: int,
    ) -> None:
        self.names = settings.names
        self.root = settings.engine.model or SMOLLM2_ID
        self.adapters = settings.adapters
        self._settings = settings
        self._chat_template = chat_template
        self._keys = keys
        self._metrics = metrics
        self._store = store
        self._on_gpu = settings.engine.device != "cpu" and may_have_gpu()
        share = settings.engine.gpu_memory_utilization / num_shares
        self._config = replace(settings.engine, gpu_memory_utilization=share) if self._on_gpu else settings.engine
        self._directory = Path()
        self._tokenizer: tuple[object, Tokenizer] | None = None  # and the files that it is of

    async def locate(self, report: ProgressCallback) -> int:
        """See ModelSource. A model on a GPU takes memory of the machine for its process alone."""
        self._directory = await fetch_model(self._config, report)
        if self._on_gpu:
            return PROCESS_BYTES
        return await asyncio.to_thread(memory_needed, self._directory, self._config, available_memory())

    async def build(self, report: ProgressCallback) -> tuple[AsyncEngine, FastAPI]:
        """See ModelSource. Raises ModelError for a tokenizer, template, defaults or adapters of no use."""
        config, server = self._config, self._settings.server
        tokenizer = await self._load_tokenizer(Path(config.tokenizer or self._directory))
        read = adapter_reader(config, report)
        modules = await read_modules(server.adapter_modules, read)
        engine = AsyncEngine(
            config,
            self._directory,
            tokenizer,
            supervision=Supervision(max_restarts=server.engine_restarts, timeout_s=server.engine_timeout),
            observer=self._metrics,
            on_progress=report,
            adapters=[adapter for adapter, _ in modules],
        )
        settings = api_settings(self._directory, config, server, self._keys, self._chat_template)
        settings = replace(settings, served_model_names=self.names)
        adapters = Adapters(engine, read, served_names=self.names, modules=modules, enabled=config.enable_lora)
        app = await asyncio.to_thread(model_app, engine, settings, self._metrics, self._store, adapters)
        return engine, app

    async def _load_tokenizer(self, path: Path) -> Tokenizer:
        """The tokenizer of these files, kept for the next load: to make a large one holds up all streams.

        The library holds the interpreter's lock for a third of a second where a vocabulary has 150,000 tokens.
        """
        file = path if path.is_file() else path / "tokenizer.json"
        stamp = (path, file.stat().st_mtime_ns, file.stat().st_size) if file.is_file() else None
        if self._tokenizer is None or stamp is None or self._tokenizer[0] != stamp:
            self._tokenizer = (stamp, await asyncio.to_thread(load_tokenizer, path))
        return self._tokenizer[1]
