"""A head that has learned nothing yet, on disk, and greedy answers of its target to learn from."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from faser.config.engine import EngineConfig
from faser.distill.distillation import head_spec, state_layers
from faser.distill.head import initial_weights
from faser.distill.online_learner import TrainedHead, write_trained_head
from faser.distill.target import FrozenTarget, Passage, load_target
from faser.engine.contract.messages import LearnableAnswer
from tests.engine.test_head_engine import WIDTH, write_agreeing

DRAFTS = WIDTH - 8


def markov_target(folder: Path) -> tuple[Path, FrozenTarget]:
    """The directory of a model whose next token follows from the last one, so that a head learns fast; loaded."""
    directory, _ = write_agreeing(folder, torch.float32)
    config = EngineConfig(model=str(directory), device="cpu", backend="torch", num_threads=1)
    return directory, load_target(config, directory, lambda *_: None)


def write_beginner(directory: Path, target: FrozenTarget, *, int8: bool = True) -> Path:
    decoder = target.config.spec
    spec = head_spec(decoder, state_layers(decoder.num_layers), DRAFTS, "tiny")
    draft_ids = torch.arange(DRAFTS)
    weights = initial_weights(
        spec, head_rows=target.head_rows(draft_ids).cpu(), final_norm=target.final_norm().cpu(), seed=1
    )
    head = TrainedHead(spec=spec, weights=weights, draft_ids=draft_ids)
    write_trained_head(directory, head, target, int8=int8)
    return directory


def said(target: FrozenTarget, prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """The greedy answer to a prompt."""
    states, tokens = target.states((1,), top=1), [*prompt]
    for _ in range(count):
        (found,) = states.compute([Passage(token_ids=torch.tensor([*tokens, 0]), first_row=len(tokens) - 1)])
        tokens.append(int(found.top_ids[0, 0]))
    return tuple(tokens[len(prompt) :])


def learnable(target: FrozenTarget, count: int, *, tokens: int = 16) -> list[LearnableAnswer]:
    """Every third one is held out."""
    rng = np.random.default_rng(7)
    prompts = [tuple(rng.integers(3, WIDTH, 6).tolist()) for _ in range(count)]
    return [
        LearnableAnswer(
            number=at, prompt=prompt, answer=said(target, prompt, tokens), temperature=0.0, held_out=at % 3 == 0
        )
        for at, prompt in enumerate(prompts)
    ]
