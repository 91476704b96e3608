"""Tokenizers of GGUF files. Oracles: the vocabularies they were written from, and merging by brute force."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser.engine.text.gguf_tokenizer import read_gguf_tokenizer
from faser.engine.text.tokenizer import Tokenizer, load_tokenizer
from faser.engine.text.tokenizer_settings import TokenizerSettings
from faser.errors import ModelError
from tests.engine.checkpoints.gguf.gguf_files import write_gguf
from tests.engine.text.vocabularies import (
    TRICKY,
    byte_level_core,
    sentencepiece_core,
    sentencepiece_pieces,
)


def test_a_byte_level_vocabulary_encodes_as_the_one_it_was_written_from(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tokenizer="gpt2")
    ours, oracle = load_tokenizer(tmp_path / "m.gguf"), Tokenizer(byte_level_core(), TokenizerSettings())
    for text in TRICKY:
        assert ours.encode(text) == oracle.encode(text), text
        assert ours.decode(ours.encode(text)) == oracle.decode(oracle.encode(text))
    assert ours.vocab_size == oracle.vocab_size
    assert (ours.bos_token, ours.eos_token) == ("<|endoftext|>", "<|im_end|>")
    assert ours.chat_template == "{{ messages[0].content }}"


@pytest.mark.parametrize(
    "pre, text, pieces",
    [
        ("gpt-2", "don't 1234  x!\n\ny", ["don", "'t", " 1234", " ", " x", "!", "\n", "\n", "y"]),
        ("smollm", "a 123 b", ["a", " ", "1", "2", "3", " b"]),
        ("llama-bpe", "DON'T 12345!!\n\n x", ["DON", "'T", " ", "123", "45", "!!\n\n", " x"]),
        (
            "gpt-4o",
            "DON'T getHTTPUrl 12345 a/b\n\n",
            ["DON'T", " get", "HTTPUrl", " ", "123", "45", " a", "/b", "\n\n"],
        ),
        ("qwen2", "DON'T 12 \u212a", ["DON", "'T", " ", "1", "2", " K"]),
    ],
)
def test_text_is_split_as_tokenizer_ggml_pre_names(tmp_path: Path, pre: str, text: str, pieces: list[str]) -> None:
    write_gguf(tmp_path / "m.gguf", tokenizer="gpt2", metadata={"tokenizer.ggml.pre": pre})
    core, _ = read_gguf_tokenizer(tmp_path / "m.gguf")
    if core.normalizer is not None:
        text = core.normalizer.normalize_str(text)
    split = [
        Tokenizer(core, TokenizerSettings()).decode([core.get_vocab()[char] for char in piece])
        for piece, _ in core.pre_tokenizer.pre_tokenize_str(text)
    ]
    assert split == pieces


def best_merges(text: str) -> list[str]:
    """Sentencepiece's own rule, by brute force: join the best-scoring neighbours, the leftmost of equals."""
    tokens, scores, types = sentencepiece_pieces()
    score = {token: s for token, s, kind in zip(tokens, scores, types, strict=True) if kind == 1}
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        joins = [(-score[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in score]
        if not joins:
            break
        _, at = min(joins)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    spelled = [[part] if part in score else [f"<0x{byte:02X}>" for byte in part.encode()] for part in parts]
    return [token for tokens in spelled for token in tokens]


_SENTENCEPIECE: list[Tokenizer] = []


@given(text=st.text(alphabet="thecatsonmr ,12é🙂", max_size=30))
def test_a_sentencepiece_vocabulary_merges_by_score(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    if not _SENTENCEPIECE:
        path = tmp_path_factory.mktemp("sentencepiece") / "m.gguf"
        write_gguf(path, tokenizer="llama")
        _SENTENCEPIECE.append(load_tokenizer(path))
    tokenizer = _SENTENCEPIECE[0]
    ids = tokenizer.encode(text)
    assert ids == [tokenizer.token_id("<s>"), *map(tokenizer.token_id, best_merges(text))]
    assert tokenizer.decode(ids) == text


def test_a_sentencepiece_vocabulary_encodes_as_that_of_the_hub(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tokenizer="llama", metadata={"tokenizer.ggml.add_bos_token": False})
    ours, oracle = load_tokenizer(tmp_path / "m.gguf"), Tokenizer(sentencepiece_core(), TokenizerSettings())
    for text in TRICKY:
        assert ours.encode(text) == oracle.encode(text), text
        assert ours.decode(ours.encode(text)) == oracle.decode(oracle.encode(text))


def test_tokens_around_a_text_follow_the_metadata(tmp_path: Path) -> None:
    for metadata, before, after in (
        ({}, [], []),
        ({"tokenizer.ggml.add_bos_token": True}, [0], []),
        ({"tokenizer.ggml.add_eos_token": True}, [], [2]),
        ({"tokenizer.ggml.pre": "llama-bpe"}, [0], []),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, [], []),
    ):
        write_gguf(tmp_path / "m.gguf", tokenizer="gpt2", metadata=metadata)
        tokenizer = load_tokenizer(tmp_path / "m.gguf")
        plain = tokenizer.encode("hi", add_special_tokens=False)
        assert tokenizer.encode("hi") == [*before, *plain, *after]


def test_named_chat_templates_are_read(tmp_path: Path) -> None:
    metadata = {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "two"}
    write_gguf(tmp_path / "m.gguf", tokenizer="gpt2", metadata=metadata)
    template = load_tokenizer(tmp_path / "m.gguf").chat_template
    assert template == {"default": "{{ messages[0].content }}", "tool_use": "two"}


@pytest.mark.parametrize(
    "kind, metadata, message",
    [
        ("gpt2", {"tokenizer.ggml.model": "t5"}, "of kind t5; supported are gpt2 and llama"),
        ("gpt2", {"tokenizer.ggml.pre": "tekken"}, "the tekken way; supported are"),
        ("gpt2", {"tokenizer.ggml.merges": ["no such"]}, "merges do not fit"),
        ("gpt2", {"tokenizer.ggml.token_type": [1, 1]}, "512 tokens but 2 token types"),
        ("gpt2", {"tokenizer.ggml.eos_token_id": 600}, "eos_token_id is 600, of 512 tokens"),
        ("llama", {"tokenizer.ggml.scores": None}, r"no tokenizer\.ggml\.scores"),
        ("llama", {"tokenizer.ggml.remove_extra_whitespaces": True}, "extra white space"),
        (None, {}, r"no tokenizer\.ggml\.tokens"),
    ],
)
def test_a_vocabulary_that_is_not_supported_is_named(
    tmp_path: Path, kind: str | None, metadata: dict[str, Any], message: str
) -> None:
    write_gguf(tmp_path / "m.gguf", tokenizer=kind, metadata=metadata)
    with pytest.raises(ModelError, match=message):
        load_tokenizer(tmp_path / "m.gguf")
