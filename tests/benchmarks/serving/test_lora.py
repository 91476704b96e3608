"""The benchmark of adapters: its files are adapters of the model, and a gap is found where it is."""

from pathlib import Path

import pytest

from benchmarks.models.random_adapter import random_adapter
from benchmarks.peers.load import Exchange
from benchmarks.serving.lora import _largest_gap_ms
from faser.engine.checkpoints.adapter import open_adapter


@pytest.mark.parametrize("name", ["adapter", "adapter.gguf"])
def test_a_random_adapter_has_all_linear_layers(tiny_checkpoint: Path, tmp_path: Path, name: str) -> None:
    random_adapter(tmp_path / name, tiny_checkpoint, rank=8, seed=0)
    found = open_adapter(tmp_path / name, max_rank=8)
    assert found.rank == 8
    assert {each.scale for each in found.parts.values()} == {1.0}
    assert len(found.parts) == 7 * len({each.split(".")[2] for each in found.parts})


def test_a_gap_counts_if_it_overlaps_with_the_load() -> None:
    def stream(*times_s: float) -> Exchange:
        return Exchange(sent_s=0.0, token_times_s=times_s, prompt_tokens=1, output_tokens=len(times_s))

    streams = [stream(1.0, 1.1, 1.4, 1.5, 2.5), stream(0.0, 1.2, 1.3)]
    assert _largest_gap_ms(streams, 1.25, 1.35) == pytest.approx(300)
    assert _largest_gap_ms(streams, 1.15, 1.25) == pytest.approx(1200)
    assert _largest_gap_ms(streams, 2.0, 2.1) == pytest.approx(1000)
