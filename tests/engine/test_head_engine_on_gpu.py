"""An engine on the emulated device whose head runs in CUDA graphs: its answers are those without speculation.

Oracle: the same engine with the policy off, token for token, where sequences join and end, and
prompts that begin alike share blocks. The device is that of tests/kernels/cuda/fake_graph.py; steps of several row
counts may round otherwise, so the pair is one whose tokens are far apart (test_head_engine.py).
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from faser.config.engine import EngineConfig
from faser.engine.build import assemble
from faser.engine.engine import Engine
from faser.engine.execution.overlap.lanes import DeviceLanes
from faser.engine.execution.startup.executor import EngineParts
from faser.engine.execution.startup.files import find_models
from faser.engine.execution.startup.leader import NoRanks
from faser.engine.execution.startup.memory import kv_shapes
from faser.engine.execution.startup.models import load_models, start_models
from faser.engine.structure.compiler import GrammarCompiler
from faser.engine.text.tokenizer import load_tokenizer
from tests.engine.test_head_engine import STEP_TIMES, accepted, answers, write_agreeing
from tests.kernels.cuda.fake_graph import fake_backend


def engine_on_gpu(path: Path, speculation: dict[str, Any], **settings: Any) -> Engine:
    chosen: dict[str, Any] = {
        "device": "cuda:0",
        "backend": "flashinfer",
        "dtype": "bfloat16",
        "max_model_len": 96,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 32,
        "kv_cache_memory": 1 << 20,
        "speculative_config": speculation,
        "cudagraph_capture_sizes": (2, 8),
    }
    config, files = find_models(EngineConfig(**chosen | settings), path, _quiet)
    backend = fake_backend()
    target, drafting = load_models(config, files, backend, _quiet)
    shapes = kv_shapes(config, files, files[0].max_positions)
    started, started_drafting = start_models(config, target, drafting, shapes, _quiet, on=DeviceLanes())
    parts = EngineParts(
        config=config,
        grammars=GrammarCompiler(
            lambda: load_tokenizer(path), vocab_size=files[0].spec.vocab_size, eos_token_ids=(0,)
        ),
        target=started,
        drafting=tuple(started_drafting),
        lanes=None,
        ngram_model=None,
        text_index_bytes=0,
        ranks=NoRanks(),
    )
    return assemble(parts, _quiet, step_times=STEP_TIMES).engine


def _quiet(_stage: str, _done: int, _total: int) -> None:
    pass


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.full(but=("0.0",))
def test_drafts_of_a_head_in_graphs_change_no_answer(tmp_path: Path, temperature: float) -> None:
    path, head = write_agreeing(tmp_path, torch.bfloat16, num_heads=2, num_kv_heads=1)
    asked: dict[str, Any] = {"count": 4, "lengths": (10, 4)}
    wanted = answers(engine_on_gpu(path, {"policy": "off"}), temperature, **asked)
    engine = engine_on_gpu(path, {"policy": "fixed", "num_speculative_tokens": 3, "model": str(head)})
    assert answers(engine, temperature, **asked) == wanted
    verified, kept = accepted(engine)
    assert verified > 30
    if temperature == 0.0:
        assert kept == verified
