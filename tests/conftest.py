"""Fixtures shared by the whole test tree."""

import gc
import os
import signal
import ssl
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

# A process for each core has one thread: threads of several processes that wait for each other on the same cores
# took seven times as long. This must be said before anything imports torch; programs that tests start inherit it.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import httpx
import torch
from hypothesis import settings

from faser.config.environment import cache_dir
from tests.checkpoints import write_tiny_checkpoint

# The same examples every time, however slow the machine is at the moment.
settings.register_profile("seeded", derandomize=True, deadline=None)
settings.load_profile("seeded")

# A shell starts `make test &` with Ctrl-C ignored, and every program that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Engines measure step times for a moment only, also in programs that tests start: next to other tests no time is
# kept anyway.
os.environ.setdefault("FASER_STEP_TIMES_SECONDS", "0.1")

# Where there is no GPU, Triton's kernels run in its interpreter; this must be said before anything imports Triton.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--clients", help="the folder with the client packages that make clients installs")
    parser.addoption("--wheels", type=Path, help="the folder with the wheels that make wheel builds")
    parser.addoption(
        "--full", action="store_true", help="long tests and versions: all forty prompts, ten thousand steps"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what runs with --full alone."""
    if config.getoption("--full"):
        return
    longer = [item for item in items if _is_longer(item)]
    if longer:
        config.hook.pytest_deselected(items=longer)
        left_out = set(longer)
        items[:] = [item for item in items if item not in left_out]


def _is_longer(item: pytest.Item) -> bool:
    """Whether it is marked `full`, and is no variant that the mark's `but` names."""
    return any(
        item.name.partition("[")[2][:-1] not in mark.kwargs.get("but", ()) for mark in item.iter_markers("full")
    )


def pytest_collection_finish() -> None:
    """Let the garbage collector look through what tests make alone: modules and 16,000 tests took it a second."""
    gc.freeze()
    gc.set_threshold(10_000)


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether tests that could go on for minutes do."""
    return bool(request.config.getoption("--full"))


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a complete seeded two-layer Llama with a tokenizer of 512 tokens; read-only by convention."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny-llama")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Compute on one thread: with tensors this small a second one is only waited for."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def kernel_cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Native kernels, compiled once and kept between runs. Named by what the sources hold: none is stale.

    With -p no:cacheprovider nothing is kept: they are compiled in every run.
    """
    cache: pytest.Cache | None = getattr(request.config, "cache", None)
    return tmp_path_factory.mktemp("native-kernels") if cache is None else Path(cache.mkdir("native-kernels"))


@pytest.fixture(scope="session", autouse=True)
def web_context() -> Iterator[None]:
    """Read the authorities of the web once: each client would, which takes longer than most requests."""

    @cache
    def shared() -> ssl.SSLContext:
        return httpx.create_ssl_context()

    def context(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
        return shared() if verify is True and cert is None else httpx.create_ssl_context(verify, cert, trust_env)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("httpx._transports.default.create_ssl_context", context)
        yield


@pytest.fixture(scope="session")
def user_cache() -> Path:
    """The cache folder of whoever runs the tests, to be read at most."""
    return cache_dir()


@pytest.fixture(scope="session", autouse=True)
def own_cache(user_cache: Path, kernel_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The cache folder of this run, also for the processes it starts; empty at first but for the kernels.

    Tests share it: measuring what the steps of a tiny model take is worth seconds, and no test depends on them.
    """
    del user_cache  # remembered before this one takes its place
    folder = tmp_path_factory.mktemp("cache")
    (folder / "kernels").symlink_to(kernel_cache)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("FASER_CACHE_DIR", str(folder))
        yield folder
