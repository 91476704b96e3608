"""Two servers that the whole folder shares; tests leave them idle."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.end_to_end.server import Server, end, start

MODEL = "tiny"
KEY = "secret-key"
ROOM = 8  # samples that the small server holds, running and waiting

# Refuses conversations that contain "forbidden".
_STRICT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if 'forbidden' in message.content %}{{ raise_exception('the word forbidden is not allowed') }}{% endif %}"
    "{{ message.content }}"
    "{% endfor %}"
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where servers keep their logs and their cache."""
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="session")
def _both(tiny_checkpoint: Path, folder: Path) -> Iterator[tuple[Server, Server]]:
    """The large server and the small one, started at the same time."""
    template = folder / "strict.jinja"
    template.write_text(_STRICT_TEMPLATE)
    large = start(tiny_checkpoint, folder, "--served-model-name", MODEL, "tiny-alias")
    small_flags = ["--api-key", KEY, "--no-enable-prefix-caching", "--chat-template", str(template)]
    small_flags += ["--max-num-seqs", str(ROOM // 2), "--max-num-queued-reqs", str(ROOM // 2)]
    small = start(tiny_checkpoint, folder, "--served-model-name", MODEL, *small_flags, key=KEY)
    try:
        large.wait_ready()
        small.wait_ready()
        yield large, small
    finally:
        end(large)
        end(small)


@pytest.fixture
def server(_both: tuple[Server, Server]) -> Server:
    """64 samples run, 1024 wait, prefixes are cached, no key is required."""
    return _both[0]


@pytest.fixture
def small(_both: tuple[Server, Server]) -> Server:
    """ROOM samples, no prefix cache, KEY needed, and a chat template that can refuse."""
    return _both[1]


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client
