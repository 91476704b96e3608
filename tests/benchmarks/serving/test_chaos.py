"""Chaos on the tiny model: all promises are kept. Ten minutes of it: python -m benchmarks serving.chaos."""

from pathlib import Path

import pytest

from benchmarks.serving.chaos import Wanted, run
from benchmarks.serving.chaos_report import broken_promises

# The reference arithmetic on one thread, and a KV cache so small that samples are preempted.
_FLAGS = (
    *("--dtype", "float32", "--backend", "torch", "--num-threads", "1"),
    *("--max-model-len", "2048", "--kv-cache-memory", "2MiB", "--speculative-policy", "off"),
)


@pytest.mark.alone
@pytest.mark.parametrize("seconds, kills", [(24, 1), (60, 2)])
@pytest.mark.full(but=("24-1",))
def test_chaos_breaks_no_promise(seconds: int, kills: int, tiny_checkpoint: Path) -> None:
    flags = (str(tiny_checkpoint), *_FLAGS)
    wanted = Wanted(seconds=seconds, clients=64, seed=0, kills=kills, hangs=1, flags=flags, engine_timeout_s=5.0)
    outcome = run(wanted)
    # So short a run is all warm-up: memory may double, and other programs may be what delays a start.
    assert broken_promises(outcome, ready_bar_s=90.0, growth_bar=1.0) == []
    assert [fault.kind for fault in outcome.faults] == [*["kill"] * (kills - 1), "hang", "kill"]
    assert {action for action, _ in outcome.counts} >= {
        "answer",
        "stream",
        "cancel",
        "stalled_body",
        "huge_prompt",
    }
