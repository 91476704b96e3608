"""Damaged checkpoints, each loaded as a server loads it: seeded mutants of every kind of file.

Nothing but ModelError may escape: the operator reads one line that names the file, the field or the tensor. A
mutant that loads is no fault: most bytes of a file are weights, scores and spellings.
"""

import json
import mmap
import random
import re
import struct
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from faser.api.requests.chat_renderer import ChatRenderer
from faser.engine.checkpoints.files import read_model_config
from faser.engine.checkpoints.gguf.header import TENSOR_TYPES, Header
from faser.engine.execution.models.loader import load_decoder
from faser.engine.text.tokenizer import load_tokenizer
from faser.errors import ModelError
from faser.kernels.torch_backend import TorchBackend
from tests.checkpoints import write_tiny_checkpoint, write_tokenizer
from tests.engine.checkpoints.gguf.gguf_files import SIZES, write_gguf
from tests.engine.checkpoints.low_bit_checkpoints import KINDS, write_pair
from tests.engine.text.vocabularies import sentencepiece_pieces

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # weights of any bits are not finite

MUTANTS = 40  # of each test
WRONG: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        -1,
        0,
        1,
        3,
        1 << 40,
        10**400,
        0.5,
        float("nan"),
        float("inf"),
        "",
        "x",
        "none",
        "linear",
    ),
    *([], [0], ["x"], [[1]], {}, {"a": 1}, {"rope_type": "linear"}, {"type": "llama3", "factor": "2"}),
)
TOKENS = {
    "added_tokens_decoder": {"1": {"content": "<|im_start|>", "special": True, "lstrip": False}},
    "additional_special_tokens": ["<|im_start|>", {"content": "<|new|>"}],
    "chat_template": [{"name": "default", "template": "{{ messages[0].content }}"}],
}
NUMBERS = (0, 1, 3, 7, 255, 1 << 31, (1 << 63) - 1)


def load(path: Path) -> None:
    """What the front-end and the engine read of a model before it is served."""
    read_model_config(path)
    tokenizer = load_tokenizer(path)
    ChatRenderer(tokenizer, None)
    tokenizer.decode(tokenizer.encode("a model reads a prompt"))
    load_decoder(path, TorchBackend(), torch.float32, max_model_len=64, max_rows=8, progress=lambda *_: None)


def outcomes(mutants: range, damage: Callable[[random.Random], Path]) -> tuple[int, int]:
    """How many mutants were refused, and how many loaded. damage: writes the mutant of a seed."""
    refused, escaped = 0, []
    for seed in mutants:
        path = damage(random.Random(seed))
        try:
            load(path)
        except ModelError:
            refused += 1
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            escaped.append(f"mutant {seed}: {type(error).__name__}: {error}, {at.filename}:{at.lineno}")
    assert not escaped, "\n".join(escaped)
    return refused, len(mutants) - refused


@pytest.mark.parametrize("vocabulary", ["gpt2", "llama"])
def test_the_undamaged_files_load(tmp_path: Path, vocabulary: str) -> None:
    write_gguf(tmp_path / "m.gguf", tokenizer=vocabulary)
    load(tmp_path / "m.gguf")
    load(write_tiny_checkpoint(tmp_path / "plain"))
    for name in ("awq", "gptq-desc-act", "w4a16-asymmetric", "w8a8-asymmetric"):
        load(low_bit(tmp_path, name))


@pytest.mark.parametrize(
    ("vocabulary", "key", "value", "message"),
    [
        ("gpt2", "tokenizer.ggml.pre", ["gpt-2"], "tokenizer.ggml.pre is a list of 1; it must be text"),
        ("gpt2", "tokenizer.ggml.eos_token_id", -1, "eos_token_id is -1, of 512 tokens"),
        ("llama", "tokenizer.ggml.bos_token_id", -1, "bos_token_id is -1, of 381 tokens"),
        ("gpt2", "llama.attention.head_count", 0, "head_count is 0; it must be at least 1"),
        ("gpt2", "llama.attention.layer_norm_rms_epsilon", "x", "epsilon is 'x'; it must be a finite number"),
        ("gpt2", "split.count", "2", "split.count is '2'; it must be an integer"),
        ("gpt2", "tokenizer.chat_template", "{{ " + "[" * 999 + "]" * 999 + " }}", "template does not compile"),
    ],
)
def test_wrong_fields_of_gguf_files_are_named(
    tmp_path: Path, vocabulary: str, key: str, value: Any, message: str
) -> None:
    write_gguf(tmp_path / "m.gguf", tokenizer=vocabulary, metadata={key: value})
    with pytest.raises(ModelError, match=message):
        load(tmp_path / "m.gguf")


