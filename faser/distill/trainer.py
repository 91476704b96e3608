"""Trainer: learns a head batch by batch, and can stop after any of them.

    epoch → batches of conversations → loss → Muon and AdamW, whose rate warms up and falls along a cosine

What is minimised is the drafter's own loss (head.py, block.py), over the drafts of every position. Distributions
are the target's at temperature 1, cut to the drafter's vocabulary: other tokens count for nothing.

What is learned follows from the settings, the states and the number of threads: a training that was stopped or
killed, and goes on from its last state, ends with the same weights. With `hours` the rate follows the clock. The
state is one safetensors file that is replaced as a whole, numbers and settings as JSON in its header. A file of
torch.save would be a pickle, which FASER never reads here.
"""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from faser.distill.arithmetic import Muon
from faser.distill.batch import SampleStore, batches_of_epoch, make_batch
from faser.distill.dataset import unwritable
from faser.distill.trainable import Trainable
from faser.engine.execution.drafting.heads import tensors
from faser.errors import ConfigError
from faser.files import parse_json, replacing

_WARM_SHARE = 0.05  # of a training, in which its rate rises at the longest
_LAST_RATE = 0.05  # of the highest rate, at the end
_HEAD_RATE = 0.5  # of the rate, for the rows that begin as the target's
_BETAS = (0.9, 0.95)
_MOST_NORM = 1.0
_SMOOTHING = 0.98  # of what is shown
_SAVE_EVERY_S = 180.0
_WEIGHT, _DRAFT_IDS = "weights/", "draft_ids"
_NUMBERS = ("epoch", "batch", "steps", "rows", "seconds", "conversations")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """seed: of weights and order. epochs: over all conversations. hours: instead; None: epochs. steps: drafted
    tokens that are unrolled. rows: of a batch that draft. rate: the highest. warm_up: steps until then.
    """

    seed: int = 0
    epochs: int = 8
    hours: float | None = None
    steps: int = 3
    rows: int = 1024
    rate: float = 2e-3
    warm_up: int = 100
    weight_decay: float = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingProgress:
    """share: of the training, 0 … 1. rows: learned in all. rows_per_s: since this process began.

    loss, expected_length: smoothed. The latter counts the tokens of drafts that the conversations have, too.
    """

    share: float
    epoch: int
    loss: float
    expected_length: float
    rows: int
    rows_per_s: float
    seconds: float


@dataclass(slots=True, kw_only=True)
class TrainingState:
    """settings: of the training, as JSON. draft_ids: [Vd] int64. optimizers: their state_dict(); {}: none yet.

    epoch: the one that is learned; batch: how many of its batches are done; conversations: how many it has, so
    that others that are made meanwhile wait for the next one. rows: drafting rows learned. seconds: spent.
    """

    settings: dict[str, Any]
    draft_ids: Tensor
    weights: dict[str, Tensor]
    optimizers: dict[str, dict[str, Any]] = field(default_factory=dict)
    epoch: int = 0
    batch: int = 0
    steps: int = 0
    rows: int = 0
    seconds: float = 0.0
    conversations: int = 0

    def write(self, path: Path) -> None:
        """Raises ConfigError where the disk is full; the state that was written before is kept."""
        found = {_WEIGHT + name: weight.detach() for name, weight in self.weights.items()}
        for optimizer, state in self.optimizers.items():
            for index, moments in state["state"].items():
                found |= {f"{optimizer}/{index}/{name}": each for name, each in moments.items()}
        found[_DRAFT_IDS] = self.draft_ids
        about = {name: getattr(self, name) for name in _NUMBERS} | {"settings": self.settings}
        about["groups"] = {name: state["param_groups"] for name, state in self.optimizers.items()}
        about["weights"] = list(self.weights)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as new:
                save_file(
                    {name: each.cpu().contiguous() for name, each in found.items()},
                    new,
                    {"training": json.dumps(about)},
                )
        except (OSError, SafetensorError) as error:  # the latter where a disk is full
            cause = error if isinstance(error, OSError) else OSError(28, str(error))
            raise unwritable(path, cause) from None

    @classmethod
    def read(cls, path: Path) -> "TrainingState":
        """Raises ConfigError that names a damaged file."""
        try:
            with safe_open(path, framework="pt") as file:
                about = parse_json(file.metadata()["training"])
                found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return cls(
                settings=dict(about["settings"]),
                draft_ids=found.pop(_DRAFT_IDS),
                weights={name: found[_WEIGHT + name] for name in about["weights"]},  # groups name them by place
                optimizers={name: _optimizer(name, groups, found) for name, groups in about["groups"].items()},
                **{name: about[name] for name in _NUMBERS},
            )
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            said = str(error).partition("\n")[0]
            raise ConfigError(f"{path} cannot be read: {said}; remove it to train anew") from None


def _optimizer(optimizer: str, groups: list[dict[str, Any]], found: dict[str, Tensor]) -> dict[str, Any]:
    state: dict[int, dict[str, Tensor]] = {}
    for name, each in found.items():
        if name.startswith(f"{optimizer}/"):
            _, index, moment = name.split("/")
            state.setdefault(int(index), {})[moment] = each
    return {"state": state, "param_groups": groups}


