"""The benchmark of adapters: its files are adapters of the model, requests name them, and gaps are found."""

from pathlib import Path

import pytest

from benchmarks.cells import Cell
from benchmarks.models.random_adapter import random_adapter
from benchmarks.peers.load import Exchange
from benchmarks.prompts import Prompt
from benchmarks.servers import Asking, Run
from benchmarks.serving.lora import FASER, LLAMA, VLLM, _largest_gap_ms, check, figures, table
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


def test_requests_name_adapters_in_turn_and_an_arm_is_compared_with_its_own_system() -> None:
    def asked(arm: str, number: int) -> dict[str, object]:
        in_turn = (FASER | LLAMA | VLLM)[arm].in_turn
        asking = Asking(concurrency=1, temperature=0, ignore_eos=True, max_tokens=1, salt="s", in_turn=in_turn)
        return asking.body(Prompt(question_id=1, category="c", text="t"), number)

    assert "model" not in asked("none", 1)
    assert [asked("one", at)["model"] for at in (0, 1)] == ["adapter-0"] * 2
    assert [asked("vllm eight", at)["model"] for at in (0, 7, 8)] == ["adapter-0", "adapter-7", "adapter-0"]
    assert asked("llama.cpp eight", 9)["lora"] == [{"id": 1, "scale": 1.0}]

    def run(tokens: int) -> Run:
        return Run(tokens=tokens, seconds=2.0, drafted=0, accepted=0, texts=(), paid={})

    rates = {"off": (20, 40, 60), "none": (20, 20, 20), "one": (10, 30, 60), "eight": (10, 10, 10)}
    rates |= {
        "llama.cpp": (8, 8, 8),
        "llama.cpp none": (8, 8, 8),
        "llama.cpp one": (4, 2, 4),
        "llama.cpp eight": (2, 2, 2),
    }
    cell = Cell(
        labels={"concurrency": 1}, runs={arm: [run(each) for each in found] for arm, found in rates.items()}
    )
    arms = figures(cell, FASER | LLAMA)["arms"]
    assert arms["off"] == {"tokens_per_s": {"median": 20, "low": 10, "high": 30}, "rounds": [10, 20, 30]}
    assert arms["one"]["ratio"] == {"median": 0.75, "low": 0.5, "high": 1.0}
    assert arms["llama.cpp one"]["ratio"] == {"median": 0.5, "low": 0.25, "high": 0.5}
    assert "| one | 15.0 (0.75x) |" in table([cell], FASER | LLAMA)


def test_adapters_that_change_no_answer_end_the_measurement() -> None:
    def run(*texts: str) -> Run:
        return Run(tokens=1, seconds=1.0, drafted=0, accepted=0, texts=texts, paid={})

    runs = {"off": [run("a", "b")], "none": [run("a", "b")], "one": [run("a", "c")], "eight": [run("d", "b")]}
    check([Cell(labels={}, runs=runs)], FASER)
    with pytest.raises(ValueError, match="eight answers as off does"):
        check([Cell(labels={}, runs={**runs, "eight": runs["off"]})], FASER)
