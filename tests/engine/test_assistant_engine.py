"""Engines whose drafter is an assistant of Gemma 4, which reads the keys of the model that is served.

Two oracles: drafts are those of transformers' Gemma4AssistantForCausalLM over the keys of the same tokens, and
answers are those without drafts.

Planted bugs that these tests have caught: positions advance from pass to pass; the embedding of the token without
its scale; hidden values before the final norm; keys of the last layer of all; a window that counts from n - 1;
tokens in the order of their groups; a row that sees the key at n.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from faser.config.speculation_keys import parse_speculation
from faser.engine.execution.drafting.drafter import Drafter
from faser.errors import ConfigError, ModelError
from tests.engine.checkpoints.assistant_models import CENTROIDS, draft, write_assistant, write_target
from tests.engine.execution.recorded_drafts import Recorded
from tests.engine.losslessness.equality import answers
from tests.engine.test_mtp_engine import GAMMA, asked, outcome, roomy

RATES = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.8, 0.55, 0.3]}


def fixed(assistant: Path, **more: Any) -> dict[str, Any]:
    given = {"policy": "fixed", "num_speculative_tokens": GAMMA, "method": "mtp", "model": str(assistant)}
    return given | more


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("target")
    return directory, write_target(directory)


@pytest.fixture(scope="module")
def assistants(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    root = tmp_path_factory.mktemp("assistants")
    return {
        name: (root / name, write_assistant(root / name, **fields))
        for name, fields in {"all logits": {}, "centroids": CENTROIDS}.items()
    }


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model whose next token follows from the last one alone, and an assistant that knows it."""
    root = tmp_path_factory.mktemp("right")
    write_target(root / "target", hidden_size_per_layer_input=0)
    write_assistant(root / "assistant", text={"hidden_size": 64})
    weights = {name: load_file(root / name / "model.safetensors") for name in ("target", "assistant")}
    for each in weights.values():
        for name, values in each.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                values.zero_()
    taken = {"model.embed_tokens.weight": "lm_head.weight", "model.norm.weight": "model.norm.weight"}
    weights["assistant"] |= {name: weights["target"][of].clone() for name, of in taken.items()}
    weights["assistant"]["pre_projection.weight"] = torch.cat((torch.eye(64), torch.zeros(64, 64)), 1)
    for name, each in weights.items():
        save_file(each, root / name / "model.safetensors", {"format": "pt"})
    return root / "target", root / "assistant"


@pytest.mark.parametrize("kind", ["all logits", "centroids"])
@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.full(but=("native-centroids", "torch-all logits"))
def test_drafts_are_those_of_transformers_whatever_was_accepted_before(
    kind: str, backend: str, target: tuple[Path, Any], assistants: dict[str, tuple[Path, Any]]
) -> None:
    """Behind contexts shorter and longer than the window, after drafts of which some tokens were accepted."""
    (directory, model), (assistant, reference) = target, assistants[kind]
    recorded: list[Recorded] = []

    def wrap(drafter: Drafter) -> Drafter:
        recorded.append(Recorded(drafter))
        return recorded[-1]

    engine = roomy(directory, fixed(assistant, **RATES), wrap_drafter=wrap, backend=backend)
    said = answers(engine, asked(max_tokens=24))
    verified, accepted = outcome(engine)
    assert 0.3 * verified < accepted < 0.9 * verified
    whole = [[*request.prompt_token_ids, *said[request.request_id, 0][0]] for request in asked()]
    compared = 0
    proposed = [(known, tokens) for known, tokens in recorded[-1].proposed if tokens]
    for known, tokens in proposed:
        assert any(known == each[: len(known)] for each in whole)
        wanted, logits = draft(model, reference, known, len(tokens))
        best = logits.topk(2).values
        if (best[:, 0] - best[:, 1]).min() > 1e-3:  # else the last bits decide
            assert list(tokens) == wanted, f"after {len(known)} tokens"
            compared += 1
    assert compared > 0.9 * len(proposed) > 20


@pytest.mark.parametrize("drafts", ["alone", "with text", "sampled", "int8", "int8 keys"])
@pytest.mark.full(but=("with text", "sampled", "int8 keys"))
def test_answers_are_those_without_drafts(
    drafts: str, target: tuple[Path, Any], assistants: dict[str, tuple[Path, Any]], right: tuple[Path, Path]
) -> None:
    """Prompts that share a beginning are asked twice, so prefixes are found in the cache."""
    settings: dict[str, Any] = {}
    if drafts == "int8":
        settings = {"quantization": "int8", "dtype": "bfloat16"}
    elif drafts == "int8 keys":
        settings = {"kv_cache_dtype": "int8"}
    sampling = {"temperature": 0.9} if drafts == "sampled" else {}
    for path, assistant in ((target[0], assistants["centroids"][0]), right):
        speculation = fixed(assistant, method="auto") if drafts == "with text" else fixed(assistant)
        plain = roomy(path, {"policy": "off"}, **settings)
        engine = roomy(path, speculation, **settings)
        for _ in range(2):
            assert answers(engine, asked(**sampling)) == answers(plain, asked(**sampling))
        verified, accepted = outcome(engine)
        assert verified > 20
        if path == right[0]:
            assert accepted > {"int8": 0.6, "sampled": 0.1}.get(drafts, 0.9) * verified


def test_with_auto_the_files_say_what_it_is(right: tuple[Path, Path]) -> None:
    engine = roomy(right[0], {"model": str(right[1])})
    answers(engine, asked())
    assert outcome(engine)[1] > 0


def test_an_assistant_of_another_model_is_refused(
    target: tuple[Path, Any], assistants: dict[str, tuple[Path, Any]], tmp_path: Path
) -> None:
    directory = shutil.copytree(assistants["all logits"][0], tmp_path / "assistant")
    config = json.loads((directory / "config.json").read_text())
    for change, message in (
        ({"backbone_hidden_size": 96}, "made for hidden states of 96 values; those of the model have 64"),
        ({"text_config": config["text_config"] | {"sliding_window": 14}}, "window 14.*window 13"),
        (
            {"text_config": config["text_config"] | {"vocab_size": 64}},
            "vocabulary of 64 tokens; the model has 512",
        ),
        ({"text_config": None}, "text_config is missing"),
        (CENTROIDS | {"num_centroids": 500}, "num_centroids is 500"),
    ):
        (directory / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ModelError, match=message):
            roomy(target[0], fixed(directory))
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"method is eagle3; .* has a head of method mtp"):
        roomy(target[0], fixed(directory, method="eagle3"))


def test_method_mtp_takes_a_model() -> None:
    parsed = parse_speculation({"method": "mtp", "model": "google/gemma-4-E4B-it-assistant"})
    assert not parsed.problems
    assert not parsed.warnings
    assert parsed.config is not None
    assert parsed.config.needs_model
    assert not parsed.config.may_use_mtp