def test_a_template_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, tokenizer="gpt2", metadata={"tokenizer.chat_template": "{{ messages[0].content }}zzz"})
    path.write_bytes(path.read_bytes().replace(b"}}zzz", b"}}\xff\xfe\xfd"))
    with pytest.raises(ModelError, match=r"tokenizer\.chat_template is not UTF-8"):
        load(path)


def test_a_piece_of_a_megabyte_is_refused_at_once(tmp_path: Path) -> None:
    """Every way to cut it in two would be tried."""
    tokens, scores, types = sentencepiece_pieces()
    longer = {
        "tokenizer.ggml.tokens": [*tokens, "x" * (1 << 20)],
        "tokenizer.ggml.scores": [*scores, 0.0],
        "tokenizer.ggml.token_type": [*types, 1],
    }
    write_gguf(tmp_path / "m.gguf", tokenizer="llama", metadata=longer)
    with pytest.raises(ModelError, match="a token of 1048576 characters; the limit is 1024"):
        load_tokenizer(tmp_path / "m.gguf")


@pytest.mark.parametrize("vocabulary", ["gpt2", "llama"])
def test_fields_of_gguf_files(tmp_path: Path, vocabulary: str) -> None:
    """A field has another type or another value."""
    path = tmp_path / "m.gguf"
    write_gguf(path, tokenizer=vocabulary)
    keys = [
        *(f"llama.{name}" for name in (*SIZES, "vocab_size", "attention.key_length", "attention.value_length")),
        *(f"llama.rope.{name}" for name in ("freq_base", "dimension_count", "scaling.type", "scaling.factor")),
        *("llama.attention.layer_norm_rms_epsilon", "llama.expert_count", "llama.attention.sliding_window"),
        *(f"tokenizer.ggml.{name}" for name in ("model", "pre", "tokens", "token_type", "merges", "scores")),
        *(f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "unknown", "eot")),
        *("tokenizer.ggml.add_bos_token", "tokenizer.ggml.remove_extra_whitespaces", "tokenizer.chat_template"),
        *("tokenizer.chat_templates", "tokenizer.ggml.add_space_prefix", "split.count", "general.architecture"),
    ]
    values = (
        True,
        -1,
        0,
        1,
        3,
        (1 << 31) - 1,
        0.5,
        float("nan"),
        "",
        "x",
        "{% if",
        "{{ 1 / 0 }}",
        [0],
        ["x"],
        [0.5],
        [True],
    )

    def damage(rng: random.Random) -> Path:
        write_gguf(path, tokenizer=vocabulary, metadata={rng.choice(keys): rng.choice(values)})
        return path

    refused, loaded = outcomes(range(MUTANTS), damage)
    assert refused > loaded > 0


@pytest.mark.parametrize("vocabulary", ["gpt2", "llama"])
def test_bytes_of_gguf_files(tmp_path: Path, vocabulary: str) -> None:
    """Bytes of the header are others: of keys, lengths, types, texts, shapes, offsets."""
    path = tmp_path / "m.gguf"
    write_gguf(path, tokenizer=vocabulary)
    content = path.read_bytes()
    end = min(place.start for place in header_of(path).tensors.values())

    def damage(rng: random.Random) -> Path:
        damaged = bytearray(content)
        for _ in range(rng.choice((1, 4, 16))):
            damaged[rng.randrange(end)] = rng.choice((0, 1, 0x7F, 0xFF, rng.randrange(256)))
        path.write_bytes(damaged)
        return path

    refused, loaded = outcomes(range(MUTANTS), damage)
    assert refused
    assert loaded


def test_shapes_and_types_of_tensors_of_gguf_files(tmp_path: Path) -> None:
    """One number of the tensor table: a dimension, the number of dimensions, the type, or the offset."""
    path = tmp_path / "m.gguf"
    write_gguf(path, tokenizer="gpt2")
    content = path.read_bytes()
    names = list(header_of(path).tensors)

    def damage(rng: random.Random) -> Path:
        damaged, name = bytearray(content), rng.choice(names).encode()
        at = damaged.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
        (num_dims,) = struct.unpack_from("<I", damaged, at)
        kind_at = at + 4 + 8 * num_dims
        place, number, form = rng.choice(
            [
                (at, rng.randrange(6), "<I"),
                (at + 4 + 8 * rng.randrange(num_dims), rng.choice((*NUMBERS, 32, 96, 128)), "<Q"),
                (kind_at, rng.choice((*TENSOR_TYPES, 99)), "<I"),
                (kind_at + 4, rng.choice((0, 32, 33, *NUMBERS)), "<Q"),
            ]
        )
        struct.pack_into(form, damaged, place, number)
        path.write_bytes(damaged)
        return path

    refused, loaded = outcomes(range(MUTANTS), damage)
    assert refused > loaded


