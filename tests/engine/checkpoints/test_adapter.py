"""LoRA adapters as files: what is read, what is refused by name, and damage.

Oracle of what is read: PEFT, which has written the adapter, by the weights that it adds.
"""

import json
import math
import os
import random
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from faser.engine.checkpoints.adapter import open_adapter, read_adapter
from faser.engine.checkpoints.families import decoder_spec
from faser.errors import ModelError
from tests.checkpoints import tiny_llama_config
from tests.engine.checkpoints.adapter_files import (
    PREFIX,
    adapt_by_peft,
    random_factors,
    tiny_modules,
    write_adapter,
    write_gguf_adapter,
)
from tests.engine.checkpoints.family_models import write_family_model
from tests.engine.checkpoints.test_damaged_files import changed_header

SPEC = decoder_spec(tiny_llama_config())
Q = "model.layers.0.self_attn.q_proj"
MUTANTS = 150


def added(path: Path) -> dict[str, torch.Tensor]:
    """Return what an adapter adds to each weight, scale * up @ down."""
    file = open_adapter(path, max_rank=64)
    found = {}
    for module, part in file.parts.items():
        down, up = file.factors(module, SPEC)
        assert (part.rank, part.shape) == (len(down), (len(up), down.shape[1]))
        found[module] = part.scale * up.float() @ down.float()
    return found


