"""Tokenizers of GGUF files.

Oracles: the vocabularies they were written from, merging by brute force, and pieces of text that were cut by hand.
Planted bugs that these tests have caught: marks that are no letters, or letters where they are none; digits not
apart, or four together; a contraction that case hides; a slash that ends no word; words that do not end where case
rises; a whole token that is merged all the same, or that is not; no NFC; white space kept after Phi-3's tokens, or
after those that keep it absorbed; a space put before Gemma's text; <unk> spelled out; user-defined tokens that are
merged from pieces.
"""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser.engine.checkpoints.gguf_tokenizer import read_gguf_tokenizer
from faser.engine.checkpoints.tokenizer_settings import TokenizerSettings
from faser.engine.text.tokenizer import Tokenizer, load_tokenizer
from faser.errors import ModelError
from tests.engine.checkpoints.gguf.gguf_files import merges_of, write_gguf
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


# How each rule cuts texts. A rule and the values of tokenizer.ggml.pre that name it; texts, with cuts at "·".
_CASES = "HelloWORLD camelCase don't DON'T he'sing"
_LINES = "a!\n\nb  \n  c \r\n\td /\n/ e   "
_SCRIPTS = "東京Tokyo に12345 हिन्दी e\u0301t\u00e9 hi 🙂🙂!"
_CUTS: dict[str, tuple[list[str], list[str]]] = {
    "gpt-2": (
        ["gpt-2"],
        [
            "HelloWORLD· camelCase· don·'t· DON·'·T· he·'s·ing",
            "a·!·\n·\n·b·  \n · c· \r\n·\t·d· /·\n·/· e·   ",
            "東京Tokyo· に·12345· ह·ि·न·्·द·ी· e·\u0301·t\u00e9· hi· 🙂🙂!",
        ],
    ),
    "single digits": (
        ["smollm", "refact", "starcoder"],
        [
            "HelloWORLD· camelCase· don·'t· DON·'·T· he·'s·ing",
            "a·!·\n·\n·b·  \n · c· \r\n·\t·d· /·\n·/· e·   ",
            "東京Tokyo· に·1·2·3·4·5· ह·ि·न·्·द·ी· e·\u0301·t\u00e9· hi· 🙂🙂!",
        ],
    ),
    "cl100k": (
        ["llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "smaug-bpe", "dbrx", "chatglm-bpe", "glm4"],
        [
            "HelloWORLD· camelCase· don·'t· DON·'T· he·'s·ing",
            "a·!\n\n·b·  \n· · c· \r\n·\td· /\n·/· e·   ",
            "東京Tokyo· に·123·45· ह·िन·्द·ी· e·\u0301t\u00e9· hi· 🙂🙂!",
        ],
    ),
    "qwen2": (
        ["qwen2", "deepseek-r1-qwen"],
        [
            "HelloWORLD· camelCase· don·'t· DON·'T· he·'s·ing",
            "a·!\n\n·b·  \n· · c· \r\n·\td· /\n·/· e·   ",
            "東京Tokyo· に·1·2·3·4·5· ह·िन·्द·ी· \u00e9t\u00e9· hi· 🙂🙂!",
        ],
    ),
    "qwen35": (
        ["qwen35"],
        [
            "HelloWORLD· camelCase· don·'t· DON·'T· he·'s·ing",
            "a·!\n\n·b·  \n· · c· \r\n·\td· /\n·/· e·   ",
            "東京Tokyo· に·1·2·3·4·5· हिन्दी· \u00e9t\u00e9· hi· 🙂🙂!",
        ],
    ),
    "tekken": (
        ["tekken"],
        [
            "Hello·WORLD· camel·Case· don·'t· DON·'T· he·'sing",
            "a·!\n\n·b·  \n· · c· \r\n·\td· /\n/· e·   ",
            "東京Tokyo· に·1·2·3·4·5· हिन्दी· e\u0301t\u00e9· hi· 🙂🙂!",
        ],
    ),
    "o200k": (
        ["gpt-4o"],
        [
            "Hello·WORLD· camel·Case· don't· DON'T· he's·ing",
            "a·!\n\n·b·  \n· · c· \r\n·\td· /\n/· e·   ",
            "東京Tokyo· に·123·45· हिन्दी· e\u0301t\u00e9· hi· 🙂🙂!",
        ],
    ),
    "deepseek-coder": (
        ["deepseek-coder"],
        [
            "HelloWORLD· camelCase· don·'·t· DON·'·T· he·'·sing",
            "a·!·\n·\n·b·  ·\n· · c· ·\r·\n·\td· /·\n·/· e·   ",
            "東京·Tokyo· ·に·1·2·3·4·5· ·ह·ि·न·्·द·ी· e·\u0301·t\u00e9· hi· 🙂🙂·!",
        ],
    ),
    "default": (
        ["default"],
        [
            "HelloWORLD· camelCase· don·'·t· DON·'·T· he·'·sing",
            "a·!·\n·\n·b·  \n · c· \r\n·\t·d· ·/·\n·/· e·   ",
            "東京Tokyo· に·123·45· ह·ि·न·्·द·ी· e·\u0301·t\u00e9· hi· 🙂🙂·!",
        ],
    ),
}


@pytest.mark.parametrize("pre, cuts", [(pre, cuts) for names, cuts in _CUTS.values() for pre in names])
def test_text_is_split_as_tokenizer_ggml_pre_names(tmp_path: Path, pre: str, cuts: list[str]) -> None:
    write_gguf(tmp_path / "m.gguf", tokenizer="gpt2", metadata={"tokenizer.ggml.pre": pre})
    core, _ = read_gguf_tokenizer(tmp_path / "m.gguf")
    tokenizer = Tokenizer(core, TokenizerSettings())
    vocabulary = core.get_vocab()
    for text, cut in zip((_CASES, _LINES, _SCRIPTS), cuts, strict=True):
        if core.normalizer is not None:
            text = core.normalizer.normalize_str(text)
        split = [piece for piece, _ in core.pre_tokenizer.pre_tokenize_str(text)]
        assert [tokenizer.decode([vocabulary[char] for char in piece]) for piece in split] == cut.split("·")
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_piece_that_is_a_token_is_merged_or_not_as_its_rule_says(tmp_path: Path) -> None:
    """The vocabulary has the piece "zqx" whole, which no merges lead to."""
    write_gguf(tmp_path / "m.gguf", tokenizer="gpt2")
    core, _ = read_gguf_tokenizer(tmp_path / "m.gguf")
    tokens = [*(core.id_to_token(i) for i in range(512)), "zqx"]
    types = [3 if i in core.get_added_tokens_decoder() else 1 for i in range(513)]
    whole, merged = ["llama-bpe", "glm4", "tekken"], ["gpt-2", "dbrx", "chatglm-bpe", "qwen2", "gpt-4o", "refact"]
    for pre in whole + merged:
        vocabulary = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
        write_gguf(tmp_path / "m.gguf", tokenizer="gpt2", metadata={"tokenizer.ggml.pre": pre} | vocabulary)
        ids = load_tokenizer(tmp_path / "m.gguf").encode("zqx", add_special_tokens=False)
        assert ids == ([512] if pre in whole else [core.token_to_id(char) for char in "zqx"]), pre


def best_merges(text: str, prefix: str = "▁") -> list[str]:
    """Sentencepiece's own rule, by brute force: join the best-scoring neighbours, the leftmost of equals."""
    tokens, scores, types = sentencepiece_pieces()
    score = {token: s for token, s, kind in zip(tokens, scores, types, strict=True) if kind == 1}
    parts = list(prefix + text.replace(" ", "▁")) if text else []
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
    for text in (*TRICKY, "a<unk> b"):
        assert ours.encode(text) == oracle.encode(text), text
        assert ours.decode(ours.encode(text)) == oracle.decode(oracle.encode(text))


def with_tokens(added: dict[str, int]) -> dict[str, Any]:
    """Metadata of the small sentencepiece vocabulary with more tokens, of the given types."""
    tokens, scores, types = sentencepiece_pieces()
    return {
        "tokenizer.ggml.tokens": [*tokens, *added],
        "tokenizer.ggml.scores": [*scores, *[-1000.0] * len(added)],
        "tokenizer.ggml.token_type": [*types, *added.values()],
    }


def test_gemma_cuts_its_own_tokens_out_before_it_merges(tmp_path: Path) -> None:
    """As converters write Gemma: no space is put before a text; runs of white space and tags are user-defined."""
    added = {"<start_of_turn>": 3, "\n\n": 4, "\n\n\n": 4, "  ": 4, "   ": 4, "<b>": 4}
    metadata = with_tokens(added) | {"tokenizer.ggml.add_space_prefix": False}
    write_gguf(tmp_path / "m.gguf", "gemma3", tokenizer="llama", metadata=metadata)
    tokenizer = load_tokenizer(tmp_path / "m.gguf")
    longest_first = "|".join(sorted(map(re.escape, added), key=len, reverse=True))
    for text in (
        "<start_of_turn>the cat\n\n\n\n  sat     on<b> the mat</b>\n",
        " the cat",
        "   the cat \n\n",
        "the\t cat   é🙂",
    ):
        parts = re.split(f"({longest_first})", text)
        pieces = [[part] if part in added else best_merges(part, prefix="") for part in parts]
        assert tokenizer.encode(text) == [1, *map(tokenizer.token_id, itertools.chain(*pieces))], text
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == f"<s>{text}"
    assert tokenizer.decode(tokenizer.encode("<start_of_turn>a<b>  ")) == "a<b>  "


@pytest.mark.parametrize("model, pre", [("gemma4", None), ("gpt2", "gemma4")])
def test_gemma_with_stored_merges_encodes_as_that_of_the_hub(tmp_path: Path, model: str, pre: str | None) -> None:
    core = sentencepiece_core(prefix=False)
    metadata = {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.scores": None,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges_of(core.to_str())],
    }
    write_gguf(tmp_path / "m.gguf", tokenizer="llama", metadata=metadata)
    ours, oracle = load_tokenizer(tmp_path / "m.gguf"), Tokenizer(core, TokenizerSettings())
    for text in (*TRICKY, "a<unk> b", "the cats, 12"):
        assert ours.encode(text) == [1, *oracle.encode(text)], text
        assert ours.decode(ours.encode(text)) == oracle.decode(oracle.encode(text))


@pytest.mark.parametrize("architecture, absorbs", [("phi3", True), ("llama", False)])
def test_tokens_of_phi_3_absorb_the_white_space_after_them(
    tmp_path: Path, architecture: str, absorbs: bool
) -> None:
    metadata = with_tokens({"<|user|>": 3, "<|end|>": 3, "<|endoftext|>": 3})
    metadata["tokenizer.ggml.token_type"][2] = 4  # </s> is user-defined
    write_gguf(tmp_path / "m.gguf", architecture, tokenizer="llama", metadata=metadata)
    tokenizer = load_tokenizer(tmp_path / "m.gguf")
    parts = ["<|user|>", "\n the cat", "<|end|>", "\n", "<|endoftext|>", " x", "</s>", " \u3000y", "<s>", "\n"]
    kept = (
        ["<|user|>", "the cat", "<|end|>", "<|endoftext|>", " x", "</s>", "y", "<s>", "\n"] if absorbs else parts
    )
    pieces = [[part] if part[0] == "<" else best_merges(part) for part in kept]
    expected = [tokenizer.token_id(piece) for piece in itertools.chain(*pieces)]
    assert tokenizer.encode("".join(parts), add_special_tokens=False) == expected


def test_tokens_around_a_text_follow_the_metadata(tmp_path: Path) -> None:
    for metadata, before, after in (
        ({}, [], []),
        ({"tokenizer.ggml.add_bos_token": True}, [0], []),
        ({"tokenizer.ggml.add_eos_token": True}, [], [2]),
        ({"tokenizer.ggml.pre": "llama-bpe"}, [0], []),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, [], []),
        ({"tokenizer.ggml.pre": "tekken"}, [0], []),
        ({"tokenizer.ggml.pre": "glm4"}, [], []),
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
        ("gpt2", {"tokenizer.ggml.model": "t5"}, "of kind t5; supported are gpt2, llama, gemma4"),
        (
            "gpt2",
            {"tokenizer.ggml.pre": "bloom"},
            "the bloom way; supported are default, gpt-2, .*, tekken, .*gemma4",
        ),
        ("gpt2", {"tokenizer.ggml.pre": None}, r"no tokenizer\.ggml\.pre"),
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