class Trainer:
    """state: is changed as training goes on, and written to path every few minutes and at the end."""

    def __init__(
        self,
        head: Trainable,
        state: TrainingState,
        settings: TrainingSettings,
        store: Callable[[], SampleStore],
        path: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """store: the conversations that there are now; asked for at the start of every epoch."""
        self._head = head
        self._state = state
        self._settings = settings
        self._store = store
        self._path = path
        self._clock = clock
        self._draft_ids = state.draft_ids.to(head.device)
        self._optimizers = _optimizers(head, settings)
        for name, stored in state.optimizers.items():
            self._optimizers[name].load_state_dict(stored)

    @property
    def done(self) -> bool:
        settings, state = self._settings, self._state
        if settings.hours is not None:
            return state.seconds >= settings.hours * 3600
        return state.epoch >= settings.epochs

    def run(self, report: Callable[[TrainingProgress], None], stops: Callable[[], bool]) -> bool:
        """Learn until the end, or until `stops` says so. Returns whether the end is reached."""
        state, saved_s = self._state, self._clock()
        shown = _Shown(self._clock)
        while not self.done:
            store = self._store()
            if state.batch == 0:
                state.conversations = len(store)
            rows = store.drafting_rows[: state.conversations]
            batches = batches_of_epoch(rows, rows=self._settings.rows, seed=self._settings.seed, epoch=state.epoch)
            while state.batch < len(batches) and not self.done:
                began_s = self._clock()
                share = self._progress(state.batch / len(batches))
                found = self._learn(store, batches[state.batch], share)
                state.batch += 1
                state.steps += 1
                state.seconds += self._clock() - began_s
                report(shown.after(found, share, state))
                if stops():
                    self.save()
                    return False
                if self._clock() - saved_s > _SAVE_EVERY_S:
                    self.save()
                    saved_s = self._clock()
            if state.batch >= len(batches):
                state.epoch += 1
                state.batch = 0
        self.save()
        return True

    def save(self) -> None:
        self._state.optimizers = {name: each.state_dict() for name, each in self._optimizers.items()}
        self._state.write(self._path)

    def _progress(self, of_epoch: float) -> float:
        settings, state = self._settings, self._state
        if settings.hours is not None:
            return min(1.0, state.seconds / (settings.hours * 3600))
        return (state.epoch + of_epoch) / settings.epochs

    def _learn(self, store: SampleStore, indices: list[int], share: float) -> tuple[float, float, int]:
        """One step of the optimiser. Returns the loss, the mean accepted length, and the rows."""
        samples, steps = [store.sample(index) for index in indices], self._settings.steps
        batch = make_batch(samples, steps, every=self._head.every).to(self._head.device)
        found = self._head.loss(batch, steps)
        for weight in self._head.weights.values():
            weight.grad = None
        found.loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(list(self._head.weights.values()), _MOST_NORM)
        rate = self._settings.rate * rate_at(share, self._state.steps, self._settings.warm_up)
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = rate * group["share"]
            optimizer.step()
        hits = (self._draft_ids[found.drafts] == batch.said).double().cumprod(0).sum(0)
        rows = len(batch.drafting)
        self._state.rows += rows
        return float(found.loss.detach()), float(hits.mean()), rows


def rate_at(share: float, steps: int, warm_up: int) -> float:
    """Return the share of the highest rate after this share of the training and this number of steps.

    It rises over warm_up steps, or over a twentieth of the training where that is sooner.
    """
    fallen = _LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))
    return fallen * min(1.0, max((steps + 1) / warm_up, share / _WARM_SHARE))


def _optimizers(head: Trainable, settings: TrainingSettings) -> dict[str, torch.optim.Optimizer]:
    """Muon for matrices that multiply states; AdamW for norms, and for rows of the logits, which are tokens."""
    matrices = [name for name in head.weights if name.endswith("_proj.weight") or name == tensors.FC]
    others = [name for name in head.weights if name not in matrices]
    return {
        "muon": Muon(
            [{"params": [head.weights[name] for name in matrices], "share": 1.0}],
            lr=settings.rate,
            weight_decay=settings.weight_decay,
            dtype=head.dtype,
        ),
        "adamw": torch.optim.AdamW(
            [
                {"params": [head.weights[name]], "share": _HEAD_RATE if name == tensors.HEAD else 1.0}
                for name in others
            ],
            lr=settings.rate,
            betas=_BETAS,
            weight_decay=0.0,
            fused=True,
        ),
    }


class _Shown:
    """Smooths what is shown; not a part of the training's state."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_s = clock()
        self._rows = 0
        self._loss = self._length = self._weight = 0.0

    def after(self, found: tuple[float, float, int], share: float, state: TrainingState) -> TrainingProgress:
        loss, length, rows = found
        self._rows += rows
        self._loss = _SMOOTHING * self._loss + (1 - _SMOOTHING) * loss
        self._length = _SMOOTHING * self._length + (1 - _SMOOTHING) * length
        self._weight = _SMOOTHING * self._weight + (1 - _SMOOTHING)
        return TrainingProgress(
            share=share,
            epoch=state.epoch,
            loss=self._loss / self._weight,
            expected_length=self._length / self._weight,
            rows=state.rows,
            rows_per_s=self._rows / max(self._clock() - self._began_s, 1e-9),
            seconds=state.seconds,
        )
