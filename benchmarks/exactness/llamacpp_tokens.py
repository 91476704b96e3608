"""Tokens of a GGUF file beside llama.cpp's: of prompts, and of greedy answers to them.

    python -m benchmarks exactness.llamacpp_tokens LLAMA_SERVER MODEL.gguf QUESTIONS.jsonl OUT.json [--count 16]
        [--tokens 64]

llama-server tokenises the same texts and answers the same tokens, one prompt at a time and with no cache. The two
round differently, so answers may part where two tokens are nearly as likely: `gap` is by how much llama.cpp's
choice is likelier than FASER's there, in nats, by llama.cpp's own probabilities. Needs no chat template: the texts
are the questions as they are.
"""

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.engines import answers, opened
from benchmarks.prompts import load_prompts
from benchmarks.runner import about, command_line, write_json
from faser.config.engine import EngineConfig
from faser.engine.text.tokenizer import load_tokenizer
from faser.types.request import Request
from faser.types.sampling import SamplingParams

_READY_S = 180
_LIKELIEST = 20
_AT_ONCE = 4


class LlamaServer:
    """llama-server with one slot. Raises TimeoutError where it does not get ready."""

    def __init__(self, program: Path, model: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        options = ["--host", "127.0.0.1", "--port", str(port), "-c", "4096", "-np", "1", "-t", "2"]
        command = [str(program), "-m", str(model), *options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def __enter__(self) -> "LlamaServer":
        ends_s = time.monotonic() + _READY_S
        while time.monotonic() < ends_s:
            try:
                with urllib.request.urlopen(f"{self._url}/health", timeout=2):
                    return self
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.5)
        self._process.kill()
        raise TimeoutError(f"llama-server is not ready after {_READY_S} s")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def tokenize(self, text: str) -> list[int]:
        found: list[int] = self._post("/tokenize", content=text, add_special=True, parse_special=True)["tokens"]
        return found

    def answer(self, tokens: list[int], count: int) -> list[int]:
        """Greedy, across tokens that end answers."""
        asked = {"n_predict": count, "temperature": 0, "return_tokens": True, "ignore_eos": True}
        found: list[int] = self._post("/completion", prompt=tokens, cache_prompt=False, **asked)["tokens"]
        return found

    def log_probabilities(self, tokens: list[int]) -> dict[int, float]:
        """Return the log probabilities of the likeliest tokens that may follow these."""
        asked = {"n_predict": 1, "temperature": 0, "n_probs": _LIKELIEST, "ignore_eos": True}
        found = self._post("/completion", prompt=tokens, cache_prompt=False, **asked)
        (first,) = found["completion_probabilities"]
        return {each["id"]: each["logprob"] for each in first["top_logprobs"]}

    def _post(self, path: str, **body: Any) -> dict[str, Any]:
        request = urllib.request.Request(
            self._url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            found: dict[str, Any] = json.load(answer)
            return found


def main() -> None:
    parser = command_line(__doc__)
    for name in ("llama_server", "model", "questions", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--count", type=int, default=16, help="questions, spread over the file (default 16)")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer (default 64)")
    options = parser.parse_args()
    questions = load_prompts(options.questions)
    texts = [each.text for each in questions[:: max(len(questions) // options.count, 1)][: options.count]]
    tokenizer = load_tokenizer(options.model)
    ours = [list(tokenizer.encode(text)) for text in texts]
    said = _answers(options.model, ours, options.tokens)
    with LlamaServer(options.llama_server, options.model) as server:
        alike = [server.tokenize(text) == tokens for text, tokens in zip(texts, ours, strict=True)]
        rows = [_row(server, tokens, found) for tokens, found in zip(ours, said, strict=True)]
    result = {
        **about("exactness.llamacpp_tokens"),
        "model": options.model.name,
        "prompts": len(texts),
        "prompts_tokenised_alike": sum(alike),
        "answers_alike": sum(row["alike"] == options.tokens for row in rows),
        "share_before_the_first_difference": sum(row["alike"] for row in rows) / (len(rows) * options.tokens),
        "rows": rows,
    }
    write_json(options.out, result, show=True)


def _answers(model: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    config = EngineConfig(
        model=str(model), speculative_config={"policy": "off"}, max_num_seqs=_AT_ONCE, max_model_len=4096
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    asked = [
        Request(request_id=str(place), prompt_token_ids=tuple(tokens), sampling=sampling, arrival_s=place)
        for place, tokens in enumerate(prompts)
    ]
    engine, found = opened(config).engine, dict[str, tuple[int, ...]]()
    for at in range(0, len(asked), _AT_ONCE):
        found |= answers(engine, asked[at : at + _AT_ONCE])
    return [list(found[str(place)]) for place in range(len(prompts))]


def _row(server: LlamaServer, prompt: list[int], ours: list[int]) -> dict[str, Any]:
    theirs = server.answer(prompt, len(ours))
    alike = next((at for at, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other), len(ours))
    if alike == len(ours):
        return {"prompt_tokens": len(prompt), "alike": alike, "gap": None}
    likeliest = server.log_probabilities([*prompt, *ours[:alike]])
    here, there = likeliest.get(ours[alike]), likeliest.get(theirs[alike])
    gap = None if here is None or there is None else round(there - here, 4)
    return {"prompt_tokens": len(prompt), "alike": alike, "gap": gap}
