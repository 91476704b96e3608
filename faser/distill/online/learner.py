"""OnlineLearner: one round after the other, from answers to a trained head and whether it is better.

    answers ─▶ states of the target ─▶ training, from the served head ─▶ written, read again ─▶ measured
                                       no held-out answers                                      on held-out answers

Measures the heads that would be served, rounded as they are written. Keeps the states of answers that come again.
"""

from dataclasses import replace
from pathlib import Path

import torch

from faser.config.engine import EngineConfig
from faser.distill.conversations.shard import Conversation
from faser.distill.distillation import faster_dtype
from faser.distill.online.comparison import AnswerLength, compare
from faser.distill.online.trained_head import TrainedHead, read_trained_head, write_trained_head
from faser.distill.states.recorder import fitted_passage, shard_arrays
from faser.distill.states.state_files import ShardStates
from faser.distill.states.target_states import TargetStates
from faser.distill.target import FrozenTarget, load_target
from faser.distill.training.acceptance import measure_acceptance
from faser.distill.training.checkpoint import TrainingState
from faser.distill.training.sample_store import SampleStore
from faser.distill.training.trainable_head import TrainableHead
from faser.distill.training.trainer import Trainer, TrainingSettings
from faser.engine.contract.learning import Learn, LearnableAnswer, Learned
from faser.engine.execution.models.sources import QUANTIZATIONS
from faser.engine.execution.startup.device import resolve_device
from faser.engine.execution.startup.head_loading import check_refreshable, find_draft_files

_TOP = 64  # tokens of a distribution that are kept
_STEPS = 3  # drafted tokens that are unrolled, and measured


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
    files = find_draft_files(config, target.config.spec, lambda *_: None)
    check_refreshable(files)
    assert files.head is not None
    rounded_by_engine = config.quantization in QUANTIZATIONS
    dtype: torch.dtype = getattr(torch, faster_dtype(target.backend.device))
    return OnlineLearner(target, files.head, int8=not rounded_by_engine, dtype=dtype)


def _states_of(answer: LearnableAnswer, layers: TargetStates) -> ShardStates:
    """A shard of one conversation."""
    said = Conversation(prompt=answer.prompt, answer=answer.answer, ended=False, temperature=answer.temperature)
    passage = fitted_passage(said, layers.max_rows)
    (found,) = layers.compute([passage])
    tops = {"top_ids": found.top_ids.numpy(), "top_probs": found.top_probs.numpy()}
    return ShardStates(found.states, shard_arrays([said], [passage], answer.number) | tops)
