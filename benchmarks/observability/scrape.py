"""Time of a scrape of /metrics, by what has changed, and by the library alone; its cost to a server.

    python -m benchmarks observability.scrape OUT.json [--questions QUESTIONS.jsonl] [--rounds 7] [--model MODEL]

`ms`: medians of 60 scrapes, in a process of its own without a server. With questions, of Spec-Bench: `served`, the
output tokens a second of a server that is scraped twenty times a second over those of the same server that is not,
by requests at once; the runs of a round have the same questions and take turns. The scraper is a thread of this
program, so its own work on the same cores counts too.
"""

import contextlib
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
from prometheus_client import generate_latest

from benchmarks.prompts import load_prompts, take
from benchmarks.runner import about, command_line, interleaved, write_json
from benchmarks.servers import Asking, Run, ask_all, frozen_servers
from faser.metrics.server import Metrics
from faser.types.answer import FinishReason
from faser.types.statistics import EngineStats, SpeculationStats

_SCRAPES = 60
_EVERY_S = 0.05
_REQUESTS = {1: 8, 16: 48}  # of a run, by requests at once
_STATS = EngineStats(speculation=SpeculationStats(policy="faser", method="auto"))


def median_ms(change: Callable[[], None], scrape: Callable[[], bytes]) -> float:
    times = []
    for _ in range(_SCRAPES):
        change()
        began_s = time.perf_counter()
        scrape()
        times.append(time.perf_counter() - began_s)
    return round(1e3 * statistics.median(times), 4)


def answered(metrics: Metrics) -> None:
    """A request has come, was answered and has ended, and the engine has reported."""
    metrics.engine(_STATS)
    metrics.tokens(1, 0.1)
    metrics.admitted(n=1, max_tokens=8, prompt_tokens=8)
    metrics.finished(
        FinishReason.STOP,
        ttft_s=0.1,
        e2e_s=2.0,
        queue_s=0.1,
        prefill_s=0.1,
        decode_s=1.0,
        prompt_tokens=8,
        cached_tokens=0,
        generation_tokens=8,
        longest_generation=8,
        preemptions=0,
    )


@contextlib.contextmanager
def scraped(url: str) -> Iterator[list[float]]:
    """The server is scraped meanwhile; the list fills with the seconds that each scrape took."""
    done, seconds = threading.Event(), list[float]()

    def scrape() -> None:
        with httpx.Client(base_url=url, trust_env=False) as http:
            while not done.wait(_EVERY_S):
                began_s = time.perf_counter()
                http.get("/metrics").raise_for_status()
                seconds.append(time.perf_counter() - began_s)

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield seconds
    finally:
        done.set()
        thread.join()


def served(questions: Path, rounds: int, flags: tuple[str, ...]) -> dict[str, Any]:
    prompts = load_prompts(questions)
    taken: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        frozen_servers({"server": flags}, Path(folder), max(_REQUESTS)) as servers,
        servers["server"].awake(),
    ):
        url = servers["server"].url

        def run(labels: Any, arm: str, number: int) -> Run:
            at_once = labels["requests at once"]
            asking = Asking(
                concurrency=at_once,
                temperature=0,
                ignore_eos=True,
                max_tokens=64,
                salt=f"{at_once}/{number}/{arm}",
            )
            asked = take(prompts, number * _REQUESTS[at_once], _REQUESTS[at_once])
            if arm == "not scraped":
                return ask_all(url, asked, asking)
            with scraped(url) as seconds:
                found = ask_all(url, asked, asking)
            taken.extend(seconds)
            return found

        cells = interleaved(
            [{"requests at once": each} for each in _REQUESTS], ["not scraped", "scraped"], rounds, run
        )
    ratios = {
        str(cell.labels["requests at once"]): asdict(
            cell.ratio("scraped", "not scraped", lambda run: run.tokens_per_s)
        )
        for cell in cells
    }
    return {"scraped over not": ratios, "scrape ms, median": round(1e3 * statistics.median(taken), 2)}


def main() -> None:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("out", type=Path)
    add("--questions", type=Path, help="of Spec-Bench: measure a server too")
    add("--rounds", type=int, default=7)
    add("--model")
    given = parser.parse_args()
    metrics = Metrics(model_name="model", max_model_len=8192)
    metrics.render()
    found = {
        "nothing has changed": median_ms(lambda: None, metrics.render),
        "the engine has reported": median_ms(lambda: metrics.engine(_STATS), metrics.render),
        "a request has ended too": median_ms(lambda: answered(metrics), metrics.render),
        "all written by the library": median_ms(lambda: None, lambda: generate_latest(metrics.page)),
    }
    report: dict[str, Any] = {**about("observability.scrape"), "ms": found}
    if given.questions:
        report["served"] = served(given.questions, given.rounds, (given.model,) if given.model else ())
    write_json(given.out, report, show=True)
