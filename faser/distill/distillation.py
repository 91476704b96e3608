"""Distillation: from conversations to a drafter. Records the target's states, trains, measures, writes.

OUT/conversations/     what is learned from (dataset.py)
OUT/states/            what the target computes for it (states.py); may be removed afterwards
OUT/training.safetensors where training stands (trainer.py)
OUT/config.json, model.safetensors, distillation.json      the head, and how it was made
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from faser.config.engine import EngineConfig
from faser.distill.acceptance import HeldOutAcceptance, measure_acceptance
from faser.distill.batch import SampleStore, batches_of_epoch
from faser.distill.dataset import Dataset, held_out
from faser.distill.drafters import BlockKind, DrafterKind, Eagle3Kind
from faser.distill.head import frequent_tokens
from faser.distill.states import StateFolder, record
from faser.distill.target import FrozenTarget
from faser.distill.trainable import Trainable
from faser.distill.trainer import Trainer, TrainingProgress, TrainingSettings, TrainingState
from faser.errors import ConfigError
from faser.files import write_atomically
from faser.types.engine import ProgressCallback

_MEASURED_TOKENS = 5  # of a draft, at least
_TOP = 64  # tokens of a distribution that are kept
_MEASURED_ROWS = 2048  # of a batch that is measured
_TIMED = (256, 1024)  # rows and width of the product that decides the type of activations
_GAIN = 1.2  # by which bfloat16 must be faster than float32


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSettings:
    """block: make a block drafter, which drafts as many tokens in one pass as the training has steps.

    draft_vocab_size: rows of the logits. int8: round the matrices to 8 bits when they are written.

    dtype: of activations in training; None: bfloat16 where its products are faster.
    """

    block: bool = False
    draft_vocab_size: int = 8192
    int8: bool = True
    dtype: str | None = None


class Distillation:
    """One head for one target, in one folder. name: of the target."""

    def __init__(
        self,
        folder: Path,
        target: FrozenTarget,
        name: str,
        config: EngineConfig,
        settings: TrainingSettings,
        head: HeadSettings,
    ) -> None:
        """Raises ConfigError for a folder whose states or training belong to other settings."""
        self._folder = folder
        self._target = target
        self._name = name
        self._settings = settings
        self._head_settings = head
        decoder = target.config.spec
        layers = state_layers(decoder.num_layers)
        about = {
            "model": name,
            "weights": target.decoder.weight_bytes,
            "quantization": config.quantization,
            "dtype": str(target.decoder.dtype).removeprefix("torch."),
            "layers": list(layers),
            "top": _TOP,
        }
        self._states = StateFolder(folder / "states", about, len(layers) * decoder.hidden_size)
        self._layers = layers
        self._draft_vocab_size = min(head.draft_vocab_size, decoder.vocab_size)
        of_all = (target, layers, self._draft_vocab_size, name)
        self._kind: DrafterKind = BlockKind(*of_all, settings.steps) if head.block else Eagle3Kind(*of_all)
        self._state: TrainingState | None = None
        if self._training_path.exists():
            self._state = TrainingState.read(self._training_path)
            stored = {"drafter": Eagle3Kind.name} | self._state.settings  # which older trainings do not say
            _refuse_other_settings(self._training_path, stored, self._about())

    @property
    def block_size(self) -> int | None:
        """Tokens that one pass drafts; None: one."""
        return self._kind.block_size

    @property
    def _training_path(self) -> Path:
        return self._folder / "training.safetensors"

    @property
    def _measured_steps(self) -> int:
        return self.block_size or max(self._settings.steps, _MEASURED_TOKENS)

    def record(self, dataset: Dataset, report: ProgressCallback) -> None:
        """Compute and keep the states that are missing."""
        missing = self._states.num_shards < len(dataset.records)
        if missing:
            record(dataset, self._target.states(self._layers, top=_TOP), self._states, report)

    def train(
        self, dataset: Dataset, report: Callable[[TrainingProgress], None], stops: Callable[[], bool]
    ) -> bool:
        """Learn, or go on with it. Returns whether the end is reached, and not only stopped."""
        state = self._state = self._state or self._begin(dataset)
        trainer = Trainer(
            self._head(state),
            state,
            self._settings,
            lambda: self._store(lambda at: not held_out(at)),
            self._training_path,
        )
        return trainer.run(report, stops)

    def measure(self, *, temperature: float, on_batch: Callable[[int, int], None]) -> HeldOutAcceptance:
        """Acceptance on the conversations that are held out. on_batch: takes the number done, and that of all."""
        state = self._trained()
        store = self._store(held_out)
        if not len(store):
            raise ConfigError(f"{self._folder} holds no conversation out: make more, with --tokens")
        batches = batches_of_epoch(store.drafting_rows, rows=_MEASURED_ROWS, seed=0, epoch=0)
        done = 0

        def count() -> None:
            nonlocal done
            done += 1
            on_batch(done, len(batches))

        head = self._head(state)
        return measure_acceptance(
            head,
            store,
            state.draft_ids.to(head.device),
            batches,
            steps=self._measured_steps,
            temperature=temperature,
            on_batch=count,
        )

    def write(self, about: dict[str, Any]) -> None:
        """The head as it is now, as a speculators directory. about: what else distillation.json says."""
        state = self._trained()
        whole = len(state.draft_ids) == self._target.config.spec.vocab_size
        weights = {name: weight.detach() for name, weight in state.weights.items()}
        draft_ids = None if whole else state.draft_ids
        self._kind.write(self._folder, weights, draft_ids, int8=self._head_settings.int8)
        made = {
            "target": self._name,
            "training": state.settings | {"epochs": state.epoch, "steps": state.steps, "rows": state.rows},
            "seconds": round(state.seconds),
            **about,
        }
        write_atomically(self._folder / "distillation.json", json.dumps(made, indent=1) + "\n")

    def _trained(self) -> TrainingState:
        if self._state is None:
            raise ConfigError(f"{self._training_path} is missing; there is no head yet")
        return self._state

    def _begin(self, dataset: Dataset) -> TrainingState:
        model = self._target.config
        draft_ids = frequent_tokens(dataset, model.spec.vocab_size, self._draft_vocab_size, model.eos_token_ids)
        weights = self._kind.initial_weights(draft_ids, self._states.shard(0).states, self._settings.seed)
        dtype = self._head_settings.dtype or faster_dtype(self._target.backend.device)
        return TrainingState(settings=self._about() | {"dtype": dtype}, draft_ids=draft_ids, weights=weights)

    def _about(self) -> dict[str, Any]:
        """Settings that a training keeps to its end. How long it takes may change."""
        settings = asdict(replace(self._settings, epochs=0, hours=None))
        del settings["epochs"], settings["hours"]
        return settings | {
            "drafter": self._kind.name,
            "draft_vocab_size": self._draft_vocab_size,
            "layers": list(self._layers),
        }

    def _head(self, state: TrainingState) -> Trainable:
        device = self._target.backend.device
        state.weights = {
            name: weight.detach().to(device).requires_grad_() for name, weight in state.weights.items()
        }
        positions = self._target.max_rows + self._measured_steps
        return self._kind.trainable(state.weights, positions, getattr(torch, state.settings["dtype"]))

    def _store(self, keeps: Callable[[int], bool]) -> SampleStore:
        state = self._trained()
        shards = [self._states.shard(index) for index in range(self._states.num_shards)]
        return SampleStore(shards, state.draft_ids, self._target.config.spec.vocab_size, keeps)


def state_layers(num_layers: int) -> tuple[int, ...]:
    """The layers whose inputs EAGLE-3's heads read, early, in the middle and late."""
    return tuple(sorted({min(2, num_layers), num_layers // 2, max(num_layers - 3, 0)}))


def faster_dtype(device: torch.device) -> str:
    """bfloat16, or float32 on a processor without fast products of bfloat16. Measured."""
    if device.type != "cpu":
        return "bfloat16"
    rows, width = _TIMED
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = torch.ones((rows, width), dtype=dtype), torch.ones((width, width), dtype=dtype)
        times = []
        for _ in range(5):
            began_s = time.perf_counter()
            torch.mm(x, weight)
            times.append(time.perf_counter() - began_s)
        seconds[dtype] = min(times)
    return "bfloat16" if seconds[torch.bfloat16] * _GAIN < seconds[torch.float32] else "float32"


def _refuse_other_settings(path: Path, stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, value in wanted.items():
        if stored.get(name) != value:
            raise ConfigError(
                f"{path} was begun with {name} {json.dumps(stored.get(name))}, not {json.dumps(value)}: "
                "remove it to train anew, or give the same flags"
            )
