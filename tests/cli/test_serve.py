"""`faser serve` with a tiny model, in a process of its own."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from faser.cli.main import main
from faser.cli.serve import SYNTHETIC_BANNER
from faser.cli.server import DEFAULT_MODEL_NOTE
from faser.engine.checkpoints.embedded import SMOLLM2


def test_a_served_model_answers_and_a_signal_ends_it(tiny_checkpoint: Path) -> None:
    flags = ["--port", "0", "--backend", "torch", "--served-model-name", "tiny", "--api-key", "k", "-pp", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "faser", "serve", str(tiny_checkpoint), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    watchdog = threading.Timer(60, process.kill)
    watchdog.start()
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        found = re.fullmatch(
            r"faser serve: ready at (http://127\.0\.0\.1:\d+) · tiny · float32 · \d+ KV tokens · "
            r"\d+ threads? \(torch\) · [\d.]+ s\n",
            ready,
        )
        assert found is not None, ready
        body = {"prompt": "hello", "max_tokens": 3, "ignore_eos": True}
        url = found[1]
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 401
        answer = httpx.post(f"{url}/v1/completions", json=body, headers={"Authorization": "Bearer k"}, timeout=30)
        assert answer.json()["model"] == "tiny"
        assert answer.json()["usage"]["completion_tokens"] == 3
        (card,) = httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer k"}).json()["data"]
        assert (card["id"], card["root"]) == ("tiny", str(tiny_checkpoint))
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate()
        assert process.returncode == 0, errors
        assert "Traceback" not in errors
        assert re.search(
            r"faser serve: Llama \(LlamaForCausalLM\) · [\d.]+K parameters · float32, [\d.]+KiB on disk, "
            r"[\d.]+KiB in memory · KV cache: [\d,]+ tokens \([\d.e+]+ x the 2048-token context\)\n",
            errors,
        )
    finally:
        watchdog.cancel()
        process.kill()
        process.communicate()


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.full(but=("True",))
def test_the_log_says_that_the_default_model_is_a_small_one(
    tiny_checkpoint: Path, tmp_path: Path, is_named: bool
) -> None:
    """The context is too long for the model, so the server never starts."""
    installed = tmp_path / "models" / SMOLLM2.name
    installed.parent.mkdir()
    installed.symlink_to(tiny_checkpoint)
    named = [str(installed)] if is_named else []
    done = subprocess.run(
        [sys.executable, "-m", "faser", "serve", *named, "--port", "0", "--max-model-len", "9M"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "FASER_CACHE_DIR": str(tmp_path)},
    )
    assert "--max-model-len is 9437184" in done.stderr
    assert (f"faser serve: {DEFAULT_MODEL_NOTE}\n" in done.stderr) != is_named


def test_warnings_and_the_synthetic_banner_come_before_the_model_is_loaded(tiny_checkpoint: Path) -> None:
    """The context is too long for the model, so the server never starts."""
    config = '{"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5], "enforce_eager": true}'
    flags = ["--port", "0", "--max-model-len", "9M", "--speculative-config", config]
    done = subprocess.run(
        [sys.executable, "-m", "faser", "serve", str(tiny_checkpoint), *flags],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert "warning: --speculative-config: 'enforce_eager' has no effect: " in done.stderr
    assert "SYNTHETIC ACCEPTANCE" in done.stderr
    assert {len(line) for line in SYNTHETIC_BANNER.splitlines()} == {80}


def test_an_error_after_the_log_has_begun_is_a_line_of_it(tiny_checkpoint: Path) -> None:
    config = '{"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5], "enforce_eager": true}'
    flags = ["--port", "0", "--max-model-len", "9M", "--speculative-config", config, "--log-format", "json"]
    done = subprocess.run(
        [sys.executable, "-m", "faser", "serve", str(tiny_checkpoint), *flags],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    said = [json.loads(line) for line in done.stderr.splitlines()]
    assert said[0]["message"].startswith("warning: --speculative-config: 'enforce_eager' has no effect: ")
    assert said[1]["message"].startswith("synthetic acceptance: ")
    assert said[-1]["message"].startswith("--max-model-len is 9437184; ")
    assert said[-1]["level"] == "CRITICAL"


def test_settings_that_do_not_fit_the_model_end_with_status_2(tiny_checkpoint: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "faser", "serve", str(tiny_checkpoint), "--port", "0", "--max-model-len", "9M"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert re.search(r"^faser serve: --max-model-len is 9437184; ", done.stderr, re.MULTILINE)


@pytest.mark.parametrize("source", ["variable", "file"])
@pytest.mark.parametrize(
    "settings, culprit, problem",
    [
        ({"api-key-file": ""}, "api-key-file", "it contains no key"),
        ({"chat-template": "{% for"}, "chat-template", "the chat template does not compile: "),
        ({"ssl-certfile": "no", "ssl-keyfile": "no"}, "ssl-certfile", "it must hold a certificate in PEM form: "),
    ],
)
def test_a_file_that_cannot_be_used_is_named_by_the_variable_or_key_that_gave_it(
    settings: dict[str, str],
    culprit: str,
    problem: str,
    source: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = []
    for name, content in settings.items():
        (tmp_path / name).write_text(content)
    if source == "file":
        config = tmp_path / "config.yaml"
        config.write_text("".join(f"{name}: {tmp_path / name}\n" for name in settings))
        flags, label = ["--config", str(config)], f"{config}: {culprit}"
    else:
        for name in settings:
            monkeypatch.setenv(variable(name), str(tmp_path / name))
        label = variable(culprit)
    assert main(["serve", "/no/such/model", "--port", "0", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"faser serve: {label} is {tmp_path / culprit}; {problem}")


def test_a_port_in_use_is_named_by_the_variable_that_gave_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("FASER_PORT", str(port))
        assert main(["serve", "/no/such/model"]) == 2
    assert capsys.readouterr().err.startswith(
        f"faser serve: FASER_PORT is {port}; 127.0.0.1:{port} cannot be used"
    )


def variable(flag: str) -> str:
    return "FASER_" + flag.upper().replace("-", "_")


def test_engines_whose_kv_events_would_share_a_port_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    events = {"enable_kv_cache_events": True, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}
    flags = ["serve", "--data-parallel-size", "2", "--kv-events-config", json.dumps(events)]
    assert main(flags) == 2
    assert "replay_endpoint of engine 0 and endpoint of engine 1 are both tcp://*:5558" in capsys.readouterr().err
