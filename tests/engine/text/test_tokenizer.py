"""Oracles: the tokenizers library's own decoder, and transformers reading the same directory."""

import json
import random
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from faser.engine.checkpoints.tokenizer_settings import TokenizerSettings
from faser.engine.text.tokenizer import Tokenizer, load_tokenizer
from faser.errors import ModelError, RequestError
from tests.engine.checkpoints.encoder_models import write_wordpiece
from tests.engine.text.vocabularies import (
    TRICKY,
    byte_level_core,
    llama3_like_core,
    qwen_like_core,
    sentencepiece_core,
    write_tokenizer_files,
)

CORES: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte-level": byte_level_core,
    "qwen-like": qwen_like_core,
    "llama3-like": llama3_like_core,
    "sentencepiece": sentencepiece_core,
    "sentencepiece without prefix": lambda: sentencepiece_core(prefix=False),
}
READY = {name: Tokenizer(make(), TokenizerSettings()) for name, make in CORES.items()}
BYTE_LEVEL = ("byte-level", "qwen-like")


@pytest.mark.parametrize("name", CORES)
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": False},
        {"add_eos_token": True},
        {"add_bos_token": True, "add_eos_token": True},
        {"bos_token": None, "add_bos_token": True},
    ],
)
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_ids_are_those_of_transformers(
    tmp_path: Path, name: str, config: dict[str, Any], add_special_tokens: bool
) -> None:
    core = CORES[name]()
    bos, eos = ("<s>", "</s>") if name.startswith("sentencepiece") else ("<|endoftext|>", "<|im_end|>")
    directory = write_tokenizer_files(tmp_path, core, **({"bos_token": bos, "eos_token": eos} | config))
    ours, oracle = load_tokenizer(directory), PreTrainedTokenizerFast.from_pretrained(directory)
    for text in TRICKY:
        ids = ours.encode(text, add_special_tokens=add_special_tokens)
        assert ids == oracle.encode(text, add_special_tokens=add_special_tokens), text
    assert (ours.bos_token, ours.eos_token) == (oracle.bos_token, oracle.eos_token)


def test_tokens_that_only_the_config_declares_special_are_special(tmp_path: Path) -> None:
    core = byte_level_core()
    config = {
        "bos_token": {"__type": "AddedToken", "content": "<new bos>", "special": True},
        "additional_special_tokens": ["<extra>"],
        "added_tokens_decoder": {"600": {"content": "<spaced>", "lstrip": True, "special": True}},
    }
    directory = write_tokenizer_files(tmp_path, core, **config)
    ours, oracle = load_tokenizer(directory), PreTrainedTokenizerFast.from_pretrained(directory)
    for text in ("<new bos>a", "a<extra>b", "a   <spaced> b"):
        ids = ours.encode(text)
        assert ids == oracle.encode(text)
        assert ours.decode(ids) == oracle.decode(ids, skip_special_tokens=True)


def test_truncation_and_padding_in_the_file_do_not_touch_prompts(tmp_path: Path) -> None:
    core = byte_level_core()
    core.enable_truncation(3)
    core.enable_padding(length=20)
    ours = load_tokenizer(write_tokenizer_files(tmp_path, core))
    text = "the quick brown fox jumps"
    assert ours.encode(text) == byte_level_core().encode(text).ids


@pytest.mark.parametrize("name", BYTE_LEVEL)
@given(data=st.data())
def test_byte_level_decoding_is_the_librarys_for_any_ids(name: str, data: st.DataObject) -> None:
    ours, oracle = READY[name], CORES[name]()
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size + 5), max_size=30))
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == oracle.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", CORES)
@given(text=st.text(max_size=40))
def test_text_decodes_to_what_the_library_decodes(name: str, text: str) -> None:
    ours, oracle = READY[name], CORES[name]()
    ids = ours.encode(text)
    assert ours.decode(ids) == oracle.decode(ids)


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece without prefix"])
@given(text=st.text(max_size=40).filter(lambda text: "▁" not in text and "<" not in text))
def test_bytes_of_tokens_join_to_the_bytes_of_the_text(name: str, text: str) -> None:
    tokenizer = READY[name]
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()


def test_a_part_of_a_code_point_is_its_bytes_and_shows_as_a_replacement() -> None:
    for name in ("byte-level", "sentencepiece"):
        tokenizer = READY[name]
        ids = tokenizer.encode("☃", add_special_tokens=False)
        parts = [tokenizer.token_bytes(each) for each in ids]
        assert parts[-3:] == [b"\xe2", b"\x98", b"\x83"]
        assert tokenizer.token_text(ids[-1]) == "\ufffd"


def test_ids_without_a_token_decode_to_nothing() -> None:
    tokenizer = READY["byte-level"]
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.token_bytes(-1) == b""
    assert tokenizer.decode([tokenizer.vocab_size + 100, *tokenizer.encode("hi")]) == "hi"


