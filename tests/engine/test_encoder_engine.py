"""Encoders through a whole engine: vectors of texts, and logits of pairs.

Oracle: transformers' models, each text alone, and the pooling of sentence-transformers written out.

Bugs these tests have been seen to catch: attention over rows of the neighbour; a mean over the rows of another
text; token types left out, or beginning one token late; a window in one direction only.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from faser.config.engine import EngineConfig
from faser.engine.build import build_served
from faser.engine.checkpoints.encoders import read_encoder
from faser.engine.encoder_engine import StepLoop
from faser.errors import ConfigError, ModelError, RequestError
from faser.types.answer import FinishReason
from faser.types.engine import ModelInfo
from faser.types.pooling import Pooling, PoolingKind
from faser.types.request import Request
from faser.types.sampling import SamplingParams
from tests.engine.checkpoints.encoder_models import FAMILIES, VOCAB_SIZE, write_encoder, write_modules

KINDS = {"cls": PoolingKind.CLS, "mean": PoolingKind.MEAN, "lasttoken": PoolingKind.LAST}
CROSS_ENCODERS = ("bert", "xlm-roberta", "roberta", "modernbert")
LENGTHS = (33, 1, 150, 2, 16, 17, 64, 7, 120, 90, 31, 5)


def build(directory: Path, **settings: Any) -> tuple[StepLoop, ModelInfo]:
    given: dict[str, Any] = {
        "backend": "native",
        "num_threads": 1,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 100,
    } | settings
    return build_served(EngineConfig(model=str(directory), **given), directory, lambda *_: None)


def texts() -> list[tuple[int, ...]]:
    drawn = np.random.default_rng(5)
    return [tuple(drawn.integers(4, VOCAB_SIZE, length).tolist()) for length in LENGTHS]


def request(number: int, token_ids: tuple[int, ...], pooling: Pooling, **fields: Any) -> Request:
    sampling = SamplingParams(max_tokens=0, temperature=0.0, pooling=pooling)
    return Request(request_id=f"v{number}", prompt_token_ids=token_ids, sampling=sampling, **fields)


def vectors(engine: StepLoop, poolings: list[Pooling], given: list[tuple[int, ...]] | None = None) -> list[Any]:
    """Return the vector of each text, all of which are asked for at once; poolings: by turns."""
    asked = texts() if given is None else given
    for number, token_ids in enumerate(asked):
        engine.add(request(number, token_ids, poolings[number % len(poolings)]))
    found: dict[str, Any] = {}
    while engine.has_work():
        for delta in engine.step():
            assert delta.pooled is not None
            assert delta.finish_reason is FinishReason.LENGTH
            found[delta.request_id] = np.frombuffer(delta.pooled, np.float32)
    return [found[f"v{number}"] for number in range(len(asked))]


@torch.inference_mode()
def expected(model: Any, token_ids: tuple[int, ...], kind: PoolingKind) -> Any:
    states = model(torch.tensor([token_ids])).last_hidden_state[0]
    return {PoolingKind.CLS: states[0], PoolingKind.MEAN: states.mean(dim=0), PoolingKind.LAST: states[-1]}[
        kind
    ].numpy()


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_vectors_are_those_of_transformers(tmp_path: Path, model_type: str, backend: str) -> None:
    model = write_encoder(tmp_path, model_type)
    engine, info = build(tmp_path, backend=backend)
    assert info.embedder.is_encoder
    assert info.hidden_size == 64
    assert info.max_model_len == (200 if "roberta" in model_type else 202)
    kinds = list(KINDS.values())
    found = vectors(engine, [Pooling(kind=kind) for kind in kinds])
    for number, (token_ids, vector) in enumerate(zip(texts(), found, strict=True)):
        wanted = expected(model, token_ids, kinds[number % len(kinds)])
        np.testing.assert_allclose(vector, wanted, atol=1e-5 * np.abs(wanted).max(), rtol=1e-4)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_bfloat16_is_near_float32(tmp_path: Path, model_type: str) -> None:
    write_encoder(tmp_path, model_type)
    wide = vectors(build(tmp_path)[0], [Pooling(kind=PoolingKind.MEAN)])
    narrow = vectors(build(tmp_path, dtype="bfloat16")[0], [Pooling(kind=PoolingKind.MEAN)])
    for one, other in zip(wide, narrow, strict=True):
        assert not (one == other).all()
        assert one @ other > 0.995 * np.linalg.norm(one) * np.linalg.norm(other)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", ["bert", "modernbert"])
def test_bits_of_a_vector_depend_on_no_neighbour(tmp_path: Path, model_type: str, dtype: str) -> None:
    write_encoder(tmp_path, model_type)
    poolings = [Pooling(kind=PoolingKind.MEAN)]
    alone = vectors(build(tmp_path, dtype=dtype, max_num_seqs=1)[0], poolings)
    crowd = vectors(build(tmp_path, dtype=dtype, max_num_batched_tokens=512, num_threads=2)[0], poolings)
    for one, other in zip(alone, crowd, strict=True):
        assert (one == other).all()


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize(
    "model_type, fields",
    [*((each, {}) for each in CROSS_ENCODERS), ("modernbert", {"classifier_pooling": "mean"})],
)
def test_cross_encoders_give_the_logits_of_transformers(
    tmp_path: Path, model_type: str, fields: dict[str, Any], backend: str
) -> None:
    model = write_encoder(tmp_path, model_type, labels=1, **fields)
    engine, info = build(tmp_path, backend=backend)
    assert info.embedder.judges_pairs
    has_types = model_type == "bert"
    seconds = [len(each) // 2 if has_types and len(each) > 1 else None for each in texts()]
    found = []
    for token_ids, second in zip(texts(), seconds, strict=True):
        found += vectors(engine, [Pooling(second_from=second)], [token_ids])
    together = vectors(engine, [Pooling(second_from=None if second is None else second) for second in seconds])
    for token_ids, second, logit, beside in zip(texts(), seconds, found, together, strict=True):
        given = {"input_ids": torch.tensor([token_ids])}
        if second is not None:
            given["token_type_ids"] = (torch.arange(len(token_ids))[None] >= second).long()
        with torch.inference_mode():
            wanted = model(**given).logits[0].numpy()
        np.testing.assert_allclose(logit, wanted, atol=2e-5 * max(1.0, abs(wanted[0])))
        assert (logit == beside).all() or backend == "torch"


def test_a_model_that_guesses_words_is_read_as_its_encoder(tmp_path: Path) -> None:
    model = write_encoder(tmp_path, "bert")
    from transformers import BertForMaskedLM

    masked = BertForMaskedLM(model.config).eval()
    masked.bert.load_state_dict(model.state_dict(), strict=False)
    masked.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["BertForMaskedLM"]
    (found,) = vectors(build(tmp_path)[0], [Pooling(kind=PoolingKind.MEAN)], [texts()[0]])
    np.testing.assert_allclose(found, expected(model, texts()[0], PoolingKind.MEAN), atol=1e-4)


def test_steps_take_texts_in_their_order_as_far_as_they_fit(tmp_path: Path) -> None:
    write_encoder(tmp_path, "bert")
    engine, _ = build(tmp_path, max_num_seqs=3)  # and 100 tokens
    for number, length in enumerate((60, 40, 1, 150, 90, 10, 1, 1, 1)):
        engine.add(request(number, (5,) * length, Pooling(kind=PoolingKind.CLS)))
    assert engine.stats().num_waiting == 9
    steps = []
    while engine.has_work():
        steps.append(tuple(delta.request_id for delta in engine.step()))
    assert steps == [("v0", "v1"), ("v2",), ("v3",), ("v4", "v5"), ("v6", "v7", "v8")]
    stats = engine.stats()
    assert (stats.num_steps, stats.prompt_tokens, stats.num_waiting) == (5, 354, 0)


def test_tenants_take_turns_and_an_abort_leaves_the_queue(tmp_path: Path) -> None:
    write_encoder(tmp_path, "bert")
    engine, _ = build(tmp_path, max_num_seqs=1)
    for number in range(4):
        engine.add(request(number, (5,) * 20, Pooling(), tenant="many"))
    engine.add(request(9, (5,) * 20, Pooling(), tenant="one"))
    engine.abort("v1")
    engine.abort("gone")
    order = []
    while engine.has_work():
        order += [delta.request_id for delta in engine.step()]
    assert order == ["v0", "v9", "v2", "v3"]


def test_priorities_count_where_the_policy_says_so(tmp_path: Path) -> None:
    write_encoder(tmp_path, "bert")
    engine, _ = build(tmp_path, max_num_seqs=1, scheduling_policy="priority")
    for number, priority in enumerate((0, 3, -1)):
        engine.add(request(number, (5, 6), Pooling(), priority=priority))
    order = []
    while engine.has_work():
        order += [delta.request_id for delta in engine.step()]
    assert order == ["v2", "v0", "v1"]


def test_requests_for_text_are_refused(tmp_path: Path) -> None:
    write_encoder(tmp_path, "bert")
    engine, _ = build(tmp_path)
    with pytest.raises(RequestError, match="an encoder, which generates no text"):
        engine.add(Request(request_id="a", prompt_token_ids=(5,), sampling=SamplingParams(max_tokens=1)))
    with pytest.raises(RequestError, match="has 203 tokens; it must have from 1 to 202"):
        engine.add(request(0, (5,) * 203, Pooling()))
    engine.add(request(0, (5,), Pooling()))
    with pytest.raises(RequestError, match="'v0'; it is in use"):
        engine.add(request(0, (5,), Pooling()))


def test_the_context_is_that_of_sentence_transformers_unless_another_is_asked_for(tmp_path: Path) -> None:
    write_encoder(tmp_path, "bert")
    write_modules(tmp_path, "mean", most=50)
    info = build(tmp_path)[1]
    assert info.max_model_len == 50
    assert info.embedder.kind is PoolingKind.MEAN
    assert info.embedder.normalises
    assert build(tmp_path, max_model_len=202)[1].max_model_len == 202
    with pytest.raises(ConfigError, match="--max-model-len is 203; this model has at most 202"):
        build(tmp_path, max_model_len=203)


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"quantization": "int8"}, "--quantization"),
        ({"speculative_config": {"method": "ngram"}}, "--speculative-config"),
        ({"slo_ttft_ms": 5.0, "kv_cache_dtype": "int8"}, "--kv-cache-dtype, --slo-ttft-ms"),
    ],
)
def test_settings_without_a_use_are_refused_by_name(tmp_path: Path, settings: dict[str, Any], named: str) -> None:
    write_encoder(tmp_path, "bert")
    with pytest.raises(ConfigError, match=f"is an encoder: .*leave out {named}"):
        build(tmp_path, **settings)


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"position_embedding_type": "relative_key"}, "only absolute positions"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; supported are gelu"),
        ({"is_decoder": True}, "attends in both directions"),
        ({"num_attention_heads": 5}, "64 is not a multiple of num_attention_heads 5"),
        ({"intermediate_size": 97}, r"has the shape \(96, 64\); its config describes \(97, 64\)"),
        ({"num_hidden_layers": 6}, "lacks the tensor encoder.layer.5"),
        ({"num_hidden_layers": 4}, "has the tensor encoder.layer.4.* which BertModel does not have"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is 'gptq'"),
        ({"architectures": ["MPNetModel"]}, "architecture MPNetModel is not supported"),
        (
            {"architectures": ["BertForSequenceClassification"], "num_labels": 3},
            "3 labels; of models that classify",
        ),
    ],
)
def test_what_is_not_computed_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    write_encoder(tmp_path, "bert")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    with pytest.raises(ModelError, match=said):
        build(tmp_path)


def test_nomics_own_names_of_fields_say_the_same(tmp_path: Path) -> None:
    write_encoder(tmp_path, "nomic_bert")
    wanted = read_encoder(tmp_path)
    assert wanted is not None
    file = tmp_path / "config.json"
    given = json.loads(file.read_text())
    names = {
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "n_layer": "num_hidden_layers",
        "n_positions": "max_position_embeddings",
        "layer_norm_epsilon": "layer_norm_eps",
    }
    renamed = {own: given[name] for own, name in names.items()} | {
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
    }
    kept = {name: given[name] for name in ("architectures", "model_type", "vocab_size", "type_vocab_size")}
    asked = {
        "activation_function": "swiglu",
        "prenorm": False,
        "qkv_proj_bias": False,
        "max_trained_positions": 150,
    }
    file.write_text(json.dumps(kept | renamed | asked))
    found = read_encoder(tmp_path)
    assert found is not None
    assert found.spec == replace(wanted.spec, max_position_embeddings=150)
    file.write_text(json.dumps(kept | renamed | asked | {"num_experts": 8}))
    with pytest.raises(ModelError, match="num_experts is 8; not supported in Nomic BERT"):
        read_encoder(tmp_path)
