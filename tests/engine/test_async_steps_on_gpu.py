"""Steps that are launched ahead on the emulated device: answers and scores are those of steps that wait.

Oracle: the same engine with `async_scheduling` off, token for token and bit for bit. The model's logits are exact
and follow from the last token alone, so that a row that is fed or edited by another one shows, and the row count
of a graph does not.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from faser.engine.engine import Engine
from faser.types.request import Request
from faser.types.sampling import SamplingParams, StructuredOutput, StructureKind, ThinkingBudget
from tests.checkpoints import (
    VOCAB_SIZE,
    llama_shapes,
    random_weights,
    tiny_llama_config,
    write_checkpoint,
    write_tokenizer,
)
from tests.engine.losslessness.equality import answers
from tests.engine.test_head_engine_on_gpu import engine_on_gpu

OFF = {"policy": "off"}
REGEX = StructuredOutput(kind=StructureKind.REGEX, text="([a-f ]{3,9}(the|fox|jumps)){2,9}[.!]")
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.0, "ignore_eos": False, "stop_token_ids": tuple(range(9, 60)), "min_tokens": 3},
    {"frequency_penalty": 0.9, "presence_penalty": 0.4, "temperature": 0.3},
    {"repetition_penalty": 1.4, "temperature": 0.0},
    {"logit_bias": ((40, 6.0), (41, 5.0)), "bad_words": ((40, 41), (41, 40), (40, 40)), "temperature": 0.2},
    {"structured_output": REGEX, "ignore_eos": False},
    {"structured_output": REGEX, "temperature": 0.0, "logprobs": 2, "repetition_penalty": 1.2},
    {"logprobs": 3, "temperature": 0.5},
    {"prompt_logprobs": 1, "logprobs": 0},
    {"thinking_budget": ThinkingBudget(max_tokens=4, begin=(40, 41), end=42, is_open=True, repeats=True)},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in which one token is far more likely than all others, which are tied."""
    directory = tmp_path_factory.mktemp("model")
    config = tiny_llama_config() | {
        "hidden_size": VOCAB_SIZE,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    weights, places = random_weights(llama_shapes(config)), torch.eye(VOCAB_SIZE)
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
        elif "norm" in name:
            weight.fill_(1.0)
    follows = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    following = torch.zeros(VOCAB_SIZE, VOCAB_SIZE).index_copy_(0, follows, places)
    weights |= {"model.embed_tokens.weight": places, "lm_head.weight": following / 4}
    write_checkpoint(directory, config, {name: each.bfloat16() for name, each in weights.items()})
    write_tokenizer(directory)
    return directory


def engine(model: Path, *, ahead: bool) -> Engine:
    return engine_on_gpu(model, OFF, async_scheduling=ahead, max_num_seqs=4)


def asked(seed: int) -> list[Request]:
    """One of each kind, in random order."""
    rng = random.Random(seed)
    return [
        Request(
            request_id=str(i),
            prompt_token_ids=tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(2, 40))),
            sampling=SamplingParams(**{"max_tokens": rng.randint(3, 8), "seed": i, "ignore_eos": True} | kind),
            arrival_s=float(i),
        )
        for i, kind in enumerate(rng.sample(KINDS, k=len(KINDS)))
    ]


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
@pytest.mark.full(but=("1",))
def test_answers_and_scores_are_those_of_steps_that_wait_for_each_other(model: Path, seed: int) -> None:
    wanted = answers(engine(model, ahead=False), asked(seed))
    assert answers(engine(model, ahead=True), asked(seed)) == wanted
    assert {bool(scores) for _, scores in wanted.values()} == {True, False}
