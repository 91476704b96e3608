"""How a checkpoint makes embeddings, read from the files that sentence-transformers writes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from faser.engine.checkpoints.embedder import read_embedder, read_encoder_embedder
from faser.errors import ModelError
from faser.types.pooling import EMBEDDER, Embedder, PoolingKind
from tests.checkpoints import write_tokenizer

TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
SCORE = {"path": "1_LogitScore", "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"}


def write(directory: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


LAST = {"word_embedding_dimension": 8, "pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
MEAN = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}


@pytest.mark.parametrize(
    "files, wanted",
    [
        ({}, EMBEDDER),
        (
            {
                "modules.json": [TRANSFORMER, POOLING, NORMALIZE],
                "1_Pooling/config.json": LAST,
                "config_sentence_transformers.json": {"prompts": {"query": "Instruct: x\nQuery:", "document": ""}},
                "config.json": {"matryoshka_dimensions": [32, 64]},
            },
            Embedder(
                is_matryoshka=True,
                dimensions=(32, 64),
                prompts={"query": "Instruct: x\nQuery:", "document": ""},
            ),
        ),
        (
            {"modules.json": [TRANSFORMER, POOLING], "1_Pooling/config.json": MEAN},
            Embedder(kind=PoolingKind.MEAN, normalises=False),
        ),
        (
            {"modules.json": [TRANSFORMER, POOLING], "1_Pooling/config.json": {"pooling_mode": "mean"}},
            Embedder(kind=PoolingKind.MEAN, normalises=False),
        ),
        (
            {
                "modules.json": [TRANSFORMER, SCORE],
                "1_LogitScore/config.json": {"true_token_id": 9693, "false_token_id": 2152},
            },
            Embedder(normalises=False, score_token_ids=(9693, 2152)),
        ),
        (
            {
                "modules.json": [TRANSFORMER, SCORE],
                "1_LogitScore/config.json": {"true_token_id": 0, "false_token_id": None},
            },
            Embedder(normalises=False, score_token_ids=(0,)),
        ),
    ],
)
def test_files_say_how(tmp_path: Path, files: dict[str, Any], wanted: Embedder) -> None:
    assert read_embedder(write(tmp_path, files)) == wanted


def test_words_that_judge_are_tokens(tmp_path: Path) -> None:
    """vLLM's classifier_from_token names the false one first."""
    write_tokenizer(tmp_path)
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    no, yes = sorted(vocabulary)[5:7]
    write(tmp_path, {"config.json": {"classifier_from_token": [no, yes]}})
    found = read_embedder(tmp_path)
    assert found.score_token_ids == (vocabulary[yes], vocabulary[no])


@pytest.mark.parametrize(
    "files, said",
    [
        ({"modules.json": [TRANSFORMER, {"type": "a.b.Dense", "path": "2_Dense"}]}, "module 'Dense'"),
        ({"modules.json": [POOLING], "1_Pooling/config.json": {"pooling_mode_cls_token": True}}, "first token"),
        (
            {
                "modules.json": [POOLING],
                "1_Pooling/config.json": {**MEAN, **LAST, "pooling_mode_mean_tokens": True},
            },
            "mean",
        ),
        ({"modules.json": [POOLING]}, "no mode"),
        ({"modules.json": {"a": 1}}, "is no list of modules"),
        ({"modules.json": "{"}, "modules.json cannot be read"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path: Path, files: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        read_embedder(write(tmp_path, files))


@pytest.mark.parametrize(
    "files, wanted",
    [
        ({}, Embedder(kind=PoolingKind.CLS, is_encoder=True)),
        (
            {"modules.json": [TRANSFORMER, POOLING], "1_Pooling/config.json": {"pooling_mode_cls_token": True}},
            Embedder(kind=PoolingKind.CLS, normalises=False, is_encoder=True),
        ),
        (
            {"modules.json": [TRANSFORMER, POOLING, NORMALIZE], "1_Pooling/config.json": MEAN},
            Embedder(kind=PoolingKind.MEAN, is_encoder=True),
        ),
    ],
)
def test_encoders_may_pool_their_first_token(tmp_path: Path, files: dict[str, Any], wanted: Embedder) -> None:
    assert read_encoder_embedder(write(tmp_path, files), judges_pairs=False, raw_scores=False) == wanted
    found = read_encoder_embedder(tmp_path, judges_pairs=True, raw_scores=True)
    assert found == replace(wanted, judges_pairs=True, raw_scores=True)


def test_the_largest_of_all_tokens_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, {"modules.json": [POOLING], "1_Pooling/config.json": {"pooling_mode": "max"}})
    with pytest.raises(ModelError, match="states max; FASER pools the last token"):
        read_encoder_embedder(tmp_path, judges_pairs=False, raw_scores=False)
