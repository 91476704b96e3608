"""LLM.embed, encode and score on a tiny model. Oracle: transformers' states and logits of the same tokens.

Bugs these tests have been seen to catch: a vector cut after it has been scaled; scores that pair each document
with the first query; no before yes; use_activation without effect; special tokens around the prompt of a judge;
truncation that keeps the end.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from faser import LLM, LoRARequest, PoolingParams
from faser.errors import RequestError

TEXTS = ["the cat sat on the mat", "a", "on the mat the cat"]
YES, NO = 40, 41


@pytest.fixture(scope="module")
def judge_path(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that judges with two of its tokens, and puts a token before each text."""
    path = tmp_path_factory.mktemp("judge") / "model"
    shutil.copytree(tiny_checkpoint, path)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    words = {number: word for word, number in tokenizer["model"]["vocab"].items()}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": words[50], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {words[50]: {"id": words[50], "ids": [50], "tokens": [words[50]]}},
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"classifier_from_token": [words[NO], words[YES]]}))
    return path


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = tmp_path_factory.mktemp("embedder") / "model"
    shutil.copytree(tiny_checkpoint, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"matryoshka_dimensions": [8, 16]}))
    limits = {"max_num_seqs": 2, "max_num_queued_reqs": 0, "max_num_batched_tokens": 16}
    with LLM(str(path), backend="torch", dtype="float32", **limits) as model:
        yield model


@pytest.fixture(scope="module")
def judge(judge_path: Path) -> Iterator[LLM]:
    with LLM(str(judge_path), backend="torch", dtype="float32", max_num_seqs=2) as model:
        yield model


@pytest.fixture(scope="module")
def oracle(tiny_checkpoint: Path) -> Any:
    return LlamaForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)


@torch.inference_mode()
def state(oracle: Any, token_ids: list[int]) -> Any:
    return oracle.model(torch.tensor([token_ids])).last_hidden_state[0, -1].numpy()


def unit(vector: Any) -> Any:
    return vector / np.linalg.norm(vector)


def test_vectors_are_those_of_transformers_in_the_order_of_the_prompts(model: LLM, oracle: Any) -> None:
    """More prompts than the engine has room for, and the first one takes several steps."""
    texts = [" ".join(TEXTS * 4), *TEXTS]
    ids = model.get_tokenizer().encode(TEXTS[0])
    found = model.embed([*texts, {"prompt_token_ids": ids}, {"prompt": TEXTS[1]}], use_tqdm=False)
    for each, text in zip(found, [*texts, TEXTS[0], TEXTS[1]], strict=True):
        assert each.prompt_token_ids == model.get_tokenizer().encode(text)
        assert each.finished
        assert each.outputs.hidden_size == model.info.hidden_size
        wanted = unit(state(oracle, each.prompt_token_ids))
        np.testing.assert_allclose(each.outputs.embedding, wanted, atol=1e-5)
    assert len({each.request_id for each in found}) == 6
    (alone,) = model.encode(TEXTS[0])
    np.testing.assert_allclose(alone.outputs.data, found[1].outputs.embedding, atol=1e-6)
    assert model.embed([]) == []


def test_parameters_of_vectors(model: LLM, oracle: Any) -> None:
    ids = model.get_tokenizer().encode(TEXTS[0])
    (short,) = model.embed(TEXTS[0], pooling_params=PoolingParams(dimensions=8))
    np.testing.assert_allclose(short.outputs.embedding, unit(state(oracle, ids)[:8]), atol=1e-5)
    (raw,) = model.encode(TEXTS[0], PoolingParams(use_activation=False), pooling_task="embed")
    np.testing.assert_allclose(raw.outputs.data, state(oracle, ids), rtol=1e-4, atol=1e-4)
    (start,) = model.embed(TEXTS[0], truncate_prompt_tokens=2)
    assert start.prompt_token_ids == ids[:2]
    long = [ids[0]] * (model.info.max_model_len + 9)
    (most,) = model.embed([long], pooling_params=PoolingParams(truncate_prompt_tokens=-1))
    assert len(most.prompt_token_ids) == model.info.max_model_len


def test_scores_are_cosines(model: LLM, oracle: Any) -> None:
    query, *documents = [*map(model.get_tokenizer().encode, TEXTS)]
    found = model.score(TEXTS[0], TEXTS[1:])
    for each, document in zip(found, documents, strict=True):
        cosine = unit(state(oracle, query)) @ unit(state(oracle, document))
        assert each.outputs.score == pytest.approx(float(cosine), abs=1e-5)
        assert each.prompt_token_ids == query + document
    pairs = model.score(TEXTS[:2], TEXTS[1:])
    wanted = [
        unit(state(oracle, one)) @ unit(state(oracle, other)) for one, other in ([query, documents[0]], documents)
    ]
    assert [each.outputs.score for each in pairs] == pytest.approx([float(each) for each in wanted], abs=1e-5)


def test_a_judge_says_how_likely_yes_is(judge: LLM, oracle: Any) -> None:
    template = "{% for m in messages %}{{ m.content }} {% endfor %}{# document #}"
    found = judge.score("the cat", TEXTS, chat_template=template)
    raw = judge.score("the cat", TEXTS, pooling_params=PoolingParams(use_activation=False), chat_template=template)
    for each, bare, text in zip(found, raw, TEXTS, strict=True):
        ids = judge.get_tokenizer().encode(f"the cat {text} ", add_special_tokens=False)
        assert each.prompt_token_ids == bare.prompt_token_ids == ids
        with torch.inference_mode():
            logits = oracle(torch.tensor([ids])).logits[0, -1].numpy()
        odds = float(logits[YES] - logits[NO])
        assert bare.outputs.score == pytest.approx(odds, rel=1e-4, abs=1e-5)
        assert each.outputs.score == pytest.approx(1 / (1 + np.exp(-odds)), abs=1e-5)
    assert judge.embed("the cat")[0].prompt_token_ids[0] == 50  # special tokens go around other texts


def test_what_a_model_cannot_is_refused_by_name(model: LLM, judge: LLM) -> None:
    with pytest.raises(RequestError, match="dimensions is 9; this model is trained for 8, 16"):
        model.embed("a", pooling_params=PoolingParams(dimensions=9))
    with pytest.raises(RequestError, match="dimensions is 8; the vectors of this model have"):
        judge.embed("a", pooling_params=PoolingParams(dimensions=8))
    with pytest.raises(RequestError, match="pooling_task is 'token_embed'"):
        model.encode("a", pooling_task="token_embed")
    with pytest.raises(RequestError, match=r"LLM\.classify is not supported"):
        model.classify("a")
    with pytest.raises(RequestError, match=r"LLM\.reward is not supported"):
        model.reward("a")
    with pytest.raises(RequestError, match="enable_lora=True"):
        model.embed("a", lora_request=LoRARequest("one", 1, "/a"))
    with pytest.raises(RequestError, match="data_1 has 2 texts and data_2 3"):
        model.score(["a", "b"], TEXTS)
    with pytest.raises(RequestError, match="dimensions is for embed and encode"):
        model.score("a", TEXTS, pooling_params=PoolingParams(dimensions=8))
    with pytest.raises(RequestError, match="truncate_prompt_tokens would cut the question"):
        judge.score("a", TEXTS, truncate_prompt_tokens=4)
    with pytest.raises(RequestError, match="maximum context length"):
        model.embed([[5] * (model.info.max_model_len + 1)])
    with pytest.raises(RequestError, match="the prompt is empty"):
        model.embed("")
