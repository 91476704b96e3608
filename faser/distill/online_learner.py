"""OnlineLearner: one round after the other, from answers to a trained head and whether it is better.

    answers ─▶ states of the target ─▶ training, from the served head ─▶ written, read again ─▶ measured
                                       no held-out answers                                      on held-out answers

Measures the heads that would be served, rounded as they are written. Keeps the states of answers that come again.

Each answer has its own mean of accepted tokens a draft, over its drafts; answers differ far more from each other
than heads do. So the difference of two heads is taken within each answer, and its standard error is that of a
ratio estimator over answers:

    D = Σ n_i d_i / Σ n_i        SE² = k / (k - 1) · Σ n_i² (d_i - D)² / (Σ n_i)²        n_i drafts, k answers
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from faser.config.engine import EngineConfig
from faser.distill.acceptance import measure_acceptance
from faser.distill.batch import SampleStore
from faser.distill.dataset import RecordedConversation
from faser.distill.distillation import faster_dtype
from faser.distill.head import TrainableHead
from faser.distill.speculators_writer import write_speculators
from faser.distill.states import ShardStates, fitted_passage, shard_arrays
from faser.distill.target import FrozenTarget, TargetStates, load_target
from faser.distill.trainer import Trainer, TrainingSettings, TrainingState
from faser.engine.checkpoints.heads import HeadSpec, read_head_spec, untrainable
from faser.engine.checkpoints.quantized import StoredLowBit
from faser.engine.contract.messages import Learn, LearnableAnswer, Learned
from faser.engine.execution.drafting import head_tensors as tensors
from faser.engine.execution.drafting.head_tensors import draft_token_ids
from faser.engine.execution.drafting.head_weights import open_head
from faser.engine.execution.models.sources import QUANTIZATIONS
from faser.engine.execution.models.stored_codes import CodeSource
from faser.engine.execution.startup.device import resolve_device
from faser.engine.execution.startup.files import find_models, refreshable_head
from faser.errors import ModelError

LEAST_ANSWERS = 8
_ERRORS = 2.0  # standard errors by which it must be better; one in 40 heads that are no better passes
_LEAST_GAIN = 0.01  # and by this share: less is not worth a swap
_TOP = 64  # tokens of a distribution that are kept
_STEPS = 3  # drafted tokens that are unrolled, and measured


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerLength:
    """One answer. drafts: that were tried on it. length: accepted tokens expected of each."""

    drafts: int
    length: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthComparison:
    """before, after: accepted tokens a draft of both heads. noise: what their difference must exceed."""

    before: float
    after: float
    noise: float
    answers: int

    @property
    def is_better(self) -> bool:
        return self.answers >= LEAST_ANSWERS and self.after - self.before > self.noise


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedHead:
    """weights: float32 under the names of head_tensors.py, without the embedding.

    Draft_ids: [Vd] int64, ascending.
    """

    spec: HeadSpec
    weights: dict[str, Tensor]
    draft_ids: Tensor


class OnlineLearner:
    """first: directory of the head that the engine began with. int8: what is written is rounded to 8 bits.

    dtype: of activations in training.
    """

    def __init__(self, target: FrozenTarget, first: Path, *, int8: bool, dtype: torch.dtype) -> None:
        self._target = target
        self._first = first
        self._int8 = int8
        self._dtype = dtype
        self._embedding = target.embedding().to(dtype).clone()
        self._layers: TargetStates | None = None
        self._states: dict[int, ShardStates] = {}  # by number of the answer

    def learn(self, task: Learn) -> Learned:
        """Raises ModelError for a head that cannot be trained."""
        directory = self._first if task.head is None else Path(task.head)
        served = read_trained_head(directory, self._target)
        self._take(task, served)
        measuring = [each for each in task.answers if each.held_out and each.number in self._states]
        learning = [each for each in task.answers if not each.held_out and each.number in self._states]
        store = self._store(learning, served)
        before = self._measured(served, measuring)
        if not len(store) or not sum(each.drafts for each in before):
            return self._learned(before, before, 0)
        self._train(served, store, task)
        write_trained_head(Path(task.into), served, self._target, int8=self._int8)
        after = self._measured(read_trained_head(Path(task.into), self._target), measuring)
        return self._learned(before, after, sum(len(each.answer) for each in learning))

    def _learned(self, before: list[AnswerLength], after: list[AnswerLength], tokens: int) -> Learned:
        found = compare(before, after)
        return Learned(
            is_better=found.is_better,
            before=found.before,
            after=found.after,
            noise=found.noise,
            held_out=found.answers,
            tokens=tokens,
        )

    def _take(self, task: Learn, head: TrainedHead) -> None:
        """Compute the states that are missing, of the newest answers as long as there is room; drop the others."""
        layers = self._layers
        if layers is None:
            layers = self._layers = self._target.states(head.spec.state_layers, top=_TOP)
        room = task.rules.state_bytes
        found: dict[int, ShardStates] = {}
        for each in reversed(task.answers):
            states = self._states.pop(each.number, None) or _states_of(each, layers)
            room -= states.states.nbytes
            if room < 0:
                break
            found[each.number] = states
        self._states = found

    def _train(self, head: TrainedHead, store: SampleStore, task: Learn) -> None:
        """Changes the weights of head."""
        rules = task.rules
        settings = TrainingSettings(
            seed=task.seed,
            epochs=rules.epochs,
            steps=_STEPS,
            rows=rules.rows,
            rate=rules.rate,
            warm_up=rules.warm_up,
        )
        for weight in head.weights.values():
            weight.requires_grad_()
        state = TrainingState(settings={}, draft_ids=head.draft_ids, weights=head.weights)
        Trainer(self._trainable(head), state, settings, lambda: store, None).run(lambda _: None, lambda: False)

    def _measured(self, head: TrainedHead, answers: list[LearnableAnswer]) -> list[AnswerLength]:
        trainable = self._trainable(head)
        found = []
        for each in answers:
            store = self._store([each], head)
            acceptance = measure_acceptance(
                trainable,
                store,
                head.draft_ids,
                [[0]] if len(store) else [],
                steps=_STEPS,
                temperature=each.temperature or 1.0,
            )
            drafts = acceptance.greedy_rows + acceptance.sampled_rows
            found.append(AnswerLength(drafts=drafts, length=acceptance.expected_length if drafts else 0.0))
        return found

    def _store(self, answers: list[LearnableAnswer], head: TrainedHead) -> SampleStore:
        shards = [self._states[each.number] for each in answers]
        return SampleStore(shards, head.draft_ids, self._target.config.spec.vocab_size, lambda _: True)

    def _trainable(self, head: TrainedHead) -> TrainableHead:
        positions = self._target.max_rows + _STEPS
        return TrainableHead(head.spec, head.weights, self._embedding, positions=positions, dtype=self._dtype)


def load_learner(config: EngineConfig, directory: Path) -> OnlineLearner:
    """With a model of its own, on one thread. Arguments as of the engine, and ConfigError as it raises it."""
    torch.set_num_threads(1)
    config = resolve_device(replace(config, num_threads=1))
    target = load_target(config, directory, lambda *_: None)
    _, models = find_models(config, directory, lambda *_: None)
    head = refreshable_head(config, models)
    rounded_by_engine = config.quantization in QUANTIZATIONS
    dtype: torch.dtype = getattr(torch, faster_dtype(target.backend.device))
    return OnlineLearner(target, head.directory, int8=not rounded_by_engine, dtype=dtype)


def _states_of(answer: LearnableAnswer, layers: TargetStates) -> ShardStates:
    """A shard of one conversation."""
    said = RecordedConversation(
        prompt=answer.prompt, answer=answer.answer, ended=False, temperature=answer.temperature
    )
    passage = fitted_passage(said, layers.max_rows)
    (found,) = layers.compute([passage])
    tops = {"top_ids": found.top_ids.numpy(), "top_probs": found.top_probs.numpy()}
    return ShardStates(found.states, shard_arrays([said], [passage], answer.number) | tops)


def compare(before: Sequence[AnswerLength], after: Sequence[AnswerLength]) -> LengthComparison:
    """Of the same answers, in the same order."""
    drafts = np.array([each.drafts for each in before], dtype=np.float64)
    assert [each.drafts for each in after] == drafts.tolist(), "both heads are tried on the same drafts"
    answers = int((drafts > 0).sum())
    if answers < 2:
        return LengthComparison(before=0.0, after=0.0, noise=math.inf, answers=answers)
    lengths = [np.array([each.length for each in head]) for head in (before, after)]
    total = float(drafts.sum())
    means = [float((drafts * each).sum() / total) for each in lengths]
    deviations = lengths[1] - lengths[0] - (means[1] - means[0])
    error = math.sqrt(answers / (answers - 1) * float((drafts**2 * deviations**2).sum())) / total
    noise = max(_ERRORS * error, _LEAST_GAIN * means[0])
    return LengthComparison(before=means[0], after=means[1], noise=noise, answers=answers)


def read_trained_head(directory: Path, target: FrozenTarget) -> TrainedHead:
    """Raises ModelError for a head that cannot be read or trained."""
    spec = read_head_spec(directory, target.config.spec)
    if reason := untrainable(spec, directory):
        raise ModelError(f"the head in {directory} cannot be trained: {reason}")
    shapes = tensors.eagle3_shapes(spec)
    source = open_head(directory)
    draft_ids = draft_token_ids(source, spec)
    if draft_ids is None:
        draft_ids = torch.arange(spec.decoder.vocab_size)
    if isinstance(spec.quantization, StoredLowBit):
        source = CodeSource(source, spec.quantization, shapes)
    own = set(source.names())
    weights = {name: source.get(name).float().clone() for name in shapes if name in own}
    if tensors.HEAD not in own:
        weights[tensors.HEAD] = target.head_rows(draft_ids).float().cpu()
    draft_ids, order = draft_ids.sort()
    weights[tensors.HEAD] = weights[tensors.HEAD][order].contiguous()
    missing = sorted(shapes.keys() - weights.keys() - {tensors.EMBEDDING})
    if missing:
        raise ModelError(f"the head in {directory} has no tensor {missing[0]}")
    return TrainedHead(spec=spec, weights=weights, draft_ids=draft_ids)


def write_trained_head(directory: Path, head: TrainedHead, target: FrozenTarget, *, int8: bool) -> None:
    whole = len(head.draft_ids) == head.spec.decoder.vocab_size
    write_speculators(
        directory,
        head.spec,
        {name: weight.detach() for name, weight in head.weights.items()},
        draft_ids=None if whole else head.draft_ids,
        target_architectures=target.architectures,
        int8=int8,
    )
