"""Vectors of prompts through a whole engine, beside sequences that generate and draft.

Oracle: transformers' states behind the last norm, and its logits. The engine has too few blocks for all requests,
so that sequences are preempted, cuts prompts into chunks, and finds prompts in its prefix cache.

Bugs these tests have been seen to catch: a mean that divides by the rows of the last chunk; the row before the
last one; a state before the norm; a mean that leaves cached tokens out; a vector of the next sequence of the step;
names of a checkpoint without a head that stay as they are.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from faser.engine.engine import Engine
from faser.types.answer import FinishReason
from faser.types.pooling import Pooling, PoolingKind
from faser.types.request import Request
from faser.types.sampling import SamplingParams
from tests.checkpoints import VOCAB_SIZE, write_tokenizer
from tests.engine.checkpoints.family_models import write_family_model
from tests.engine.losslessness.equality import answers, build, requests

SETTINGS: dict[str, Any] = {
    "backend": "native",
    "max_model_len": 224,
    "max_num_batched_tokens": 40,
    "num_threads": 1,
}
MEMORY = 1 << 20  # room for half of the requests or less
POOLINGS = (Pooling(), Pooling(kind=PoolingKind.MEAN), Pooling(token_ids=(7, 3)))
_SIZES = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**_SIZES},
    "qwen3": {**_SIZES, "head_dim": 32, "tie_word_embeddings": True},
    "gemma3_text": {**_SIZES, "head_dim": 32, "query_pre_attn_scalar": 20, "sliding_window": 13},
}


def prompts() -> list[tuple[int, ...]]:
    """Prompts of 1 to 150 tokens; every third begins as the one before."""
    drawn = np.random.default_rng(5)
    found: list[tuple[int, ...]] = []
    for at, length in enumerate((33, 150, 97, 1, 64, 16, 48, 120, 7)):
        own = tuple(drawn.integers(3, 128, length).tolist())
        found.append((*found[-1][:90], *own)[:150] if at % 3 == 2 else own)
    return found


def vectors(engine: Engine, pooling: Pooling, *, chats: list[Request]) -> dict[str, Any]:
    """Return the vector of each prompt, asked for beside the chats; and the chats' tokens by id."""
    asked = [
        Request(
            request_id=f"v{at}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=0, temperature=0.0, pooling=pooling),
        )
        for at, prompt in enumerate(prompts())
    ]
    for pair in zip(asked, chats, strict=False):
        for each in pair:
            engine.add(each)
    for each in asked[len(chats) :]:
        engine.add(each)
    found: dict[str, Any] = {}
    while engine.has_work():
        for delta in engine.step():
            if delta.pooled is not None:
                assert delta.finish_reason is FinishReason.LENGTH
                assert not delta.token_ids
                found[delta.request_id] = np.frombuffer(delta.pooled, np.float32)
            found.setdefault(f"tokens {delta.request_id}", []).extend(delta.token_ids)
    return found


@torch.inference_mode()
def expected(model: Any, prompt: tuple[int, ...], pooling: Pooling) -> Any:
    given = torch.tensor([prompt])
    if pooling.token_ids:
        return model(given).logits[0, -1, list(pooling.token_ids)].numpy()
    states = model.model(given).last_hidden_state[0]
    return (states.mean(dim=0) if pooling.kind is PoolingKind.MEAN else states[-1]).numpy()


@pytest.mark.parametrize(
    "model_type, backend, ahead",
    [*((each, "native", False) for each in FAMILIES), ("llama", "native", True), ("llama", "torch", False)],
)
@pytest.mark.full(but=("qwen3-native-False", "gemma3_text-native-False", "llama-native-True"))
def test_vectors_are_those_of_transformers_beside_chats(
    tmp_path: Path, model_type: str, backend: str, ahead: bool
) -> None:
    model = write_family_model(tmp_path, model_type, FAMILIES[model_type])
    write_tokenizer(tmp_path)
    settings: dict[str, Any] = SETTINGS | {"backend": backend, "async_scheduling": ahead}
    pair = (tmp_path, tmp_path)
    chats = [each for each in requests() if each.sampling.n == 1][:5]
    alone = answers(build(pair, None, **settings), chats)
    engine = build(pair, {"method": "ngram"}, kv_cache_memory=MEMORY, **settings)
    preempted = engine.stats().num_preemptions
    for pooling in (*POOLINGS, POOLINGS[0]):  # the first again: from the prefix cache
        found = vectors(engine, pooling, chats=chats)
        for at, prompt in enumerate(prompts()):
            wanted = expected(model, prompt, pooling)
            np.testing.assert_allclose(found[f"v{at}"], wanted, atol=2e-4 * np.abs(wanted).max(), rtol=2e-4)
        for each in chats:
            assert tuple(found[f"tokens {each.request_id}"]) == alone[each.request_id, 0][0]
    assert engine.stats().num_preemptions > preempted


def test_steps_launched_ahead_give_the_same_bits(tmp_path: Path) -> None:
    write_family_model(tmp_path, "llama", FAMILIES["llama"])
    write_tokenizer(tmp_path)
    pair = (tmp_path, tmp_path)
    chats = [each for each in requests() if each.sampling.n == 1][:5]
    for pooling in POOLINGS:
        plain = vectors(build(pair, None, async_scheduling=False, **SETTINGS), pooling, chats=chats)
        found = vectors(build(pair, None, async_scheduling=True, **SETTINGS), pooling, chats=chats)
        assert found.keys() == plain.keys()
        for name, each in plain.items():
            assert (np.array(each) == found[name]).all(), name


def test_bits_of_a_vector_depend_on_no_neighbour(tmp_path: Path) -> None:
    write_family_model(tmp_path, "llama", FAMILIES["llama"])
    write_tokenizer(tmp_path)
    pair = (tmp_path, tmp_path)
    for pooling in POOLINGS:
        alone = vectors(build(pair, None, max_num_seqs=1, **SETTINGS), pooling, chats=[])
        crowd = vectors(build(pair, None, **SETTINGS), pooling, chats=requests()[:6])
        for at in range(len(prompts())):
            assert (alone[f"v{at}"] == crowd[f"v{at}"]).all()


def test_a_checkpoint_without_its_head_is_read(tmp_path: Path) -> None:
    """transformers stores a model of embeddings without the prefix of the model within."""
    model = write_family_model(tmp_path, "qwen3", FAMILIES["qwen3"])
    write_tokenizer(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = {name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}
    assert "embed_tokens.weight" in stored
    save_file(stored, file, metadata={"format": "pt"})
    found = vectors(build((tmp_path, tmp_path), None, **SETTINGS), Pooling(), chats=[])
    for at, prompt in enumerate(prompts()):
        wanted = expected(model, prompt, Pooling())
        np.testing.assert_allclose(found[f"v{at}"], wanted, atol=2e-4 * np.abs(wanted).max(), rtol=2e-4)