def test_the_vocabulary_counts_up_to_its_highest_id() -> None:
    tokenizer = READY["sentencepiece"]
    assert tokenizer.vocab_size == max(sentencepiece_core().get_vocab().values()) + 1
    assert tokenizer.token_id("</s>") == 2
    assert tokenizer.is_special(2)
    assert tokenizer.token_id("no such token") is None


@pytest.mark.parametrize("name", CORES)
@given(text=st.text(max_size=60) | st.text(alphabet="the cat \u212a\u1112\u1161\u11ab\u2581\x04", max_size=300))
def test_no_text_has_fewer_tokens_than_min_tokens(name: str, text: str) -> None:
    tokenizer = READY[name]
    assert tokenizer.min_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("name", CORES)
def test_a_prompt_of_ten_megabytes_is_known_to_be_long(name: str) -> None:
    assert READY[name].min_tokens("a" * 10_000_000) > 50_000


@pytest.mark.parametrize("name", CORES)
@given(text=st.text(max_size=400), num_tokens=st.integers(1, 8))
def test_a_text_longer_than_max_chars_has_more_tokens(name: str, text: str, num_tokens: int) -> None:
    tokenizer = READY[name]
    if len(text) > tokenizer.max_chars(num_tokens):
        assert len(tokenizer.encode(text, add_special_tokens=False)) > num_tokens


@pytest.mark.parametrize("name", CORES)
def test_max_chars_bounds_what_is_tokenised_for_a_long_context(name: str) -> None:
    tokenizer = READY[name]
    assert tokenizer.max_chars(131_072) <= 16 * 131_072
    assert 8 <= tokenizer.max_chars(8) <= 65_536


def test_a_tokenizer_that_may_drop_text_has_a_limit_as_well() -> None:
    unknown = tokenizers.Tokenizer(models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", fuse_unk=True))
    unknown.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(unknown, TokenizerSettings())
    assert tokenizer.min_tokens("b" * 1000) == 0
    assert (tokenizer.max_chars(10), tokenizer.max_chars(8192)) == (65_536, 131_072)


@pytest.mark.parametrize("name", CORES)
@pytest.mark.parametrize("num_tokens", [1, 7, 300])
@pytest.mark.parametrize("special", [False, True])
def test_the_end_of_a_text_has_its_last_tokens(name: str, num_tokens: int, special: bool) -> None:
    """Oracle: tokenising all of it."""
    rng, tokenizer = random.Random(num_tokens), READY[name]
    words = [word for text in TRICKY for word in text.split(" ") if word]
    text = " ".join(rng.choice(words) for _ in range(20_000))
    end = tokenizer.end_of(text, num_tokens)
    assert text.endswith(end)
    whole = tokenizer.encode(text, add_special_tokens=special)
    assert tokenizer.encode(end, add_special_tokens=special)[-num_tokens:] == whole[-num_tokens:]
    assert len(end) < len(text) / 2


@pytest.mark.parametrize("name", CORES)
def test_a_short_text_is_its_own_end(name: str) -> None:
    for text in TRICKY:
        assert READY[name].end_of(text, 1) == text


def test_a_long_text_is_counted_in_pieces_with_the_same_result() -> None:
    strips = byte_level_core()
    strips.add_special_tokens([AddedToken("<pad>", rstrip=True)])
    tokenizer = Tokenizer(strips, TokenizerSettings())
    lines = " \n ".join("é" * 1000 for _ in range(1000))
    assert tokenizer.min_tokens(lines) == tokenizer.min_tokens("é" * 1_000_000) > 100_000
    spaced = "x \u2003" * 100_000  # three characters; only the first costs tokens
    assert tokenizer.min_tokens(spaced) == tokenizer.min_tokens("x" * 100_000)


def test_composing_never_shrinks_text_more_than_min_tokens_assumes() -> None:
    """Oracle: every code point, composed from its decomposition and from every code point equal to it."""
    for code_point in range(0x110000):
        char = chr(code_point)
        if unicodedata.category(char) in ("Cs", "Cn", "Co"):
            continue
        composed = len(unicodedata.normalize("NFC", char).encode())
        widest = max(len(char.encode()), len(unicodedata.normalize("NFD", char).encode()))
        assert widest <= 3 * composed, hex(code_point)


def test_text_that_shrinks_when_composed_is_not_counted_in_full() -> None:
    core = qwen_like_core()
    core.add_tokens([AddedToken("한" * 60, normalized=True)])
    tokenizer = Tokenizer(core, TokenizerSettings())
    decomposed = unicodedata.normalize("NFD", "한" * 60)
    assert len(tokenizer.encode(decomposed)) == 1
    assert tokenizer.min_tokens(decomposed) == 1
    assert tokenizer.min_tokens(decomposed + "x") == 2


def test_text_that_costs_no_tokens_is_not_counted() -> None:
    strips = byte_level_core()
    strips.add_special_tokens([AddedToken("<pad>", rstrip=True)])
    unknown = tokenizers.Tokenizer(models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", fuse_unk=True))
    unknown.decoder = decoders.ByteLevel()
    drops = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    drops.pre_tokenizer, drops.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    folds = byte_level_core()
    folds.normalizer = normalizers.NFKC()
    cuts = byte_level_core()
    cuts.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), cuts.pre_tokenizer])
    for core, text in (
        (strips, "<pad>" + " " * 3000),
        (unknown, "é" * 300),
        (drops, "b" * 300),
        (folds, "\ufdfa" * 30),
        (cuts, " " * 3000),
    ):
        tokenizer = Tokenizer(core, TokenizerSettings())
        assert tokenizer.min_tokens(text) <= len(tokenizer.encode(text))