@pytest.mark.parametrize("name", ["plain", "awq", "gptq-desc-act", "w4a16-asymmetric", "w8a8-asymmetric"])
def test_headers_of_safetensors_files(tmp_path: Path, name: str) -> None:
    """A tensor has another type, shape or place, or none; or bytes of the header are others."""
    directory = write_tiny_checkpoint(tmp_path / "plain") if name == "plain" else low_bit(tmp_path, name)
    path = directory / "model.safetensors"
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    tensors = json.loads(content[8 : 8 + length])

    def damage(rng: random.Random) -> Path:
        header = bytearray(changed_header(rng, tensors))
        if rng.random() < 0.3:
            header[rng.randrange(len(header))] = rng.choice((0, 0x22, 0x7B, 0xFF))
        size = len(header) if rng.random() < 0.9 else rng.choice(NUMBERS)
        path.write_bytes(struct.pack("<Q", size) + header + content[8 + length :])
        return directory

    refused, loaded = outcomes(range(MUTANTS), damage)
    assert refused > loaded


@pytest.mark.parametrize(
    "file", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"]
)
def test_fields_of_configuration_files(tmp_path: Path, file: str) -> None:
    """A field, at any depth, has another type or another value, or is missing."""
    directory = write_tiny_checkpoint(tmp_path / "plain")
    whole = json.loads((directory / file).read_text()) | (TOKENS if file == "tokenizer_config.json" else {})

    def damage(rng: random.Random) -> Path:
        damaged = json.loads(json.dumps(whole))
        change(rng, damaged)
        (directory / file).write_text(json.dumps(damaged))
        return directory

    refused, loaded = outcomes(range(MUTANTS), damage)
    assert refused + loaded == MUTANTS
    assert refused


@pytest.mark.parametrize(
    "file", ["config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors.index.json"]
)
@pytest.mark.parametrize("content", ["[" * 200_000, '{"a":' * 200_000])
def test_json_that_is_nested_too_deeply_is_named(tmp_path: Path, file: str, content: str) -> None:
    directory = write_tiny_checkpoint(tmp_path / "plain")
    if file == "model.safetensors.index.json":
        (directory / "model.safetensors").rename(directory / "part.safetensors")
    (directory / file).write_text(content)
    with pytest.raises(ModelError, match=rf"{re.escape(file)}.* nested too deeply"):
        load(directory)


@pytest.mark.parametrize("name", ["awq", "gptq-desc-act", "w4a16-asymmetric", "w8a8-asymmetric"])
def test_fields_of_quantization_configs(tmp_path: Path, name: str) -> None:
    directory = low_bit(tmp_path, name)
    whole = json.loads((directory / "config.json").read_text())

    def damage(rng: random.Random) -> Path:
        damaged = json.loads(json.dumps(whole))
        change(rng, damaged["quantization_config"])
        (directory / "config.json").write_text(json.dumps(damaged))
        return directory

    refused, loaded = outcomes(range(MUTANTS), damage)
    assert refused
    assert loaded


def header_of(path: Path) -> Header:
    with path.open("rb") as file:
        return Header(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def low_bit(tmp_path: Path, name: str) -> Path:
    """A checkpoint of that kind, with a tokenizer."""
    stored, _ = write_pair(tmp_path / name, KINDS[name])
    write_tokenizer(stored)
    return stored


def changed_header(rng: random.Random, tensors: dict[str, Any]) -> bytes:
    tensors = json.loads(json.dumps(tensors))
    name = rng.choice([each for each in tensors if each != "__metadata__"])
    tensor = tensors[name]
    match rng.randrange(5):
        case 0:
            tensor["dtype"] = rng.choice(("F32", "F16", "BF16", "I8", "I32", "I64", "U8", "BOOL", "F8_E4M3", "?"))
        case 1:
            tensor["shape"] = rng.choice(
                ([], [1], [*tensor["shape"], 1], tensor["shape"][::-1], tensor["shape"][1:], [-1], [1 << 62])
            )
        case 2:
            start, end = tensor["data_offsets"]
            tensor["data_offsets"] = rng.choice(([end, start], [start, end + 4], [start, start], [0, 1 << 62]))
        case 3:
            del tensors[name]
        case 4:  # the same bytes as another type, of as many values or fewer
            size = tensor["data_offsets"][1] - tensor["data_offsets"][0]
            tensor |= rng.choice(
                (
                    {"dtype": "U8", "shape": [size]},
                    {"dtype": "F16", "shape": [size // 2]},
                    {"dtype": "I32", "shape": [size // 4]},
                    {"dtype": "I64", "shape": [size // 8]} if size % 8 == 0 else {"dtype": "F64", "shape": []},
                )
            )
    return json.dumps(tensors).encode()


def change(rng: random.Random, value: Any) -> None:
    """Replace or remove one field of an object or a list, at any depth."""
    place = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
    inner = value[place]
    if isinstance(inner, dict | list) and inner and rng.random() < 0.8:
        change(rng, inner)
    elif rng.random() < 0.2:
        del value[place]
    else:
        value[place] = rng.choice(WRONG)
