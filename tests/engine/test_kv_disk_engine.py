"""Engines that keep KV on disk: after a restart prompts go on from there, and no bit of an answer changes.

Oracle: an engine without a prefix cache. Tokens are compared, and log probabilities bit by bit: rows of the native
backend have the same bits in every batch. An engine that is started again has an empty prefix cache in memory.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from faser.engine.engine import Engine
from faser.errors import ConfigError
from faser.types.request import Request
from faser.types.sampling import SamplingParams
from faser.types.statistics import KvDiskStats
from tests.checkpoints import VOCAB_SIZE, write_tiny_checkpoint, write_tokenizer
from tests.engine.checkpoints.family_models import write_family_model
from tests.engine.execution.models.paged import prompt
from tests.engine.losslessness.equality import CAP, Answer, add_noise, answers, build
from tests.engine.test_states_engine import FIELDS, predicted

SETTINGS: dict[str, Any] = {"backend": "native", "max_model_len": 512, "max_num_seqs": 4, "num_threads": 1}
DRAFTS = {"method": "suffix", "num_speculative_tokens": CAP}
SYSTEM = tuple(prompt(210, VOCAB_SIZE, seed=1))
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0, logprobs=1)


@dataclass(frozen=True)
class Model:
    """memory: for the cache of all requests."""

    directory: Path
    memory: int


@pytest.fixture(scope="module", params=["dense", "hybrid"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory = tmp_path_factory.mktemp(request.param)
    if request.param == "dense":
        return Model(write_tiny_checkpoint(directory), 4 << 20)
    write_family_model(directory, "qwen3_5_text", FIELDS | {"max_position_embeddings": 1024})
    write_tokenizer(directory)
    return Model(directory, 32 << 20)


def engine_of(model: Model, folder: Path | None, *, drafts: bool = False, **settings: Any) -> Engine:
    kept = {} if folder is None else {"kv_cache_dir": str(folder), "kv_cache_dir_size": 64 << 20}
    usual = {"kv_cache_memory": model.memory, **SETTINGS, **kept}
    found = build((model.directory, model.directory), DRAFTS if drafts else None, **usual | settings)
    if drafts:
        found.use_policy("fixed", CAP - 1)
    return found


def asked(seed: int, *, salt: str | None = None, **sampling: Any) -> Request:
    """Prompts begin alike."""
    return Request(
        request_id=f"{seed} {salt}",
        prompt_token_ids=(*SYSTEM, *prompt(40, VOCAB_SIZE, seed=seed)),
        sampling=replace(GREEDY, seed=seed, **sampling),
        cache_salt=salt,
    )


REQUESTS = [asked(11), asked(12, temperature=0.8), asked(13, n=2, temperature=0.8)]


@pytest.fixture(scope="module")
def wanted(model: Model) -> dict[tuple[str, int], Answer]:
    alone = engine_of(model, None, max_num_seqs=1, enable_prefix_caching=False)
    found: dict[tuple[str, int], Answer] = {}
    for each in REQUESTS:
        found |= answers(alone, [each])
    return found


def disk(engine: Engine) -> KvDiskStats:
    found = engine.stats().kv_disk
    assert found is not None
    return found


def filled(model: Model, folder: Path, requests: list[Request]) -> KvDiskStats:
    """An engine that ends has answered these, one after the other; what it has written by then."""
    engine = engine_of(model, folder)
    for each in requests:
        answers(engine, [each])
    engine.close()
    return disk(engine)


@pytest.mark.parametrize("drafts", [False, True])
def test_after_a_restart_prompts_go_on_from_the_disk_with_the_same_answers(
    model: Model, wanted: dict[tuple[str, int], Answer], drafts: bool, tmp_path: Path
) -> None:
    assert filled(model, tmp_path, REQUESTS).hits == 0
    engine = engine_of(model, tmp_path, drafts=drafts)
    assert answers(engine, [predicted(each, wanted) for each in REQUESTS]) == wanted
    least = len(SYSTEM) // 16 * 16
    assert disk(engine).hits >= least
    stats = engine.stats()
    assert stats.prefix_cache_hits >= len(REQUESTS) * least
    assert stats.speculation is None or sum(each.accepted for each in stats.speculation.methods) > 0
    assert (stats.speculation is not None) is drafts
    engine.close()


def test_another_namespace_finds_nothing_after_a_restart(model: Model, tmp_path: Path) -> None:
    filled(model, tmp_path, [asked(11, salt="mine")])
    engine = engine_of(model, tmp_path)
    for salt, hits in ("yours", False), (None, False), ("mine", True):
        before = disk(engine).hits, engine.stats().prefix_cache_hits
        answers(engine, [asked(11, salt=salt)])
        assert (disk(engine).hits > before[0]) is hits, salt
        assert (engine.stats().prefix_cache_hits > before[1]) is hits, salt
    engine.close()


def test_a_sequence_that_is_aborted_while_its_prefix_is_read_leaves_nothing(model: Model, tmp_path: Path) -> None:
    filled(model, tmp_path, [REQUESTS[0]])
    engine = engine_of(model, tmp_path)
    for each in REQUESTS[:2]:
        engine.add(each)
    engine.step()
    assert engine.stats().num_waiting > 0
    for each in REQUESTS[:2]:
        engine.abort(each.request_id)
    assert not engine.has_work()
    assert answers(engine, [replace(REQUESTS[0], request_id="again")])
    assert engine.stats().kv_usage == 0
    engine.close()


def damage_records(folder: Path) -> None:
    """Flip a bit in each record."""
    path = only(folder, "records")
    content = bytearray(path.read_bytes())
    for at in range(5, len(content), 1024):
        content[at] ^= 1
    path.write_bytes(content)


def swap_records(folder: Path) -> None:
    """Each record stands where another one was: its bytes are whole, and of other tokens."""
    path = only(folder, "records")
    content, size = path.read_bytes(), record_bytes(folder)
    path.write_bytes(content[size:] + content[:size])


def truncate_records(folder: Path) -> None:
    os.truncate(only(folder, "records"), record_bytes(folder) // 2)


def damage_index(folder: Path) -> None:
    path = only(folder, "index")
    content = bytearray(path.read_bytes())
    for at in range(70, len(content), 16):
        content[at] ^= 1
    path.write_bytes(content)


def replace_index(folder: Path) -> None:
    only(folder, "index").write_bytes(b"a letter to my aunt, which is longer than any header of this file is")


def only(folder: Path, name: str) -> Path:
    (found,) = folder.glob(f"*/{name}")
    return found


def record_bytes(folder: Path) -> int:
    """As the header of the index says."""
    return int.from_bytes(only(folder, "index").read_bytes()[40:48], "little")


@pytest.mark.parametrize(
    "damage",
    [damage_records, swap_records, truncate_records, damage_index, replace_index],
    ids=lambda each: each.__name__,
)
@pytest.mark.full(
    but=(
        "dense-damage_records",
        "dense-truncate_records",
        "dense-replace_index",
        "hybrid-swap_records",
        "hybrid-damage_index",
    )
)
def test_what_is_damaged_is_computed_again_and_logged_once(
    model: Model,
    wanted: dict[tuple[str, int], Answer],
    damage: Callable[[Path], None],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    filled(model, tmp_path, REQUESTS)
    damage(tmp_path)
    caplog.clear()
    engine = engine_of(model, tmp_path)
    assert answers(engine, REQUESTS) == wanted
    assert disk(engine).hits == 0
    engine.close()
    assert len([each for each in caplog.records if each.levelname == "WARNING"]) == 1
    engine = engine_of(model, tmp_path)  # what was computed again has taken its place
    assert answers(engine, REQUESTS) == wanted
    assert disk(engine).hits > 0
    engine.close()


@pytest.mark.parametrize("change", ["weights", "block size", "type of the cache"])
def test_keys_and_values_of_another_layout_or_model_are_not_read(
    model: Model, change: str, tmp_path: Path
) -> None:
    filled(model, tmp_path / "kv", REQUESTS[:1])
    settings: dict[str, Any] = {}
    if change == "weights":
        other = shutil.copytree(model.directory, tmp_path / "other")
        add_noise(other, size=1e-3)
        model = replace(model, directory=other)
    elif change == "block size":
        settings = {"block_size": 32}
    else:
        settings = {"kv_cache_dtype": "int8"}
    engine = engine_of(model, tmp_path / "kv", **settings)
    answers(engine, REQUESTS[:1])
    assert disk(engine).hits == engine.stats().prefix_cache_hits == 0
    engine.close()


def test_a_second_engine_is_refused_the_same_folder(model: Model, tmp_path: Path) -> None:
    engine = engine_of(model, tmp_path)
    with pytest.raises(
        ConfigError, match=f"kv_cache_dir is {tmp_path}; another server uses it .process {os.getpid()}"
    ):
        engine_of(model, tmp_path)
    engine.close()
    engine_of(model, tmp_path).close()
