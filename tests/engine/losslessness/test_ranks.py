"""A model that two processes hold answers as the same model in one: drafts, structures, scores and preemption too.

Oracle: the engine in one process, token for token, in float32: sums over ranks differ in their last bits at most.

Planted bugs that these tests have caught: a residual that every rank adds; blocks of the other rank that are not
those of the step; logits of rows that rank 1 has dropped; a rank that is killed and not missed.
"""

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from gguf import GGMLQuantizationType

from faser.engine.checkpoints.adapter import read_adapter
from faser.engine.engine import Engine
from faser.errors import EngineError
from faser.types.request import Request
from faser.types.sampling import SamplingParams
from tests.checkpoints import write_tokenizer
from tests.engine.checkpoints.adapter_files import write_adapter
from tests.engine.checkpoints.family_models import write_family_model
from tests.engine.checkpoints.gguf.gguf_files import write_gguf
from tests.engine.losslessness.equality import FEATURES, answers, build, requests, write_pair
from tests.waiting import PATIENCE_S

RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "num_threads": 1}
DRAFTING: dict[str, dict[str, Any] | None] = {
    "off": None,
    "text": {"method": "ngram"},
    "model": {"method": "draft_model"},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    (folder / "target").mkdir()
    (folder / "drafter").mkdir()
    return write_pair(folder / "target", folder / "drafter")


def mixed() -> list[Request]:
    """Forty requests; each asks for another one of the features than its neighbours."""
    by_feature = [requests(**sampling) for sampling in FEATURES.values()]
    return [by_feature[i % len(by_feature)][i] for i in range(len(by_feature[0]))]


def tokens_of(engine: Engine, asked: list[Request]) -> dict[tuple[str, int], tuple[int, ...]]:
    try:
        return {key: tokens for key, (tokens, _) in answers(engine, asked).items()}
    finally:
        engine.close()


@pytest.mark.full(but=("text",))
@pytest.mark.parametrize("drafting", list(DRAFTING))
def test_two_ranks_answer_as_one(drafting: str, pair: tuple[Path, Path]) -> None:
    speculation = DRAFTING[drafting]
    if drafting == "model":
        speculation = {**(speculation or {}), "model": str(pair[1])}
    wanted = tokens_of(build(pair, None), mixed())
    engine = build(pair, speculation, **RANKS)
    found = tokens_of(engine, mixed())
    assert len(wanted) > 40
    assert found == wanted
    stats = engine.stats()
    assert stats.num_preemptions > 0
    if speculation is not None:
        assert stats.speculation is not None
        assert sum(each.accepted for each in stats.speculation.methods) > 50


@pytest.mark.parametrize("kind", ["mixture", "gguf"])
@pytest.mark.full(but=("gguf",))
def test_mixtures_and_blocks_are_divided_too(kind: str, tmp_path: Path) -> None:
    path, settings = tmp_path, dict[str, Any]()
    if kind == "mixture":
        fields = {"head_dim": 32, "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
        write_family_model(path, "qwen3_moe", fields | {"vocab_size": 512})
        write_tokenizer(path)
    else:
        path = tmp_path / "model.gguf"
        write_gguf(path, quantization=GGMLQuantizationType.F32, tokenizer="gpt2", untied=True)
        settings["quantization"] = "none"
    settings |= {"max_model_len": 200, "kv_cache_memory": 4 << 20}
    asked = [
        Request(
            request_id=str(i),
            prompt_token_ids=(*range(3, 25 + 3 * i), 30 + i),
            sampling=SamplingParams(temperature=0.9 * (i % 2), max_tokens=40, ignore_eos=True, seed=i),
            arrival_s=0.0,
        )
        for i in range(8)
    ]
    wanted = tokens_of(build((path, path), None, **settings), asked)
    assert tokens_of(build((path, path), DRAFTING["text"], **settings, **RANKS), asked) == wanted


def test_adapters_are_divided_too(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Two at a time and none; the third is loaded while steps run, and the first is dropped and loaded again."""
    adapters = [
        read_adapter(name, write_adapter(tmp_path / name, seed=seed), max_rank=8)
        for seed, name in enumerate("abc")
    ]
    asked = requests(temperature=0.0, max_tokens=16)
    early = [replace(asked[i], adapter=(*adapters[:2], None)[i % 3]) for i in range(6)]
    late = [replace(asked[i], request_id=f"late {i}", adapter=each) for i, each in enumerate(adapters)]
    late.append(replace(asked[0], request_id="plain"))
    lines: list[dict[tuple[str, int], tuple[int, ...]]] = []
    settings: list[dict[str, Any]] = [{}, RANKS]
    for each in settings:
        engine = build(pair, DRAFTING["text"], enable_lora=True, max_loras=2, max_lora_rank=8, **each)
        try:
            for adapter in adapters[:2]:
                engine.load_adapter(adapter)
            loading = threading.Thread(target=engine.load_adapter, args=adapters[2:])
            loading.start()
            found = answers(engine, early)
            loading.join()
            engine.drop_adapter(adapters[0].digest)
            engine.load_adapter(adapters[0])
            found |= answers(engine, late)
        finally:
            engine.close()
        lines.append({key: tokens for key, (tokens, _) in found.items()})
    assert lines[1] == lines[0]
    assert lines[0]["late 0", 0] == lines[0]["0", 0]
    assert lines[0]["late 0", 0] != lines[0]["plain", 0]


@pytest.mark.parametrize(
    "number, size, what",
    [
        (signal.SIGKILL, 4, r"has ended \(signal 9\)"),
        (signal.SIGSTOP, 2, "does not answer: it is stopped, or cannot be reached"),
    ],
)
def test_a_rank_that_dies_or_hangs_is_named_soon(
    number: signal.Signals, size: int, what: str, pair: tuple[Path, Path]
) -> None:
    """The others, which lose it too, are not taken for it. All listen on loopback alone."""
    engine = build(pair, None, tensor_parallel_size=size, num_threads=1)
    ranks = {int(each.cmdline()[-4]): each for each in followers()}
    assert sorted(ranks) == list(range(1, size))
    try:
        engine.step()  # idle: all ranks live
        addresses = {
            connection.laddr.ip
            for process in (psutil.Process(), *ranks.values())
            for connection in process.net_connections(kind="inet")
            if connection.status == psutil.CONN_LISTEN
        }
        assert addresses == {"127.0.0.1"}
        os.kill(ranks[size // 2].pid, number)
        began_s = time.monotonic()
        with pytest.raises(EngineError, match=f"^rank {size // 2} of the tensor-parallel model {what}$"):
            engine.step()
        assert time.monotonic() - began_s < PATIENCE_S
    finally:
        engine.close()
    assert not any(each.is_running() for each in ranks.values())


def followers() -> list[psutil.Process]:
    children = [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]
    return [each for each in children if any("follower" in part for part in each.cmdline())]
