"""The page is what the library writes of the same series, whatever has changed since. Oracle: generate_latest.

Planted bugs that these tests have caught: a change that is not seen; labels that change and keep their old text;
comments of families without series that are lost.
"""

import random
import time
from dataclasses import replace

from prometheus_client import generate_latest

from faser.config.speculation import SpeculationConfig
from faser.metrics.replicas import ReplicaMetrics
from faser.metrics.server import Metrics
from faser.types.answer import FinishReason, SpeculationSummary
from faser.types.engine import EngineState
from faser.types.request import SpeculationParams
from faser.types.statistics import EngineStats, PaidRatio, SpeculationStats


def change(metrics: Metrics, draw: random.Random, stats: EngineStats) -> EngineStats:
    """Something happens."""
    match draw.randrange(7):
        case 0:
            metrics.rejected("queue_full")
        case 1:
            metrics.tokens(3, draw.random())
        case 2:
            finish(metrics, draw)
        case 3:
            load = PaidRatio((1, draw.randrange(1, 4)), 1.1, 1.0, 1.2, drafts=draw.choice([True, None]))
            speculation = SpeculationStats(
                policy=draw.choice(["faser", "off"]), method="auto", paid=(load,) * draw.randrange(2)
            )
            stats = replace(stats, num_running=draw.randrange(9), num_steps=stats.num_steps + 1)
            metrics.engine(replace(stats, speculation=speculation))
        case 4:
            metrics.engine_state(draw.choice(list(EngineState)))
        case 5:
            metrics.cache_config(
                block_size=16, num_gpu_blocks=draw.randrange(1, 99), cache_dtype="bfloat16", max_model_len=64
            )
        case 6:
            metrics.admitted(n=2, max_tokens=draw.randrange(9), prompt_tokens=4)
    return stats


def finish(metrics: Metrics, draw: random.Random) -> None:
    metrics.finished(
        draw.choice([FinishReason.STOP, FinishReason.ABORT]),
        ttft_s=draw.random(),
        e2e_s=2.0,
        queue_s=0.1,
        prefill_s=0.1,
        decode_s=draw.random(),
        prompt_tokens=5,
        cached_tokens=2,
        generation_tokens=draw.randrange(1, 30),
        longest_generation=9,
        preemptions=0,
    )
    summary = SpeculationSummary(policy="faser", verified=9, accepted=draw.randrange(9))
    metrics.speculation.finished(SpeculationParams(), [summary], ttft_s=0.1, tpot_s=None)


def test_the_page_is_what_the_library_writes() -> None:
    draw, stats = random.Random(4), EngineStats()
    each = [Metrics(model_name='a "b"', max_model_len=64, engine=str(number)) for number in range(2)]
    joined = ReplicaMetrics(each)
    for _ in range(60):
        metrics = draw.choice(each)
        stats = change(metrics, draw, stats)
        assert metrics.render() == generate_latest(metrics.page)
        assert joined.render() == generate_latest(joined._joined.collector)


def test_a_scrape_of_an_idle_server_costs_next_to_nothing() -> None:
    metrics = Metrics(model_name="tiny", max_model_len=8192, speculation=SpeculationConfig())
    size = len(metrics.render())
    began_s = time.process_time()
    for _ in range(100):
        assert len(metrics.render()) == size
    idle_s = time.process_time() - began_s
    began_s = time.process_time()
    for _ in range(5):
        generate_latest(metrics.page)
    assert idle_s / 100 < 0.1 * (time.process_time() - began_s) / 5
