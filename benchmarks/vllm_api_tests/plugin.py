"""A pytest plugin: stands in for the modules of vLLM that its tests import, and deselects with a reason.

A test that uses a class of vLLM's own is skipped at that point: it does not test a server. Of vLLM's helpers,
those that read a model's files have a substitute here.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import MutableSequence
from pathlib import Path
from types import ModuleType
from typing import Any

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
    """Of the tested model's tokenizer and config."""
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
