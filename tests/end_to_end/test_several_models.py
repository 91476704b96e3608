"""A real server with two seeded models and a damaged one, of which one may be loaded at a time.

Oracle: each model alone; the two have other weights, so they say other things.
"""

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from tests.checkpoints import write_tiny_checkpoint
from tests.end_to_end.server import Server, end, start
from tests.waiting import has_ended, until

PROMPT = "the quick brown fox"
PATIENCE_S = 120.0  # of a load, on a machine that does other things too
_FLAGS = ("--speculative-policy", "off", "--models-max", "1", "--shutdown-timeout", "60")


@pytest.fixture(scope="module")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_tiny_checkpoint(folder / "one", seed=1)
    write_tiny_checkpoint(folder / "two", seed=2)
    write_tiny_checkpoint(folder / "cut-off", seed=3)
    weights = folder / "cut-off" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return folder


@pytest.fixture(scope="module")
def server(models_dir: Path, folder: Path) -> Iterator[Server]:
    server = start(None, folder, "--models-dir", str(models_dir), *_FLAGS)
    try:
        server.wait_ready()
        yield server
    finally:
        end(server)


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.client().with_options(timeout=PATIENCE_S) as client:
        yield client


def answer(client: openai.OpenAI, model: str, max_tokens: int = 12) -> str:
    done = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=max_tokens, temperature=0, extra_body={"ignore_eos": True}
    )
    assert done.model == model
    return done.choices[0].text


def states(server: Server) -> dict[str, str]:
    with server.http() as http:
        return {each["id"]: each["status"]["value"] for each in http.get("/v1/models").json()["data"]}


def engines(server: Server) -> list[psutil.Process]:
    return list(psutil.Process(server.process.pid).children())


def test_models_take_turns_and_each_answers_as_it_does_alone(server: Server, client: openai.OpenAI) -> None:
    assert states(server) == {"one": "unloaded", "two": "unloaded", "cut-off": "unloaded"}
    assert not engines(server)
    first = {name: answer(client, name) for name in ("one", "two")}
    assert first["one"] != first["two"]
    assert states(server) == {"one": "unloaded", "two": "loaded", "cut-off": "unloaded"}
    assert len(engines(server)) == 1
    assert {name: answer(client, name) for name in ("two", "one")} == first


@pytest.mark.full
def test_a_model_that_streams_stays_until_it_has_finished(server: Server, client: openai.OpenAI) -> None:
    alone = answer(client, "one", 600)
    stream = client.completions.create(
        model="one",
        prompt=PROMPT,
        max_tokens=600,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    text = next(stream).choices[0].text
    others: list[str] = []
    thread = threading.Thread(target=lambda: others.append(answer(client, "two")))
    thread.start()
    text += "".join(each.choices[0].text for each in stream)
    assert text == alone
    thread.join()
    assert len(others) == 1
    assert states(server)["one"] == "unloaded"


@pytest.mark.full
def test_a_damaged_model_says_what_is_wrong_and_others_go_on(server: Server, client: openai.OpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError, match=r"'cut-off' cannot be loaded: .*model\.safetensors"):
            client.completions.create(model="cut-off", prompt=PROMPT, stream=stream)
    with server.http() as http:
        status = http.get("/v1/models/cut-off").json()["status"]
    assert (status["value"], status["failed"]) == ("unloaded", True)
    assert answer(client, "one")


@pytest.mark.full
def test_a_killed_engine_is_started_again_with_the_same_model(server: Server, client: openai.OpenAI) -> None:
    before = answer(client, "two")
    (engine,) = engines(server)
    engine.kill()
    until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE)

    def answers() -> bool:
        try:
            return answer(client, "two") == before
        except openai.InternalServerError:
            return False

    until(answers, PATIENCE_S)
    assert states(server)["two"] == "loaded"


@pytest.mark.full
def test_models_come_and_go_without_a_trace(server: Server, client: openai.OpenAI) -> None:
    """No process is left, and the front-end does not grow."""
    front_end, sizes = psutil.Process(server.process.pid), []
    for _ in range(3):
        for name in ("one", "two"):
            answer(client, name)
        sizes.append((front_end.memory_info().rss, front_end.num_fds(), front_end.num_threads()))
    (_, fds, _), (second, _, threads) = sizes[0], sizes[1]
    assert sizes[-1][0] < second + (8 << 20)
    assert sizes[-1][1] <= fds + 2
    assert sizes[-1][2] <= threads + 2
    assert len(engines(server)) == 1


@pytest.mark.full
def test_the_server_drains_while_one_model_streams_and_another_waits(models_dir: Path, folder: Path) -> None:
    named = [word for name in ("one", "two") for word in ("--model", str(models_dir / name))]
    server = start(None, folder, *named, *_FLAGS)
    try:
        server.wait_ready()
        one, two = (str(models_dir / name) for name in ("one", "two"))
        assert states(server) == {one: "loaded", two: "unloaded"}
        (engine,) = engines(server)
        with server.client() as client:
            stream = client.completions.create(
                model=one, prompt=PROMPT, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
            )
            next(stream)
            codes: list[int] = []

            def ask() -> None:
                body = {"model": two, "prompt": PROMPT}
                codes.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code)

            thread = threading.Thread(target=ask)
            thread.start()
            until(lambda: states(server)[two] == "loading")
            server.process.send_signal(signal.SIGTERM)
            thread.join()
            assert codes == [503]
            assert sum(bool(each.choices[0].text) for each in stream) > 0
        assert server.wait_end() == 0
        assert has_ended(engine.pid)
        assert "Traceback" not in server.log
        assert "never retrieved" not in server.log
    finally:
        end(server)


@pytest.mark.full
def test_a_preloaded_model_that_is_damaged_ends_the_server(models_dir: Path, folder: Path) -> None:
    server = start(None, folder, "--models-dir", str(models_dir), "--models-preload", "cut-off", *_FLAGS)
    try:
        assert server.wait_end() == 2
        assert "model.safetensors" in server.log
        assert "Traceback" not in server.log
    finally:
        end(server)


@pytest.mark.full
def test_a_signal_ends_a_server_that_still_loads(models_dir: Path, folder: Path) -> None:
    server = start(None, folder, "--models-dir", str(models_dir), "--models-preload", "one", *_FLAGS)
    try:
        until(lambda: bool(engines(server)), PATIENCE_S)
        began_s = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_end() == 0
        assert time.monotonic() - began_s < PATIENCE_S
        assert "Traceback" not in server.log
    finally:
        end(server)