def test_a_lone_surrogate_is_refused_with_its_place() -> None:
    with pytest.raises(RequestError, match=r"U\+D800 at character 2"):
        READY["byte-level"].encode("ab\ud800c")


def test_text_that_the_vocabulary_cannot_spell_is_the_requests_error() -> None:
    core = tokenizers.Tokenizer(models.Unigram([("a", 0.0)], unk_id=None))
    core.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(core, TokenizerSettings())
    assert tokenizer.encode("a") == [0]
    with pytest.raises(RequestError, match=r"cannot encode this text: .*unknown token"):
        tokenizer.encode("ab")


def test_an_id_of_billions_is_refused() -> None:
    core = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 4_000_000_000}, []))
    core.decoder = decoders.ByteLevel()
    with pytest.raises(ModelError, match="has the id 4000000000; the limit is 16777215"):
        Tokenizer(core, TokenizerSettings())


def test_a_directory_without_a_vocabulary_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json$"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"tokenizer\.model alone is not enough"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: str) -> None:
    write_tokenizer_files(tmp_path, byte_level_core())
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("decoder", [None, decoders.CTC(), decoders.Sequence([decoders.CTC()])])
def test_a_decoder_that_does_more_than_spell_is_refused(tmp_path: Path, decoder: decoders.Decoder | None) -> None:
    core = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    if decoder is not None:
        core.decoder = decoder
    with pytest.raises(ModelError, match="decoder"):
        load_tokenizer(write_tokenizer_files(tmp_path, core))


def test_chat_templates_come_from_the_config_or_from_files(tmp_path: Path) -> None:
    core = byte_level_core()
    assert load_tokenizer(write_tokenizer_files(tmp_path / "none", core)).chat_template is None
    plain = write_tokenizer_files(tmp_path / "plain", core, chat_template="from config")
    assert load_tokenizer(plain).chat_template == "from config"
    (plain / "chat_template.jinja").write_text("from file")
    assert load_tokenizer(plain).chat_template == "from file"
    listed = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    named = write_tokenizer_files(tmp_path / "named", core, chat_template=listed)
    assert load_tokenizer(named).chat_template == {"default": "one", "tool_use": "two"}
    (plain / "additional_chat_templates").mkdir()
    (plain / "additional_chat_templates" / "rag.jinja").write_text("three")
    assert load_tokenizer(plain).chat_template == {"default": "from file", "rag": "three"}


def test_special_tokens_map_fills_in_what_the_config_leaves_open(tmp_path: Path) -> None:
    write_tokenizer_files(tmp_path, byte_level_core(), eos_token="<|im_end|>")
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<|endoftext|>"}, "eos_token": "<|im_start|>"})
    )
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|endoftext|>", "<|im_end|>")


def test_wordpiece_decodes_to_words(tmp_path: Path) -> None:
    write_wordpiece(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("abc de")
    assert tokenizer.decode(ids) == "abc de"
    assert [tokenizer.token_bytes(each) for each in ids[1:4]] == [b" a", b"b", b"c"]


@pytest.mark.parametrize("most", [2, 3, 7, 8, 50])
def test_a_cut_text_keeps_its_special_tokens_as_in_the_library(tmp_path: Path, most: int) -> None:
    """Oracle: the library's own truncation."""
    write_wordpiece(tmp_path)
    tokenizer, core = load_tokenizer(tmp_path), tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    core.no_padding()
    core.enable_truncation(most)
    assert tokenizer.encode("abc d efg", most=most) == core.encode("abc d efg").ids
    assert tokenizer.encode("abc d", add_special_tokens=False, most=3) == tokenizer.encode("abc")[1:-1]


@pytest.mark.parametrize("most", [None, 3, 4, 5, 8, 9, 10, 11, 50])
@pytest.mark.parametrize(
    "first, second", [("abc", "ab"), ("a", "abcdefghij"), ("abcdefghij", "ab"), ("abcde", "ghijk")]
)
def test_a_pair_is_cut_as_in_the_library(tmp_path: Path, first: str, second: str, most: int | None) -> None:
    """Oracle: the library's own truncation, longest first."""
    write_wordpiece(tmp_path)
    tokenizer, core = load_tokenizer(tmp_path), tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    core.no_padding()
    core.no_truncation() if most is None else core.enable_truncation(most)
    wanted = core.encode(first, second)
    ids, second_from = tokenizer.encode_pair(first, second, most=most)
    assert ids == wanted.ids
    assert [0] * (second_from or len(ids)) + [1] * (len(ids) - (second_from or len(ids))) == wanted.type_ids
