"""A pytest plugin: stands in for the modules of vLLM that its tests import, and deselects with a reason.

A test that uses a class of vLLM's own is skipped at that point: it does not test a server. Of vLLM's helpers,
those that read a model's files have a substitute here.

RemoteOpenAIServer: what vLLM's tests start their server with; this one starts `faser serve`.

The tests name models of their own. Every server serves one model, under the name that its test asks for.
"""

import contextlib
import importlib.abc
import importlib.machinery
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import MutableSequence, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self

import anthropic
import openai
import pytest

from benchmarks.vllm_api_tests.selection import DESELECTED


class _Stub:
    """Any class, function or value of vLLM's: it can be named and annotated with, and using it skips the test."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        pytest.skip(f"uses vLLM's own {self._name}")

    def __add__(self, _: Any) -> Any:
        return self()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.startswith("is_"):
            return lambda *_: False  # of platforms
        return _Stub(f"{self._name}.{name}")


class _StubModule(ModuleType):
    __path__: MutableSequence[str] = []  # noqa: RUF012  # as of any module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _SUBSTITUTES:
            return _SUBSTITUTES[name]
        if name.endswith("Error"):
            return type(name, (Exception,), {})
        return _Stub(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if fullname.partition(".")[0] != "vllm":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def _directory() -> Path:
    """Return the directory of the tested model's tokenizer and config."""
    from faser.config.environment import cache_dir
    from faser.engine.checkpoints.source import resolve

    tested = os.environ.get("TESTED_MODEL") or None
    return resolve(tested, cache_dir(), revision=None, progress=lambda *_: None)


def _get_tokenizer(*_: Any, **__: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(_directory())


class _ModelConfig:
    def __init__(self, **_: Any) -> None:
        pass

    def get_vocab_size(self) -> int:
        from transformers import AutoConfig

        size: int = AutoConfig.from_pretrained(_directory()).vocab_size
        return size


class _Hub:
    """In place of downloads: adapters of tests are names of the one model."""

    def snapshot_download(self, **_: Any) -> str:
        return "."


_SUBSTITUTES: dict[str, Any] = {"get_tokenizer": _get_tokenizer, "ModelConfig": _ModelConfig, "hf_api": _Hub}

sys.meta_path.insert(0, _Finder())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for part, reason in DESELECTED.items():
            if part in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=f"deselected: {reason}"))
                break


__all__ = ["ROCM_EXTRA_ARGS", "VLLM_PATH", "RemoteOpenAIServer", "multi_gpu_only", "requires_fp8"]

ROCM_EXTRA_ARGS: list[str] = []
VLLM_PATH = "."
KEY = "token-abc123"  # the one that the tests' own helper uses
_START_S = 300.0

# Flags that are passed on, with the number of values. The others ask for what FASER always does or cannot do.
_PASSED_ON = {
    "--root-path": 1,
    "--api-key": 1,
    "--enable-force-include-usage": 0,
    "--enable-per-request-metrics": 0,
    "--enable-prompt-tokens-details": 0,
    "--enable-auto-tool-choice": 0,
    "--tool-call-parser": 1,
    "--no-enable-prefix-caching": 0,
    "--served-model-name": 1,
}


def multi_gpu_only(*, num_gpus: int) -> Any:
    del num_gpus
    return lambda test: test


def requires_fp8(test: Any) -> Any:
    return test


class RemoteOpenAIServer:
    """A server in a process of its own, on a free port."""

    DUMMY_API_KEY = KEY

    def __init__(
        self,
        model: str,
        vllm_serve_args: Sequence[str] = (),
        *,
        env_dict: dict[str, str] | None = None,
        **_: Any,
    ) -> None:
        self.host = "127.0.0.1"
        with socket.socket() as found:
            found.bind((self.host, 0))
            self.port = found.getsockname()[1]
        passed = passed_on(vllm_serve_args)
        self._root_path = passed[passed.index("--root-path") + 1] if "--root-path" in passed else ""
        adapters = [arg.partition("=")[0] for arg in vllm_serve_args if arg.startswith("zephyr-lora")]
        names = [] if "--served-model-name" in passed else ["--served-model-name", model, *adapters]
        tested = os.environ.get("TESTED_MODEL", "")
        command = [sys.executable, "-m", "faser", "serve", *([tested] if tested else []), *names, *passed]
        command += ["--port", str(self.port), "--log-level", "warning"]
        self._process = subprocess.Popen(command, env={**os.environ, **(env_dict or {})})
        self._wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        self._process.kill()

    @property
    def url_root(self) -> str:
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *(part.strip("/") for part in parts)])

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url_for("v1"), api_key=KEY, max_retries=0, **_timed(options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), api_key=KEY, max_retries=0, **_timed(options))

    def get_client_anthropic(self, **options: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url_root, api_key=KEY, max_retries=0, **_timed(options))

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=self.url_root, api_key=KEY, max_retries=0, **_timed(options))

    def _wait(self) -> None:
        deadline_s = time.monotonic() + _START_S
        while time.monotonic() < deadline_s:
            if self._process.poll() is not None:
                raise RuntimeError(f"faser serve ended with status {self._process.returncode}")
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                urllib.request.urlopen(f"{self.url_root}/ready", timeout=5).read()
                return
            time.sleep(0.2)
        raise RuntimeError(f"faser serve was not ready within {_START_S:g} s")


def passed_on(args: Sequence[str]) -> list[str]:
    passed: list[str] = []
    for at, arg in enumerate(args):
        if arg in _PASSED_ON:
            passed += args[at : at + 1 + _PASSED_ON[arg]]
    return passed


def _timed(options: dict[str, Any]) -> dict[str, Any]:
    return {"timeout": 120, **options}
