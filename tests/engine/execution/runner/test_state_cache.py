"""Snapshots of recurrent states: who goes on from one gets the bits of who computed everything.

Oracle: the prompt in one piece, without a snapshot. Bugs seen to be caught: inputs of convolutions
that are not restored, or of other positions; a state that holds a refused row.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import library_path
from faser.kernels.interface.delta_net import DeltaShape
from faser.kernels.interface.mixers import CHUNK, StateShape
from tests.checkpoints import VOCAB_SIZE
from tests.engine.checkpoints.family_models import write_family_model
from tests.engine.execution.models.paged import MOST_DRAFTS, PagedModel, Rows, load, prompt
from tests.engine.test_states_engine import FIELDS

END = 2 * CHUNK  # tokens of the snapshot
PROMPT = prompt(75, VOCAB_SIZE)
OTHER = prompt(60, VOCAB_SIZE, seed=9)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_family_model(directory, "qwen3_5_text", FIELDS)
    return directory


@pytest.fixture(params=["torch", "native float32", "native bfloat16"])
def loaded(request: pytest.FixtureRequest, model: Path, kernel_cache: Path) -> PagedModel:
    if request.param == "torch":
        return load(model, num_sequences=2, num_snapshots=3)
    native = NativeBackend(library_path(cache_dir=kernel_cache), num_threads=2)
    dtype = torch.bfloat16 if request.param.endswith("bfloat16") else torch.float32
    return load(model, num_sequences=2, num_snapshots=3, backend=native, dtype=dtype)


def check(paged: PagedModel, found: Tensor, wanted: Tensor) -> None:
    """The native backend's rows have the same bits in every step; the reference's are close."""
    if paged.backend.name == "native":
        assert torch.equal(found, wanted)
    else:
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=3e-5)


def spoil(paged: PagedModel, slot: int) -> None:
    """Leave in a slot what a sequence before may have left there."""
    for state, inputs in paged.states.states.kept():
        state[slot].fill_(3.0)
        inputs[slot].fill_(-5.0)


@pytest.mark.parametrize("num_drafts", [0, MOST_DRAFTS])
@pytest.mark.parametrize("known", [END, END + 1, END + 3, END + CHUNK - 1])
def test_a_snapshot_goes_on_with_the_bits_of_the_whole_prompt(
    known: int, num_drafts: int, loaded: PagedModel
) -> None:
    """It is taken some known rows behind its end, after a step whose drafts are all refused."""
    wanted = loaded.prefill(PROMPT, ())
    loaded.prefill(PROMPT[: known - 1], (20,))
    loaded.step([Rows(0, known - 1, [PROMPT[known - 1], *OTHER[:num_drafts]], num_drafts)])
    loaded.states.save(1, 2, END)  # sequence 0 has slot 1
    spoil(loaded, 1)
    loaded.states.restore(1, 2)
    found = [loaded.step([Rows(0, END, PROMPT[END : END + 1])])]
    found.append(loaded.step([Rows(0, END + 1, PROMPT[END + 1 :])]))
    check(loaded, torch.cat(found), wanted[END:])


def test_accepted_drafts_enter_a_snapshot_once_a_step_has_begun_behind_them(loaded: PagedModel) -> None:
    """All drafts of a step that reaches over a chunk's end are right; the state follows one step later."""
    wanted = loaded.prefill(PROMPT, ())
    loaded.prefill(PROMPT[: END - 3], ())
    loaded.step([Rows(0, END - 3, PROMPT[END - 3 : END + 3], 5)])
    with pytest.raises(AssertionError, match=f"keeps the state after {END - CHUNK} tokens, not after {END}"):
        loaded.states.save(1, 0, END)
    loaded.states.save(1, 1, END - CHUNK)
    loaded.step([Rows(0, END + 3, PROMPT[END + 3 : END + 6], 2)])
    loaded.states.save(1, 0, END)
    for snapshot, end in ((1, END - CHUNK), (0, END)):
        spoil(loaded, 1)
        loaded.states.restore(1, snapshot)
        check(loaded, loaded.step([Rows(0, end, PROMPT[end:])]), wanted[end:])


def test_a_snapshot_serves_any_slot_and_often_and_holds_what_was_saved_last(loaded: PagedModel) -> None:
    """Two sequences of the same tokens go on from one snapshot, in different directions."""
    paged = loaded
    first, second = ([*PROMPT[: END + 5], *OTHER[:20]], [*PROMPT[: END + 2], *OTHER[20:45]])
    wanted = [paged.prefill(each, (), sequence=at)[END:] for at, each in enumerate((first, second))]
    paged.prefill(OTHER, (), sequence=1)
    paged.states.save(0, 0, 3 * CHUNK)
    paged.prefill(PROMPT[:END], ())
    paged.states.save(1, 0, END)
    paged.prefill(PROMPT[:END], (), sequence=1)  # keys and values of its own
    for slot in (0, 1):
        spoil(paged, slot)
        paged.states.restore(slot, 0)
    found = paged.step([Rows(0, END, first[END:]), Rows(1, END, second[END:])])
    check(paged, found, torch.cat(wanted))


def test_a_sequence_goes_on_where_its_snapshot_ends_and_nowhere_else(loaded: PagedModel) -> None:
    loaded.prefill(PROMPT[:END], ())
    loaded.states.save(1, 0, END)
    loaded.states.restore(1, 0)
    for start in (END - CHUNK, END + CHUNK):
        with pytest.raises(AssertionError, match="tokens far, rows begin at"):
            loaded.step([Rows(0, start, PROMPT[start : start + 4])])


def test_memory_of_snapshots_is_counted() -> None:
    layer = DeltaShape(num_k_heads=2, num_v_heads=4, k_head_dim=16, v_head_dim=32, kernel=4)
    bare = StateShape(layers=(layer, None, layer), num_slots=2, most_drafts=4, dtype=torch.bfloat16)
    shape = replace(bare, num_snapshots=3)
    snapshot = 2 * (4 * 4 * 16 * 32 + 2 * 3 * layer.channels)
    assert shape.snapshot_bytes == bare.snapshot_bytes == snapshot
    more_inputs = 2 * 2 * (CHUNK - 1) * layer.channels
    assert shape.total_bytes == bare.total_bytes + 2 * more_inputs + 3 * snapshot
