"""Models of a folder, and the memory that one takes."""

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from faser.api.dialects.responses_store import ResponseStore
from faser.api.middleware.keys import ApiKeys
from faser.cli.model_source import FileSource, memory_needed, models_in
from faser.cli.models_server import pool_limits, preloaded
from faser.config.declaration import flag_label
from faser.config.engine import EngineConfig
from faser.config.server import ServerConfig
from faser.config.several_models import ModelSettings
from faser.engine.client.async_engine import AsyncEngine
from faser.engine.client.model_pool import PROCESS_BYTES
from faser.engine.text.tokenizer import Tokenizer, load_tokenizer
from faser.errors import ConfigError, ModelError
from faser.machine import available_memory
from faser.metrics.server import Metrics
from tests.engine.checkpoints.adapter_files import write_adapter


def test_models_have_the_names_of_their_folders_and_files(tmp_path: Path) -> None:
    for name in ("llama", "split", "empty", ".hidden"):
        (tmp_path / name).mkdir()
    for file in (
        *(
            "llama/config.json",
            ".hidden/config.json",
            "split/a-00001-of-00002.gguf",
            "split/a-00002-of-00002.gguf",
        ),
        *("b-Q4_K_M.gguf", "c-Q4_K_M.gguf", "mmproj-F16.gguf", "d-00001-of-00002.gguf", "d-00002-of-00002.gguf"),
        "notes.txt",
    ):
        (tmp_path / file).touch()
    assert models_in(tmp_path, "--models-dir") == {
        "llama": str(tmp_path / "llama"),
        "split": str(tmp_path / "split"),
        "b-Q4_K_M": str(tmp_path / "b-Q4_K_M.gguf"),
        "c-Q4_K_M": str(tmp_path / "c-Q4_K_M.gguf"),
        "d": str(tmp_path / "d-00001-of-00002.gguf"),
    }


def test_a_folder_without_models_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--models-dir is .*; it has neither folders with a config\.json"):
        models_in(tmp_path, "--models-dir")
    with pytest.raises(ConfigError, match=r"--models-dir is .*/none; it cannot be read: No such file"):
        models_in(tmp_path / "none", "--models-dir")


@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(backend="torch", num_threads=1, max_num_seqs=2),
        EngineConfig(backend="torch", num_threads=1, max_num_seqs=64, max_model_len=512),
        EngineConfig(backend="torch", num_threads=1, max_num_seqs=3, dtype="bfloat16", kv_cache_memory=32 << 20),
    ],
)
def test_the_estimate_is_what_an_engine_takes(tiny_checkpoint: Path, config: EngineConfig) -> None:
    """Oracle: the sizes that the engine states once it is loaded."""

    async def loaded() -> int:
        engine = AsyncEngine(config, tiny_checkpoint, load_tokenizer(tiny_checkpoint), transport="thread")
        await engine.start()
        info = await engine.wait_ready()
        await engine.stop()
        return info.weight_bytes + info.kv_cache_bytes

    taken = asyncio.run(loaded())
    estimate = memory_needed(tiny_checkpoint, config, available_memory()) - PROCESS_BYTES
    assert taken <= estimate * 1.02 + (1 << 20)
    assert estimate <= taken * 1.1 + (1 << 20)


def test_a_cache_takes_a_part_of_the_free_memory_and_one_context_at_least(tiny_checkpoint: Path) -> None:
    def needed(free_bytes: int, *, max_num_seqs: int = 64, kv_cache_memory: int | None = None) -> int:
        config = EngineConfig(max_num_seqs=max_num_seqs, kv_cache_memory=kv_cache_memory)
        return memory_needed(tiny_checkpoint, config, free_bytes) - PROCESS_BYTES

    weights = needed(1 << 40, kv_cache_memory=1 << 20) - (1 << 20)
    assert needed(64 << 20) - weights == 16 << 20
    context = needed(0) - weights
    assert context == needed(0, max_num_seqs=5) - weights
    assert needed(1 << 40, max_num_seqs=5) - weights == 5 * context


def test_files_that_cannot_be_read_have_no_estimate(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json"):
        memory_needed(tmp_path, EngineConfig(), 1 << 40)


def test_a_tokenizer_is_kept_until_its_file_changes(tiny_checkpoint: Path, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(tiny_checkpoint, directory)
    config = EngineConfig(model=str(directory), backend="torch", num_threads=1)
    settings = ModelSettings(names=("m",), engine=config, server=ServerConfig(), label=flag_label)
    source = FileSource(
        settings, None, ApiKeys(()), Metrics(model_name="m", max_model_len=0), ResponseStore(0), num_shares=1
    )

    async def built() -> Tokenizer:
        await source.locate(lambda *_: None)
        engine, _ = await source.build(lambda *_: None)
        return engine.tokenizer

    async def test() -> None:
        first = await built()
        assert await built() is first
        os.utime(directory / "tokenizer.json", (1, 1))
        assert await built() is not first

    asyncio.run(test())


def test_the_adapters_of_a_model_are_read_with_it(tiny_checkpoint: Path, tmp_path: Path) -> None:
    def built(path: Path) -> FileSource:
        config = EngineConfig(model=str(tiny_checkpoint), backend="torch", num_threads=1, enable_lora=True)
        server = ServerConfig(lora_modules=(f"tuned={path}",))
        settings = ModelSettings(names=("m",), engine=config, server=server, label=flag_label)
        source = FileSource(
            settings, None, ApiKeys(()), Metrics(model_name="m", max_model_len=0), ResponseStore(0), num_shares=1
        )

        async def build() -> None:
            await source.locate(lambda *_: None)
            await source.build(lambda *_: None)

        asyncio.run(build())
        return source

    path = write_adapter(tmp_path / "tuned")
    assert built(path).adapters == {"tuned": str(path)}
    with pytest.raises(ModelError, match=r"none. is neither a local path nor a hub id"):
        built(tmp_path / "none")


def test_limits_follow_from_the_settings_and_the_machine() -> None:
    plain = pool_limits(ServerConfig(), on_gpu=False)
    assert (plain.max_models, plain.load_timeout_s, plain.idle_timeout_s, plain.drain_s) == (None, 300, None, 25)
    assert 0.5 * available_memory() < plain.memory_bytes < available_memory()
    assert pool_limits(ServerConfig(), on_gpu=True).max_models == 1
    given = pool_limits(ServerConfig(models_max=3, models_memory="2G"), on_gpu=True)
    assert (given.max_models, given.memory_bytes) == (3, 2 << 30)


def test_the_first_model_that_has_a_name_is_loaded_at_the_start() -> None:
    def of(name: str, label: str) -> ModelSettings:
        return ModelSettings(
            names=(name, "alias"), engine=EngineConfig(), server=ServerConfig(), label=lambda _: label
        )

    named, in_folder = of("m", "--model"), of("x", "--models-dir")
    assert preloaded([named, in_folder], ServerConfig(), flag_label) == ("m",)
    assert preloaded([in_folder, of("y", "--models-dir")], ServerConfig(), flag_label) == ()
    assert preloaded([named, in_folder], ServerConfig(models_preload=("x",)), flag_label) == ("x",)
