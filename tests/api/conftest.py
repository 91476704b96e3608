"""One server for all tests of the front-end; its engine starts afresh with each of them."""

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.api.server import http_client, openai_client, serving
from tests.fake_engine import FakeEngine


@pytest.fixture(scope="session")
def shared_engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="session")
def url(shared_engine: FakeEngine) -> Iterator[str]:
    with serving(shared_engine) as url:
        yield url


@pytest.fixture
def engine(shared_engine: FakeEngine) -> FakeEngine:
    shared_engine.reset()
    return shared_engine


@pytest.fixture(scope="session")
def shared_client(url: str) -> Iterator[openai.OpenAI]:
    with openai_client(url) as client:
        yield client


@pytest.fixture(scope="session")
def shared_http(url: str) -> Iterator[httpx.Client]:
    with http_client(url) as client:
        yield client


@pytest.fixture
def client(shared_client: openai.OpenAI, engine: FakeEngine) -> openai.OpenAI:
    del engine  # reset before the first request
    return shared_client


@pytest.fixture
def http(shared_http: httpx.Client, engine: FakeEngine) -> httpx.Client:
    del engine  # reset before the first request
    return shared_http
