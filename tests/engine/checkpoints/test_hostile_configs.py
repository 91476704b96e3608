"""A config.json that states other sizes than its weights have: refused in one line, or a model that answers.

Each mutant is loaded by an engine in another process with a limit on its memory and its time (load_mutants.py).
"""

import json
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import write_json, write_tiny_checkpoint
from tests.engine.checkpoints.family_models import store_in_mxfp4, write_family_model
from tests.engine.checkpoints.low_bit_checkpoints import KINDS, write_pair
from tests.engine.checkpoints.mtp_models import add_mtp
from tests.engine.checkpoints.mutants import MutantLoader
from tests.engine.checkpoints.test_families import CASES

WRONG: tuple[Any, ...] = (0, -1, 1, 1 << 31, 1 << 40, 1e308, float("nan"), "text", None)
MUTANTS = 60  # of each model, unless all are tried
# Models of different families, layouts and quantisations; the others with --full.
USUAL = ("llama", "gpt-oss-mxfp4", "qwen3.5-moe", "gemma4-all")
MODELS = ("llama", "awq", "w4a16", "gpt-oss-mxfp4", "qwen3.5-mtp", *(case.name for case in CASES))


def write_model(name: str, directory: Path) -> Path:
    match name:
        case "llama":
            return write_tiny_checkpoint(directory)
        case "awq" | "w4a16":
            return write_pair(directory, KINDS[next(each for each in KINDS if each.startswith(name))])[0]
    case = next(each for each in CASES if each.name == name.removesuffix("-mxfp4").removesuffix("-mtp"))
    write_family_model(directory, case.model_type, case.fields)
    if name.endswith("-mxfp4"):
        store_in_mxfp4(directory)
    if name.endswith("-mtp"):
        add_mtp(directory)
    return directory


def numbers(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], int | float]]:
    """Every number at any depth, with the way to it."""
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from numbers(each, (*path, key))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value


def changed(config: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    copied: dict[str, Any] = json.loads(json.dumps(config))
    place: Any = copied
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return copied


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MutantLoader]:
    with MutantLoader(tmp_path_factory.mktemp("mutants")) as found:
        yield found


@pytest.mark.parametrize(
    "name, field, value, words",
    [
        ("llama", "vocab_size", 49_152_000, "asks for [49152000, 64] (hidden_size is 64, vocab_size is 49152000)"),
        ("llama", "vocab_size", 1 << 40, "vocab_size is 1099511627776"),
        ("llama", "max_position_embeddings", 1 << 40, "max_position_embeddings is 1099511627776; tables"),
        ("mixtral", "num_local_experts", 1 << 40, "num_experts is 1099511627776; at most 4096 are supported"),
        ("mixtral", "num_local_experts", 4096, "block_sparse_moe.gate.weight has shape [5, 64]"),
    ],
)
def test_a_size_that_no_tensor_has_is_refused_by_name(
    name: str, field: str, value: int, words: str, tmp_path: Path, loader: MutantLoader
) -> None:
    directory = write_model(name, tmp_path / name)
    config = json.loads((directory / "config.json").read_text())
    write_json(directory / "config.json", config | {field: value})
    kind, message = loader.outcome(directory)
    assert kind == "refused"
    assert words in message


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [each if each in USUAL else pytest.param(each, marks=pytest.mark.full) for each in MODELS]
)
@pytest.mark.full(but=("gpt-oss-mxfp4", "qwen3.5-moe"))
def test_no_number_of_a_config_ends_or_hangs_an_engine(
    name: str, tmp_path: Path, loader: MutantLoader, full: bool
) -> None:
    directory = write_model(name, tmp_path / name)
    config = json.loads((directory / "config.json").read_text())
    assert loader.outcome(directory) == ("answered", "")
    mutants = [(path, value) for path, number in numbers(config) for value in (*WRONG, number + 1, number - 1)]
    if not full:
        mutants = random.Random(48).sample(mutants, MUTANTS)

    def write(path: tuple[Any, ...], value: Any) -> Path:
        write_json(directory / "config.json", changed(config, path, value))
        return directory

    counts = loader.outcomes(partial(write, *each) for each in mutants)
    assert counts["refused"] > len(mutants) // 4
    assert counts["answered"]