@pytest.mark.parametrize("rslora", [False, True])
def test_what_peft_writes_adds_what_it_adds_there(tmp_path: Path, rslora: bool) -> None:
    """Ranks and scales of single modules too, by the last part of a name, by the whole, and from its beginning."""
    peft = adapt_by_peft(
        write_family_model(tmp_path / "model", "llama", {}),
        tmp_path / "adapter",
        seed=3,
        r=8,
        lora_alpha=12,
        target_modules="all-linear",
        use_rslora=rslora,
        rank_pattern={"down_proj": 3, "model.layers.1.mlp.down_proj": 5},
        alpha_pattern={"^model.layers.2.mlp.up_proj": 7, "layers.0.self_attn.q_proj": 40},
    )
    layers = {name: each for name, each in peft.named_modules() if hasattr(each, "get_delta_weight")}
    expected = {name.removeprefix(PREFIX): each.get_delta_weight("default") for name, each in layers.items()}
    found = added(tmp_path / "adapter")
    assert found.keys() == expected.keys()
    assert len(found) == 3 * 7
    for name, delta in found.items():
        torch.testing.assert_close(delta, expected[name])
    assert open_adapter(tmp_path / "adapter", max_rank=8).rank == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_of_each_type_are_those_stored(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = write_adapter(tmp_path / "a", dtype=dtype)
    stored = load_file(folder / "adapter_model.safetensors")
    file = open_adapter(folder, max_rank=4)
    for module in file.parts:
        for letter, factor in zip("AB", file.factors(module, SPEC), strict=True):
            assert torch.equal(factor, stored[f"{PREFIX}{module}.lora_{letter}.weight"])


def test_tensors_at_odd_places_are_read(tmp_path: Path) -> None:
    """Old files have headers of any length."""
    path = write_adapter(tmp_path / "a") / "adapter_model.safetensors"
    expected = added(tmp_path / "a")
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    path.write_bytes(struct.pack("<Q", length + 1) + content[8 : 8 + length] + b" " + content[8 + length :])
    assert all(torch.equal(delta, expected[name]) for name, delta in added(tmp_path / "a").items())


@pytest.mark.parametrize("stored", ["layers.", "model.language_model.layers.", "language_model.model.layers."])
def test_names_within_other_models_are_those_of_a_text_model(tmp_path: Path, stored: str) -> None:
    modules = {name.replace("model.layers.", stored): shape for name, shape in tiny_modules("q_proj").items()}
    folder = write_adapter(tmp_path / "a", modules)
    assert open_adapter(folder, max_rank=4).parts.keys() == tiny_modules("q_proj").keys()


def test_gguf_adapters_add_what_the_same_one_of_peft_adds(tmp_path: Path) -> None:
    """Rows of queries and keys stand as llama.cpp's converter puts them: those that turn together side by side."""
    modules = tiny_modules("q_proj", "k_proj", "down_proj")
    factors = random_factors(modules, 4, seed=0)
    write_adapter(tmp_path / "peft", modules)
    names = {
        "self_attn.q_proj": ("attn_q", 4),
        "self_attn.k_proj": ("attn_k", 2),
        "mlp.down_proj": ("ffn_down", 0),
    }
    stored = {}
    for module, (down, up) in factors.items():
        _, _, layer, kind = module.split(".", 3)
        name, heads = names[kind]
        if heads:
            up = up.reshape(heads, 2, len(up) // heads // 2, -1).swapaxes(1, 2).reshape(up.shape)
        stored[f"blk.{layer}.{name}.weight"] = (down, up)
    path = write_gguf_adapter(tmp_path / "a.gguf", stored)
    expected, found = added(tmp_path / "peft"), added(path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(delta, expected[name]) for name, delta in found.items())
    assert open_adapter(path, max_rank=4).architecture == "llama"


def test_alpha_0_of_a_gguf_adapter_is_a_scale_of_one(tmp_path: Path) -> None:
    factors = random_factors({"blk.0.ffn_down.weight": (64, 128)}, 4, seed=0)
    path = write_gguf_adapter(tmp_path / "a.gguf", factors, adapter__lora__alpha=0.0)
    assert open_adapter(path, max_rank=4).parts["model.layers.0.mlp.down_proj"].scale == 1.0


def test_a_digest_follows_the_content_and_not_the_place(tmp_path: Path) -> None:
    first, same, other = (
        write_adapter(tmp_path / name, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    scaled = write_adapter(tmp_path / "d", lora_alpha=9)
    digests = [read_adapter("x", path, max_rank=4).digest for path in (first, same, other, scaled)]
    assert digests[0] == digests[1]
    assert len({*digests}) == 3
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in digests)


def test_reading_an_adapter_loads_no_torch(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    factors = random_factors({"blk.0.ffn_down.weight": (64, 128)}, 4, seed=0)
    path = write_gguf_adapter(tmp_path / "a.gguf", factors)
    program = (
        "import sys; from pathlib import Path; from faser.engine.checkpoints.adapter import read_adapter\n"
        "for path in sys.argv[1:]: print(read_adapter('x', Path(path), max_rank=4).digest)\n"
        "sys.exit('torch' in sys.modules)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, folder, path], capture_output=True, text=True, check=True
    )
    assert len(ended.stdout.split()) == 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "use_dora is True; FASER does not support DoRA"),
        (
            {"modules_to_save": ["lm_head"]},
            r"modules_to_save is \['lm_head'\]; FASER does not support whole modules",
        ),
        ({"bias": "lora_only"}, "bias is 'lora_only'; FASER adapts no biases"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; FASER serves LORA"),
        ({"init_lora_weights": "pissa"}, "'pissa', which changes the weights of the base model"),
        ({"alora_invocation_tokens": [1]}, "activation by tokens"),
        ({"target_parameters": ["mlp.experts"]}, "target_parameters"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"r": 3}, r"r of model\S+ is 3; its lora_A has 4 rows"),
        ({"r": "4"}, "r is '4'; it must be a number"),
        ({"lora_alpha": None}, "lora_alpha is None; it must be a number"),
        ({"lora_alpha": math.nan}, "lora_alpha is nan"),
        ({"alpha_pattern": {"(.*)*q_proj": 3}}, r"alpha_pattern has the regular expression '\(\.\*\)\*q_proj'"),
        ({"rank_pattern": {"q_proj": 9}}, r"r of model\S+q_proj is 9; its lora_A has 4 rows"),
        ({"rank_pattern": [4]}, r"rank_pattern is \[4\]; it must be an object"),
    ],
)
def test_fields_that_are_not_supported_are_named(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    folder = write_adapter(tmp_path / "a", **config)
    with pytest.raises(ModelError, match=message) as caught:
        open_adapter(folder, max_rank=4)
    assert str(folder / "adapter_config.json") in str(caught.value)


def test_fields_of_newer_versions_are_ignored_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    open_adapter(write_adapter(tmp_path / "a", new_feature={"a": 1}, megatron_core="megatron.core"), max_rank=4)
    assert "ignoring new_feature, which FASER does not know" in caplog.text


def stored_as(folder: Path, **changes: torch.Tensor | None) -> Path:
    """Write an adapter of q_proj whose tensors, by the last parts of their names with _ for a dot, are others."""
    tensors = load_file(write_adapter(folder, tiny_modules("q_proj")) / "adapter_model.safetensors")
    for name, tensor in changes.items():
        whole = f"{PREFIX}{Q}.{name.replace('__', '.')}"
        tensors.pop(whole, None)
        if tensor is not None:
            tensors[whole] = tensor
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_B__weight": None}, f"lacks lora_B of {Q}"),
        ({"lora_A__weight": None}, f"lacks lora_A of {Q}"),
        ({"lora_A__weight": torch.zeros(5, 64)}, r"lora_A of .* has shape \[5, 64\] and lora_B \[64, 4\]"),
        ({"lora_A__weight": torch.zeros(4, 64, 1)}, r"shape \[4, 64, 1\]"),
        ({"lora_A__weight": torch.zeros(0, 64), "lora_B__weight": torch.zeros(64, 0)}, r"shape \[0, 64\]"),
        ({"lora_A__weight": torch.zeros(4, 64, dtype=torch.int8)}, "stored as I8; supported are F32, F16, BF16"),
        ({"lora_magnitude_vector": torch.zeros(64)}, "has a tensor .*lora_magnitude_vector; FASER reads lora_A"),
        ({"lora_B__bias": torch.zeros(64)}, "has a tensor .*lora_B.bias"),
        ({"lora_A__default__weight": torch.zeros(4, 64)}, f"has lora_A of {Q} twice"),
    ],
)
def test_tensors_that_are_no_adapter_are_named(
    tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        open_adapter(stored_as(tmp_path / "a", **changes), max_rank=4)


@pytest.mark.parametrize("module", ["lm_head", "model.embed_tokens"])
def test_embeddings_and_the_head_are_refused(tmp_path: Path, module: str) -> None:
    folder = write_adapter(tmp_path / "a", {module: (512, 64)})
    with pytest.raises(ModelError, match=f"adapts {module}; FASER adapts linear modules of the decoder's layers"):
        open_adapter(folder, max_rank=4)


def test_a_rank_above_the_limit_is_refused(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", rank=16)
    with pytest.raises(ModelError, match=r"the adapter of model\S+ has rank 16; --max-lora-rank is 8"):
        open_adapter(folder, max_rank=8)
    path = write_gguf_adapter(
        tmp_path / "a.gguf", random_factors({"blk.0.ffn_down.weight": (64, 128)}, 16, seed=0)
    )
    with pytest.raises(ModelError, match=r"the adapter of blk\.0\.ffn_down\.weight has rank 16"):
        open_adapter(path, max_rank=8)


@pytest.mark.parametrize(
    ("metadata", "names", "message"),
    [
        ({"general__type": "model"}, ["blk.0.ffn_down.weight"], "general.type is 'model'; that of a LoRA adapter"),
        ({"adapter__type": "control"}, ["blk.0.ffn_down.weight"], "adapter.type is 'control'"),
        ({"adapter__lora__alpha": -1.0}, ["blk.0.ffn_down.weight"], "adapter.lora.alpha is -1.0"),
        ({"adapter__lora__alpha": "x"}, ["blk.0.ffn_down.weight"], "adapter.lora.alpha is 'x'"),
        ({"adapter__alora__invocation_tokens": [1]}, ["blk.0.ffn_down.weight"], "activation by tokens"),
        ({}, ["token_embd.weight"], "adapts model.embed_tokens"),
        ({}, ["blk.0.nonsense.weight"], "has a tensor blk.0.nonsense.weight, which no supported model"),
        ({}, [], "has no tensors of an adapter"),
        ({"architecture": "mamba"}, ["blk.0.ffn_down.weight"], "is of architecture mamba"),
    ],
)
def test_gguf_adapters_that_are_not_supported_are_named(
    tmp_path: Path, metadata: dict[str, Any], names: list[str], message: str
) -> None:
    factors = random_factors(dict.fromkeys(names, (64, 128)), 4, seed=0)
    with pytest.raises(ModelError, match=message):
        open_adapter(write_gguf_adapter(tmp_path / "a.gguf", factors, **metadata), max_rank=4)


def test_files_that_are_missing_or_no_adapter_are_named(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    weights = folder / "adapter_model.safetensors"
    for path, message in ((tmp_path / "none", "is no adapter"), (weights, "is no adapter")):
        with pytest.raises(ModelError, match=message):
            open_adapter(path, max_rank=4)
    weights.rename(folder / "adapter_model.bin")
    with pytest.raises(ModelError, match="is a pickle, which may run code"):
        open_adapter(folder, max_rank=4)
    (folder / "adapter_model.bin").unlink()
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors is missing"):
        open_adapter(folder, max_rank=4)
    weights.write_bytes(b"")
    with pytest.raises(ModelError, match="is empty"):
        open_adapter(folder, max_rank=4)
    os.truncate(weights, 1 << 42)  # of a file that takes no room
    with pytest.raises(ModelError, match=r"has 4TiB, more than the .*B of free memory"):
        open_adapter(folder, max_rank=4)
    weights.unlink()
    os.mkfifo(weights)
    with pytest.raises(ModelError, match="is no regular file"):
        open_adapter(folder, max_rank=4)


def outcome(path: Path) -> bool:
    """Return whether an adapter is refused. Anything but ModelError escapes; values of others are all read."""
    try:
        file = open_adapter(path, max_rank=64)
        for module in file.parts:
            for factor in file.factors(module, SPEC):
                factor.float().sum()
    except ModelError:
        return True
    return False


@pytest.mark.parametrize("kind", ["peft", "gguf"])
def test_every_cut_file_is_refused(tmp_path: Path, kind: str) -> None:
    factors = random_factors({"blk.0.ffn_down.weight": (64, 128)}, 4, seed=0)
    gguf = write_gguf_adapter(tmp_path / "a.gguf", factors)
    folder = write_adapter(tmp_path / "a", tiny_modules("q_proj"))
    path, named = (gguf, gguf) if kind == "gguf" else (folder / "adapter_model.safetensors", folder)
    content = path.read_bytes()
    assert not outcome(named)
    for size in range(1, len(content), max(1, len(content) // 200)):
        path.write_bytes(content[:size])
        assert outcome(named), f"cut to {size} of {len(content)} bytes"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", ["safetensors", "config", "gguf"])
def test_damaged_adapters_are_refused_or_read(tmp_path: Path, kind: str) -> None:
    """Seeded mutants of headers and fields: nothing but ModelError escapes."""
    factors = random_factors({"blk.0.ffn_down.weight": (64, 128), "blk.1.attn_q.weight": (64, 64)}, 4, seed=0)
    gguf = write_gguf_adapter(tmp_path / "a.gguf", factors)
    folder = write_adapter(tmp_path / "a", tiny_modules("q_proj"), rank_pattern={"q_proj": 4})
    path = {
        "gguf": gguf,
        "config": folder / "adapter_config.json",
        "safetensors": folder / "adapter_model.safetensors",
    }[kind]
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    refused = 0
    for seed in range(MUTANTS):
        rng = random.Random(seed)
        if kind == "safetensors" and seed % 2:
            header = changed_header(rng, json.loads(content[8 : 8 + length]))
            damaged = bytearray(struct.pack("<Q", len(header)) + header + content[8 + length :])
        else:
            damaged = bytearray(content)
            end = {"gguf": 700, "config": len(content), "safetensors": 8 + length}[kind]
            for _ in range(rng.choice((1, 4, 16))):
                damaged[rng.randrange(end)] = rng.choice((0, 1, 0x22, 0x7B, 0x7F, 0xFF, rng.randrange(256)))
        path.write_bytes(damaged)
        refused += outcome(gguf if kind == "gguf" else folder)
    assert MUTANTS > refused > MUTANTS // 4
