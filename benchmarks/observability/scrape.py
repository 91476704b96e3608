"""What a scrape of /metrics takes, by what has changed since the last one; and by the library alone.

    python -m benchmarks.observability.scrape OUT.json

Milliseconds, medians of 60 scrapes, in a process of its own without a server.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

from prometheus_client import generate_latest

from benchmarks.runner import about, command_line, write_json
from faser.metrics.server import Metrics
from faser.types import EngineStats, FinishReason, SpeculationStats

_SCRAPES = 60
_STATS = EngineStats(speculation=SpeculationStats(policy="faser", method="auto"))


def median_ms(change: Callable[[], None], scrape: Callable[[], bytes]) -> float:
    times = []
    for _ in range(_SCRAPES):
        change()
        began_s = time.perf_counter()
        scrape()
        times.append(time.perf_counter() - began_s)
    return round(1e3 * statistics.median(times), 4)


def served(metrics: Metrics) -> None:
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


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    metrics = Metrics(model_name="model", max_model_len=8192)
    metrics.render()
    found = {
        "nothing has changed": median_ms(lambda: None, metrics.render),
        "the engine has reported": median_ms(lambda: metrics.engine(_STATS), metrics.render),
        "a request has ended too": median_ms(lambda: served(metrics), metrics.render),
        "all written by the library": median_ms(lambda: None, lambda: generate_latest(metrics.page)),
    }
    write_json(given.out, {**about("benchmarks.observability.scrape"), "ms": found})


if __name__ == "__main__":
    main()
