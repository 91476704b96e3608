"""A target and a draft model: what fits together, and what is refused."""

from pathlib import Path

import pytest
import torch

from faser.config.engine import EngineConfig
from faser.engine.execution.startup.model_loading import LoadedModel, load_draft_model, load_target
from faser.errors import ConfigError
from faser.kernels.torch.backend import TorchBackend
from tests.checkpoints import llama_shapes, random_weights, tiny_llama_config, write_checkpoint


def checkpoint(directory: Path, **changes: object) -> Path:
    values = tiny_llama_config() | changes
    write_checkpoint(directory, values, random_weights(llama_shapes(values)))
    return directory


def config(**draft: object) -> EngineConfig:
    return EngineConfig(
        max_num_seqs=2,
        max_num_batched_tokens=16,
        max_model_len=512,
        speculative_config={"method": "draft_model", "model": "named/elsewhere"} | draft,
    )


def load_both(target: Path, draft: Path, options: EngineConfig) -> tuple[LoadedModel, LoadedModel, list[str]]:
    stages: list[str] = []
    backend = TorchBackend()

    def report(stage: str, _done: int, _total: int) -> None:
        stages.append(stage)

    loaded = load_target(options, target, backend, report)
    return loaded, load_draft_model(options, draft, loaded, backend, report), stages


def test_a_draft_model_is_loaded_and_reports_progress(tiny_checkpoint: Path, tmp_path: Path) -> None:
    small = checkpoint(tmp_path, num_hidden_layers=1, hidden_size=32, torch_dtype="bfloat16")
    target, draft, stages = load_both(tiny_checkpoint, small, config())
    assert dict.fromkeys(stages) == dict.fromkeys(["loading weights", "loading draft model"])
    assert (target.decoder.spec.num_layers, draft.decoder.spec.num_layers) == (2, 1)
    assert (target.decoder.dtype, draft.decoder.dtype) == (torch.float32, torch.bfloat16)


def test_another_vocabulary_is_refused_with_both_sizes(tiny_checkpoint: Path, tmp_path: Path) -> None:
    other = checkpoint(tmp_path, vocab_size=528)
    with pytest.raises(ConfigError, match=rf"{tmp_path} has 528 tokens and the target 512"):
        load_both(tiny_checkpoint, other, config())


@pytest.mark.parametrize(
    "own, asked, expected", [(2048, None, 512), (100, None, 100), (2048, 300, 300), (100, 300, 100)]
)
def test_a_draft_model_drafts_as_far_as_its_context_goes(
    tiny_checkpoint: Path, tmp_path: Path, own: int, asked: int | None, expected: int
) -> None:
    short = checkpoint(tmp_path, max_position_embeddings=own)
    limit = {} if asked is None else {"max_model_len": asked}
    _, draft, _ = load_both(tiny_checkpoint, short, config(**limit))
    assert draft.max_positions == expected
