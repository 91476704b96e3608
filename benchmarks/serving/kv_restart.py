"""Time to the first token of a long session after a restart, with KV on disk and without.

    python -m benchmarks serving.kv_restart --model MODEL [--tokens 20000] [--rounds 2] [--out FILE]

A session of that many tokens is answered by a server with a new folder for KV. Then a server that is started again
with the folder gets the session with one more turn, and so does one without a folder. Sessions are composed of the
questions in the file that SPEC_BENCH_QUESTIONS names, so hardly anything in them repeats; every round has its own.
"""

import os
import tempfile
from pathlib import Path
from statistics import median

import httpx

from benchmarks.prompts import load_prompts
from benchmarks.runner import PROMPTS_VARIABLE, Json, about, command_line, write_json
from benchmarks.servers import Server, faser_recipe
from benchmarks.serving.state_snapshots import ask

_TIMEOUT_S = 1800.0
_CHARS = 4  # of a token, at least, in these texts
_NEXT = "\n\nAnd in one sentence?"


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=20_000, help="of a session (default 20000)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    questions = [each.text for each in load_prompts(Path(os.environ[PROMPTS_VARIABLE]))]
    with tempfile.TemporaryDirectory() as folder:
        rounds = [
            _round(options.model, options.tokens, questions, Path(folder), at) for at in range(options.rounds)
        ]
    cold, disk = (median(each[arm]["ttft_s"] for each in rounds) for arm in ("cold", "disk"))
    results = {
        **about("serving.kv_restart"),
        "unit": "seconds to the first token",
        "cold": round(cold, 3),
        "disk": round(disk, 3),
        "times sooner": round(cold / disk, 1),
        "rounds": rounds,
    }
    print(results)
    if options.out is not None:
        write_json(options.out, results)


def _round(model: str, num_tokens: int, questions: list[str], folder: Path, number: int) -> Json:
    """Ask for the session, and then for it with one more turn: from a folder, and without one."""
    start = number * len(questions) // 2
    text = "\n\n".join(questions[start:] + questions[:start])[: num_tokens * _CHARS]
    kept = ("--kv-cache-dir", str(folder / f"kv-{number}"))
    before = _asked(model, kept, folder, text, number)
    arms = {"disk": kept, "cold": ()}
    order = [*arms] if number % 2 else [*arms][::-1]
    return {"first": before, **{arm: _asked(model, arms[arm], folder, text + _NEXT, number) for arm in order}}


def _asked(model: str, flags: tuple[str, ...], folder: Path, text: str, number: int) -> Json:
    with Server(faser_recipe("server", (model, *flags), folder)) as server:
        server.wait_until_healthy(route="/ready")
        with httpx.Client(base_url=server.url, timeout=_TIMEOUT_S, trust_env=False) as client:
            ask(client, "Say hello.", f"warm-up {number}")
            return ask(client, text, f"session {number}")
