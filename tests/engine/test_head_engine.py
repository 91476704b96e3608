"""Engines whose drafter is a head that reads the model's hidden states.

Oracle: the engine without speculation, token for token, with a KV pool that is too small for all sequences, so
that sequences are preempted, and with prompts that begin alike and are computed in chunks.

Two pairs. Of the first, model and head are random, so that nearly all drafts are refused. Of the second, the
model's next token is a function of the last one, which the head knows: if it gets the states that it should get,
all its drafts are accepted.

Planted bugs that these tests have caught: states of refused draft tokens are kept; states of other rows; steps
after the first one capture nothing.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from faser.config.engine import EngineConfig
from faser.distill.speculators_writer import write_speculators
from faser.engine.build import Built, build
from faser.engine.contract.step_times import Role, StepTimes
from faser.engine.engine import Engine
from faser.engine.execution.drafting.heads import tensors
from faser.errors import ModelError
from faser.types.request import Request, SpeculationParams
from faser.types.sampling import SamplingParams
from tests.checkpoints import VOCAB_SIZE, llama_shapes, random_weights, tiny_llama_config, write_checkpoint
from tests.engine.execution.drafting.seeded_heads import (
    head_layers,
    head_spec,
    write_seeded,
)

STEP_TIMES = StepTimes.proportional(step_s=1e-2, pass_s=1e-3)
STATE_LAYERS = (2, 3, 6)
WIDTH = 128  # of the pair that agrees: one number for each token


def built(path: Path, speculation: dict[str, Any], **settings: Any) -> Built:
    wrap = settings.pop("wrap_drafter", lambda drafter: drafter)
    chosen: dict[str, Any] = {
        "backend": "native",
        "device": "cpu",
        "num_threads": 2,
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "kv_cache_memory": 1 << 20,
        "speculative_config": speculation,
    }
    config = EngineConfig(**chosen | settings)
    return build(config, path, lambda *_: None, step_times=STEP_TIMES, wrap_drafter=wrap)


def answers(
    engine: Engine, temperature: float, *, count: int = 8, lengths: tuple[int, int] = (60, 12)
) -> list[tuple[int, ...]]:
    """Two turns of some conversations. Prompts begin alike, so that blocks are shared."""
    lines = [(*range(3 + i // 2, 36), 40 + i) for i in range(count)]
    for turn, most in enumerate(lengths):
        said: dict[str, list[int]] = {}
        for i, line in enumerate(lines):
            engine.add(
                Request(
                    request_id=f"{turn} {i}",
                    prompt_token_ids=line,
                    sampling=SamplingParams(temperature=temperature, max_tokens=most + i, ignore_eos=True, seed=i),
                    arrival_s=float(i),
                )
            )
        while engine.has_work():
            for delta in engine.step():
                assert delta.error is None, delta.error
                said.setdefault(delta.request_id, []).extend(delta.token_ids)
        lines = [(*line, *said[f"{turn} {i}"], 7) for i, line in enumerate(lines)]
    return lines


def checkpoint(directory: Path, dtype: str) -> Path:
    """A model whose keys and values of eight sequences of 94 tokens do not fit into 1 MiB."""
    more = {"num_hidden_layers": 6, "num_key_value_heads": 4, "torch_dtype": dtype}
    config = tiny_llama_config() | more
    write_checkpoint(directory, config, random_weights(llama_shapes(config)))
    return directory


def accepted(engine: Engine, method: str = "eagle3") -> tuple[int, int]:
    """Tokens verified and accepted."""
    speculation = engine.stats().speculation
    assert speculation is not None
    (found,) = (each for each in speculation.methods if each.method == method)
    return found.drafted - found.pruned, found.accepted


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.full(but=("0.9-float32", "0.0-bfloat16"))
def test_drafts_of_a_head_change_no_answer(tmp_path: Path, dtype: str, temperature: float) -> None:
    path, head = checkpoint(tmp_path / "model", dtype), tmp_path / "head"
    write_seeded(head, head_spec(state_layers=STATE_LAYERS))
    wanted = answers(built(path, {"policy": "off"}).engine, temperature)
    for asked in ({"method": "eagle3"}, {}):
        drafting = {"policy": "fixed", "num_speculative_tokens": 3, "model": str(head)} | asked
        engine = built(path, drafting).engine
        assert answers(engine, temperature) == wanted
        assert accepted(engine)[0] > 500
        assert engine.stats().num_preemptions > 0 or dtype == "bfloat16", "the pool is meant to be too small"


def write_agreeing(
    folder: Path, dtype: torch.dtype, *, num_heads: int = 4, num_kv_heads: int = 4
) -> tuple[Path, Path]:
    """A model in which token t is followed by follows[t], and a head that knows follows.

    The model's stream is the token's own place in it, in every layer. The head's feed-forward adds the place of
    the following token and takes its own away, so that its output is what its features would be one token later.
    """
    config = tiny_llama_config() | {
        "vocab_size": WIDTH,
        "hidden_size": WIDTH,
        "num_hidden_layers": 6,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": WIDTH // num_heads,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    follows = torch.randperm(WIDTH, generator=torch.Generator().manual_seed(3))
    places = torch.eye(WIDTH)
    weights = random_weights(llama_shapes(config))
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
        elif "norm" in name:
            weight.fill_(1.0)
    following = torch.zeros(WIDTH, WIDTH).index_copy_(0, follows, places)  # row follows[t] is the place of t
    weights |= {"model.embed_tokens.weight": places, "lm_head.weight": following / 2}
    write_checkpoint(folder / "model", config, {name: each.to(dtype) for name, each in weights.items()})
    attention: dict[str, Any] = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": WIDTH // num_heads,
    }
    layers = head_layers(vocab_size=WIDTH, hidden_size=WIDTH, size=WIDTH, **attention)
    spec = head_spec(decoder=layers, draft_vocab_size=WIDTH, target_hidden_size=WIDTH, state_layers=STATE_LAYERS)
    head = random_weights(tensors.eagle3_shapes(spec))
    head |= {name: torch.ones_like(weight) for name, weight in head.items() if "norm" in name}
    head |= {
        "fc.weight": torch.cat((places, places, 2 * places), dim=1) / 4,
        "layers.0.self_attn.o_proj.weight": torch.zeros(WIDTH, WIDTH),
        "layers.0.mlp.gate_proj.weight": places,
        "layers.0.mlp.up_proj.weight": places.clone(),
        "layers.0.mlp.down_proj.weight": (following - places) / WIDTH,
        "lm_head.weight": following / 2,
    }
    del head["embed_tokens.weight"]
    write_speculators(
        folder / "head", spec, head, draft_ids=None, target_architectures=["LlamaForCausalLM"], dtype=dtype
    )
    return folder / "model", folder / "head"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.full(but=("dtype0",))
def test_a_head_that_agrees_with_the_model_is_right(tmp_path: Path, dtype: torch.dtype) -> None:
    path, head = write_agreeing(tmp_path, dtype)
    kv_cache_memory = (3 if dtype is torch.float32 else 2) << 20
    plain = built(path, {"policy": "off"}, kv_cache_memory=kv_cache_memory).engine
    wanted = answers(plain, 0.0)
    assert plain.stats().num_preemptions > 0, "the pool is meant to be too small"
    drafting = {"policy": "fixed", "num_speculative_tokens": 3, "method": "eagle3", "model": str(head)}
    engine = built(path, drafting, kv_cache_memory=kv_cache_memory).engine
    assert answers(engine, 0.0) == wanted
    verified, right = accepted(engine)
    assert verified > 300
    assert right >= verified - 6, "a prompt's last token need not follow from the one before"
    sampled = built(path, drafting, kv_cache_memory=kv_cache_memory).engine
    assert answers(sampled, 0.9) == answers(plain, 0.9)
    verified, right = accepted(sampled)
    assert right > 0.3 * verified


def test_a_head_reads_the_states_of_a_model_that_two_ranks_hold(tmp_path: Path) -> None:
    path, head = write_agreeing(tmp_path, torch.float32)
    wanted = answers(built(path, {"policy": "off"}, kv_cache_memory=3 << 20).engine, 0.0)
    drafting = {"policy": "fixed", "num_speculative_tokens": 3, "model": str(head)}
    ranks = {"tensor_parallel_size": 2, "num_threads": 1}
    engine = built(path, drafting, kv_cache_memory=3 << 20, **ranks).engine
    try:
        assert answers(engine, 0.0) == wanted
    finally:
        engine.close()
    verified, right = accepted(engine)
    assert right >= verified - 6 > 300


def test_requests_without_drafts_leave_no_states(tmp_path: Path) -> None:
    """Neither do they change what is counted as read of the others."""
    path, head = write_agreeing(tmp_path, torch.float32)
    drafting = {"policy": "fixed", "num_speculative_tokens": 3, "model": str(head)}
    engine = built(path, drafting, kv_cache_memory=16 << 20).engine
    for i in range(6):
        engine.add(
            Request(
                request_id=str(i),
                prompt_token_ids=(*range(20 + i),),
                sampling=SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
                speculation=SpeculationParams(enabled=i % 2 == 1),
                arrival_s=0.0,
            )
        )
    while engine.has_work():
        engine.step()
    verified, right = accepted(engine)
    assert verified == right > 30


def test_passes_of_a_head_are_measured_at_the_start(tmp_path: Path) -> None:
    path, head = checkpoint(tmp_path / "model", "float32"), tmp_path / "head"
    write_seeded(head, head_spec(state_layers=STATE_LAYERS))
    config = EngineConfig(
        backend="native",
        device="cpu",
        num_threads=1,
        max_model_len=128,
        max_num_seqs=4,
        kv_cache_memory=1 << 21,
        speculative_config={"model": str(head)},
    )
    stages: set[str] = set()
    both = build(config, path, lambda stage, *_: stages.add(stage))
    assert "loading head" in stages
    assert both.costs is not None
    assert both.costs.tables[Role.PASS].seconds[0] > 0
    assert both.lanes is None
    without = built(path, {"policy": "off"})
    assert both.info.weight_bytes > without.info.weight_bytes


def test_a_head_of_another_model_is_refused(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "model", "float32")
    write_seeded(tmp_path / "head", head_spec(state_layers=(2, 3, 9)))
    with pytest.raises(ModelError, match="names layer 9; the model has layers 0 to 5"):
        built(path, {"model": str(tmp_path / "head")})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"speculators_model_type": "peagle"}, "of kind peagle, which is not supported: it drafts the positions"),
        ({"architectures": ["PEagleDraftModel"]}, "PEagleDraftModel of the head is not supported: it drafts the"),
        ({"model_type": "eagle"}, "of kind eagle, which is not supported: EAGLE-3's heads draft better"),
        ({"medusa_num_heads": 2}, "of kind medusa, which is not supported: its heads do not read what"),
    ],
)
def test_a_head_that_is_not_computed_stops_the_start(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    path, head = checkpoint(tmp_path / "model", "float32"), tmp_path / "head"
    write_checkpoint(head, config, random_weights({"fc.weight": (VOCAB_SIZE, head_spec().hidden_size)}))
    with pytest.raises(ModelError, match=message):
        built(path, {"model": str(head)})
