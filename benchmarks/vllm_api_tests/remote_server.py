"""RemoteOpenAIServer: what vLLM's tests start their server with; this one starts `faser serve`.

The tests name models of their own. Every server serves one model, under the name that its test asks for.
"""

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import anthropic
import openai

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
