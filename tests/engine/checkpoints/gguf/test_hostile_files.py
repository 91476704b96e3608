"""Damaged GGUF files of mixtures, MXFP4, delta nets and Gemma 4: refused in one line, or a model that answers.

Each mutant is loaded by an engine in another process with a limit on its memory and its time (load_mutants.py).
"""

import json
import random
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader

from faser.engine.execution.models.loader import open_source
from tests.engine.checkpoints.family_models import write_family_model
from tests.engine.checkpoints.gguf.gguf_files import convert
from tests.engine.checkpoints.mtp_models import add_mtp
from tests.engine.checkpoints.mutants import MutantLoader
from tests.engine.checkpoints.test_families import CASES

NUMBERS = (0, 1, 2, 3, 7, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, -1)
FLOATS = (0.0, -1.0, 1e-30, 1e30, float("nan"), float("inf"))
MUTANTS, ALL_MUTANTS = 24, 300  # of each file
# A case of the families, and the architecture of its file; the others with --full.
USUAL = ("gpt-oss", "qwen3.5")
FILES = {
    "qwen3-moe-all": "qwen3moe",
    "mixtral": "llama",
    "olmoe": "olmoe",
    "granite-moe": "granitemoe",
    "gpt-oss": "gpt-oss",
    "qwen3.5": "qwen35",
    "qwen3.5-moe": "qwen35moe",
    "qwen3-next": "qwen3next",
    "gemma4": "gemma4",
    "gemma4-e": "gemma4",
    "gemma4-moe": "gemma4",
}


def write_file(name: str, folder: Path) -> Path:
    """The GGUF file of a case, with experts in MXFP4 and a layer that drafts where the hub has them so."""
    case = next(each for each in CASES if each.name == name)
    write_family_model(folder, case.model_type, case.fields)
    if name == "qwen3.5":
        add_mtp(folder)
    config = json.loads((folder / "config.json").read_text())
    if name == "qwen3.5-moe":
        config.pop("intermediate_size")  # the converter finds none in checkpoints
    source = open_source(folder)
    weights = {each: np.ascontiguousarray(source.get(each).numpy()) for each in source.names()}
    if config["tie_word_embeddings"]:
        weights.pop("lm_head.weight", None)
    experts = GGMLQuantizationType.MXFP4 if name == "gpt-oss" else None
    convert(config, weights, folder / "whole.gguf", FILES[name], experts=experts)
    return folder / "whole.gguf"


def damage(rng: random.Random, path: Path) -> None:
    """Change one number of the metadata or of the table of tensors, some bytes anywhere, or the length."""
    kind = rng.random()
    if kind < 0.4:
        fields = [each for each in GGUFReader(path).fields.values() if not each.name.startswith("GGUF.")]
        name = rng.choice(fields).name
        field = GGUFReader(path, "r+").fields[name]
        set_number(rng, field.parts[rng.choice(field.data)])
    elif kind < 0.7:
        reader = GGUFReader(path, "r+")
        parts = rng.choice(reader.tensors).field.parts
        set_number(rng, rng.choice(parts[2:]))  # number of dimensions, dimensions, type, offset
    elif kind < 0.95:
        content = bytearray(path.read_bytes())
        end = rng.choice((4096, len(content)))
        for _ in range(rng.choice((1, 4, 16, 64))):
            content[rng.randrange(min(end, len(content)))] = rng.choice(
                (0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256))
            )
        path.write_bytes(content)
    else:
        with path.open("r+b") as file:
            file.truncate(rng.randrange(path.stat().st_size))


def set_number(rng: random.Random, part: Any) -> None:
    """Replace one number of an array; one of text becomes another byte."""
    at = rng.randrange(len(part))
    if part.dtype.kind == "f":
        part[at] = rng.choice(FLOATS)
        return
    number = rng.choice((*NUMBERS, int(part[at]) + 1, int(part[at]) - 1))
    part[at] = np.array([number % (1 << 64)], np.uint64).astype(part.dtype)[0]
    part.flush()


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MutantLoader]:
    with MutantLoader(tmp_path_factory.mktemp("mutants")) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [each if each in USUAL else pytest.param(each, marks=pytest.mark.full) for each in FILES]
)
def test_no_damage_of_a_file_ends_or_hangs_an_engine(
    name: str, tmp_path: Path, loader: MutantLoader, full: bool
) -> None:
    whole, mutant = write_file(name, tmp_path), tmp_path / "mutant.gguf"
    assert loader.outcome(whole) == ("answered", "")

    def write(seed: int) -> Path:
        shutil.copyfile(whole, mutant)
        damage(random.Random(seed), mutant)
        return mutant

    mutants = range(ALL_MUTANTS if full else MUTANTS)
    counts = loader.outcomes(partial(write, seed) for seed in mutants)
    assert counts["refused"] > len(mutants) // 4
    assert counts["answered"]
