"""Training that is stopped or killed ends with the weights of one that is not. Oracle: the unbroken training."""

from pathlib import Path
from typing import cast

import pytest
import torch

from faser.distill.batch import SampleStore, batches_of_epoch
from faser.distill.head import TrainableHead
from faser.distill.trainer import Trainer, TrainingProgress, TrainingSettings, TrainingState, rate_at
from faser.errors import ConfigError
from tests.distill.small import ListedSamples, embedding, sample, small_head, small_spec

SETTINGS = TrainingSettings(epochs=4, rows=24, steps=2, rate=2e-2, warm_up=2)
DRAFT_IDS = torch.arange(3, 27, 2)


class KilledError(Exception):
    """The process is killed."""


SAMPLES = [sample(6 + at % 9, 2 + at % 3, 100 + at) for at in range(20)]


def begin() -> TrainingState:
    return TrainingState(settings={"seed": 0}, draft_ids=DRAFT_IDS, weights=small_head().weights)


def trainer(state: TrainingState, path: Path, settings: TrainingSettings = SETTINGS, **options: object) -> Trainer:
    state.weights = {name: weight.detach().requires_grad_() for name, weight in state.weights.items()}
    head = TrainableHead(small_spec(), state.weights, embedding(), positions=64, dtype=torch.float32)
    store = cast(SampleStore, ListedSamples(SAMPLES))
    return Trainer(head, state, settings, lambda: store, path, **options)  # type: ignore[arg-type]


def unbroken(path: Path) -> tuple[TrainingState, list[TrainingProgress]]:
    state, shown = begin(), list[TrainingProgress]()
    assert trainer(state, path).run(shown.append, lambda: False)
    return state, shown


def assert_same(one: TrainingState, other: TrainingState) -> None:
    assert (one.epoch, one.batch, one.steps, one.rows) == (other.epoch, other.batch, other.steps, other.rows)
    for name, weight in one.weights.items():
        assert torch.equal(weight, other.weights[name]), name


def test_a_training_that_stops_after_every_step_ends_with_the_same_weights(tmp_path: Path) -> None:
    """Seen to catch: a rate or an order that begins anew, a state without the optimiser's."""
    whole, shown = unbroken(tmp_path / "whole.pt")
    path = tmp_path / "parts.pt"
    state, times = begin(), 0
    while not trainer(state, path).run(lambda _found: None, lambda: True):
        state = TrainingState.read(path)
        times += 1
    assert times == whole.steps
    assert_same(whole, TrainingState.read(path))
    assert [each.share for each in shown] == sorted(each.share for each in shown)
    assert shown[-1].rows == whole.rows


def test_a_killed_training_goes_on_from_its_last_state(tmp_path: Path) -> None:
    whole, _ = unbroken(tmp_path / "whole.pt")
    path = tmp_path / "killed.pt"
    hours = iter(range(10_000))
    seen = 0

    def kill(_found: TrainingProgress) -> None:
        nonlocal seen
        seen += 1
        if seen == 7:
            raise KilledError

    with pytest.raises(KilledError):  # the state is written after each step, for an hour passes in it
        trainer(begin(), path, clock=lambda: 3600.0 * next(hours)).run(kill, lambda: False)
    state = TrainingState.read(path)
    assert 0 < state.steps < 7
    assert trainer(state, path).run(lambda _found: None, lambda: False)
    assert_same(whole, state)


def test_the_loss_falls_and_drafts_come_true(tmp_path: Path) -> None:
    _, shown = unbroken(tmp_path / "a.pt")
    assert shown[-1].loss < 0.8 * shown[0].loss


def test_conversations_that_are_made_meanwhile_wait_for_the_next_epoch(tmp_path: Path) -> None:
    sizes = iter([8, 20, 20, 20])
    learned: list[int] = []
    state = begin()
    head = TrainableHead(small_spec(), state.weights, embedding(), positions=64, dtype=torch.float32)

    def store() -> SampleStore:
        return cast(SampleStore, ListedSamples(SAMPLES[: next(sizes)]))

    def note(_found: TrainingProgress) -> None:
        learned.append(state.conversations)

    assert Trainer(head, state, SETTINGS, store, tmp_path / "a.pt").run(note, lambda: False)
    assert learned[0] == 8
    assert learned[-1] == 20


def test_hours_end_a_training_wherever_it_is(tmp_path: Path) -> None:
    times = iter(range(10_000))
    state = begin()
    settings = TrainingSettings(hours=0.01, rows=24, steps=2)
    shown: list[TrainingProgress] = []
    assert trainer(state, tmp_path / "a.pt", settings, clock=lambda: float(next(times))).run(
        shown.append, lambda: False
    )
    assert state.seconds >= 36
    assert shown[-1].share <= 1


def test_the_rate_rises_then_falls() -> None:
    rates = [rate_at(step / 1000, step, 100) for step in range(1001)]
    assert rates[0] == pytest.approx(0.01)
    assert max(rates) == pytest.approx(rates[99], rel=0.02)
    assert rates[-1] == pytest.approx(0.05)
    assert rates[100:] == sorted(rates[100:], reverse=True)
    short = [rate_at(step / 60, step, 100) for step in range(61)]
    assert max(short) > 0.99, "a short training learns at the highest rate, too"
    assert short[3:] == sorted(short[3:], reverse=True)


def test_each_epoch_has_every_conversation_once_in_an_order_of_its_own() -> None:
    rows = [3 + at % 50 for at in range(700)]
    epochs = [batches_of_epoch(rows, rows=200, seed=1, epoch=epoch) for epoch in (0, 1)]
    for batches in epochs:
        assert sorted(index for batch in batches for index in batch) == list(range(700))
        assert all(sum(rows[index] for index in batch) <= 200 for batch in batches)
    assert epochs[0] != epochs[1]
    assert epochs[0] == batches_of_epoch(rows, rows=200, seed=1, epoch=0)
    padded = sum(len(batch) * max(rows[index] for index in batch) for batch in epochs[0])
    assert padded < 1.2 * sum(rows)


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    (tmp_path / "training.safetensors").write_bytes(b"cut")
    with pytest.raises(ConfigError, match=r"training\.safetensors cannot be read: .*; remove it to train anew"):
        TrainingState.read(tmp_path / "training.safetensors")
