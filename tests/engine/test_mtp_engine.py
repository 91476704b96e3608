"""Engines whose drafter is the MTP layer of the model's own checkpoint.

Two oracles. What the layer drafts is what the reference in float64 drafts (checkpoints/mtp_models.py), over the
final hidden states that transformers computes of the same tokens. What the engine answers is what it answers
without drafts.

The layer of the second model knows which token follows, so that its drafts are accepted; that of the first one is
random, and its drafts are refused, unless they are accepted at given rates.

Planted bugs that these tests have caught: a state goes with its own token, not with the next one; rows of refused
draft tokens stay in the layer's cache; embedding and state change places in the input of fc.
"""

import json
import logging
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from faser.config.engine import EngineConfig
from faser.engine.build import Built, build
from faser.engine.contract.step_times import Role, StepTimes
from faser.engine.engine import Engine
from faser.engine.execution.drafting.drafter import Drafter
from faser.engine.execution.drafting.heads.head import HeadDrafter
from faser.engine.execution.drafting.heads.vocabulary import DraftVocabulary
from faser.errors import ConfigError, ModelError
from faser.types.request import Request
from tests.checkpoints import write_tokenizer
from tests.engine.checkpoints.family_models import write_family_model
from tests.engine.checkpoints.mtp_models import EXPERTS, FIELDS, Mtp, edit_weights, mtp_shapes, write_mtp_model
from tests.engine.execution.recorded_drafts import Recorded
from tests.engine.losslessness.equality import FEATURES, answers, requests

STEP_TIMES = StepTimes.proportional(step_s=1e-2, pass_s=1e-5, text_s=1e-7)
GAMMA = 3
NUM_REQUESTS = 6
NUM_BLOCKS = 24  # too few


def built(path: Path, speculation: dict[str, Any], *, measured: bool = False, **settings: Any) -> Built:
    wrap = settings.pop("wrap_drafter", lambda drafter: drafter)
    chosen: dict[str, Any] = {
        "backend": "native",
        "device": "cpu",
        "num_threads": 1,
        "dtype": "float32",
        "max_model_len": 224,
        "max_num_seqs": NUM_REQUESTS,
        "max_num_batched_tokens": 24,
        "kv_cache_memory": 8 << 20,
        "speculative_config": speculation,
    }
    config = EngineConfig(**chosen | settings)
    return build(config, path, lambda *_: None, step_times=None if measured else STEP_TIMES, wrap_drafter=wrap)


def roomy(path: Path, speculation: dict[str, Any], **settings: Any) -> Engine:
    return built(path, speculation, **settings).engine


def crowded(path: Path, speculation: dict[str, Any], **settings: Any) -> Engine:
    """Its pool has fewer blocks than the requests fill."""
    if settings.get("enable_prefix_caching", True):
        settings |= {"state_snapshot_memory": 1 << 20}  # the same with any memory of blocks
    info = built(path, speculation, **settings).info
    value_bytes = {"float32": 4, "bfloat16": 2}[info.kv_cache_dtype]
    block_bytes = 16 * 3 * 2 * 4 * 32 * value_bytes  # keys and values of 4 heads in 2 layers and in the MTP layer
    states = info.kv_cache_bytes - info.num_blocks * block_bytes
    return roomy(path, speculation, **settings | {"kv_cache_memory": states + NUM_BLOCKS * block_bytes})


def fixed(**more: Any) -> dict[str, Any]:
    return {"policy": "fixed", "num_speculative_tokens": GAMMA, "method": "mtp"} | more


def asked(**sampling: Any) -> list[Request]:
    return requests(**{"temperature": 0.0, "max_tokens": 40} | sampling)[:NUM_REQUESTS]


def outcome(engine: Engine, method: str = "mtp") -> tuple[int, int]:
    """Tokens verified and accepted."""
    speculation = engine.stats().speculation
    assert speculation is not None
    (found,) = (each for each in speculation.methods if each.method == method)
    return found.verified, found.accepted


@pytest.fixture(scope="module")
def random_layer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("random")
    return directory, write_mtp_model(directory)


@pytest.fixture(scope="module")
def random_mixtures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """By family."""
    root = tmp_path_factory.mktemp("mixtures")
    families = ("qwen3_5_moe_text", "qwen3_next")
    return {family: (root / family, write_mtp_model(root / family, family, **EXPERTS)) for family in families}


@pytest.fixture(scope="module")
def right_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's next token follows from the last one alone, and so does the layer's."""
    directory = tmp_path_factory.mktemp("right")
    write_family_model(directory, "qwen3_5_text", FIELDS)
    write_tokenizer(directory)
    config = json.loads((directory / "config.json").read_text())
    hidden = config["hidden_size"]
    layer = {name: torch.zeros(shape) for name, shape in mtp_shapes(config).items()}
    layer["mtp.fc.weight"] = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1)
    weights = load_file(directory / "model.safetensors")
    silent = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
    weights = {
        name: torch.zeros_like(each) if name.endswith(silent) or name == "model.norm.weight" else each
        for name, each in weights.items()
    }
    edit_weights(directory, weights | layer)
    return directory


@pytest.mark.parametrize(
    ("memory", "family"),
    [
        ("room for all", "qwen3_5_text"),
        ("too little", "qwen3_5_text"),
        ("too little", "qwen3_5_moe_text"),
        ("too little", "qwen3_next"),
    ],
)
@pytest.mark.full(but=("too little-qwen3_5_text", "too little-qwen3_next"))
def test_drafts_are_those_of_the_reference_whatever_was_accepted_before(
    memory: str, family: str, random_layer: tuple[Path, Any], random_mixtures: dict[str, tuple[Path, Any]]
) -> None:
    """Drafts are accepted at given rates, so that each is followed by refused ones and by accepted ones."""
    directory, model = random_mixtures.get(family, random_layer)
    recorded: list[Recorded] = []

    def wrap(drafter: Drafter) -> Drafter:
        recorded.append(Recorded(drafter))
        return recorded[-1]

    rates = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.8, 0.55, 0.3]}
    make = crowded if memory == "too little" else roomy
    engine = make(directory, fixed(**rates), wrap_drafter=wrap)
    said = answers(engine, asked())
    assert (engine.stats().num_preemptions > 0) == (memory == "too little")
    verified, accepted = outcome(engine)
    assert 0.3 * verified < accepted < 0.9 * verified
    whole = [[*request.prompt_token_ids, *said[request.request_id, 0][0]] for request in asked()]
    compared = compare(directory, model, recorded[-1], whole)
    assert compared > 0.9 * len([draft for _, draft in recorded[-1].proposed if draft]) > 60


def compare(directory: Path, model: Any, recorded: Recorded, whole: list[list[int]]) -> int:
    """Check the drafts for these sequences; returns how many were not left to the last bits."""
    reference, compared = Mtp.of(directory), 0
    for token_ids in whole:
        with torch.no_grad():
            states_of = model.model(torch.tensor([token_ids])).last_hidden_state[0].double()
        for known, draft in recorded.proposed:
            if known == token_ids[: len(known)] and draft:
                tokens, logits = reference.draft(known, states_of, len(draft))
                best = logits.topk(2).values
                if (best[:, 0] - best[:, 1]).min() > 1e-3:
                    assert list(draft) == tokens, f"after {len(known)} tokens"
                    compared += 1
    return compared


def test_drafts_of_the_next_turn_are_those_of_the_reference(random_layer: tuple[Path, Any]) -> None:
    """Nearly all of its prompt is cached, and the layer has read it in the turn before."""
    directory, model = random_layer
    recorded: list[Recorded] = []

    def wrap(drafter: Drafter) -> Drafter:
        recorded.append(Recorded(drafter))
        return recorded[-1]

    engine = roomy(directory, fixed(), wrap_drafter=wrap, state_snapshot_memory=4 << 20)
    first = asked()[:3]
    said = answers(engine, first)
    prompts = [(*each.prompt_token_ids, *said[each.request_id, 0][0], 5, 6, 7) for each in first]
    following = [
        replace(each, request_id=f"next {i}", prompt_token_ids=prompt)
        for i, (each, prompt) in enumerate(zip(first, prompts, strict=True))
    ]
    num_before, cached = len(recorded[-1].proposed), []
    for each in following:
        engine.add(each)
    tokens: dict[str, list[int]] = {}
    while engine.has_work():
        for delta in engine.step():
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            cached.append(delta.num_cached_tokens)
    assert sorted(cached)[-3] > 0, "all three begin with cached blocks"
    del recorded[-1].proposed[:num_before]
    whole = [[*each.prompt_token_ids, *tokens[each.request_id]] for each in following]
    assert compare(directory, model, recorded[-1], whole) > 20


@pytest.mark.parametrize("drafts", ["alone", "with text", "sampled", "int8"])
@pytest.mark.full(but=("with text", "sampled"))
def test_answers_are_those_without_drafts(drafts: str, random_layer: tuple[Path, Any], right_layer: Path) -> None:
    settings = {"quantization": "int8", "dtype": "bfloat16"} if drafts == "int8" else {}
    speculation = fixed(method="auto") if drafts == "with text" else fixed()
    sampling = {"temperature": 0.9} if drafts == "sampled" else {}
    for path in (random_layer[0], right_layer):
        plain = roomy(path, {"policy": "off"}, **settings)
        engine = crowded(path, speculation, **settings)
        assert answers(engine, asked(**sampling)) == answers(plain, asked(**sampling))
        verified, accepted = outcome(engine)
        assert verified > 20
        if path == right_layer:  # drafts that are right come to an end before blocks are wanted by others
            assert accepted > {"int8": 0.6, "sampled": 0.1}.get(drafts, 0.9) * verified
        else:
            assert accepted < verified
            assert engine.stats().num_preemptions > 0, "the pool is meant to be too small"


@pytest.mark.parametrize("feature", ["schema", "structure and all others", "penalties", "endings"])
@pytest.mark.full(but=("structure and all others", "penalties"))
def test_answers_with_a_structure_or_penalties_are_those_without_drafts(
    feature: str, random_layer: tuple[Path, Any], right_layer: Path
) -> None:
    """Alone, and with text and the grammar, of which one drafter is chosen for each request."""
    path = right_layer if feature == "endings" else random_layer[0]
    plain = built(path, {"policy": "off"}).engine
    alone, chosen = (built(path, fixed(**more)).engine for more in ({}, {"method": "auto"}))
    given = FEATURES[feature] | {"max_tokens": 40}
    wanted = answers(plain, asked(**given))
    for _ in range(5):  # where the machine is busy, masks come too late for drafts
        assert answers(alone, asked(**given)) == wanted
        if outcome(alone)[0] > 0:
            break
    assert outcome(alone)[0] > 0
    assert answers(chosen, asked(**given)) == wanted
    if feature == "schema":
        assert outcome(chosen, "grammar")[1] > 0


def test_answers_of_a_mixture_are_those_without_drafts(random_mixtures: dict[str, tuple[Path, Any]]) -> None:
    for path, _ in random_mixtures.values():
        engine = crowded(path, fixed())
        assert answers(engine, asked()) == answers(roomy(path, {"policy": "off"}), asked())
        assert outcome(engine)[0] > 20


def test_a_request_that_is_aborted_leaves_nothing_to_the_next(right_layer: Path) -> None:
    wanted = answers(built(right_layer, {"policy": "off"}).engine, asked())
    engine = built(right_layer, fixed(), max_num_seqs=2).engine
    for request in asked():
        engine.add(request)
        for _ in range(5):
            engine.step()
        engine.abort(request.request_id)
    assert answers(engine, asked()) == wanted


def test_a_checkpoint_with_such_a_layer_drafts_with_it_by_default(right_layer: Path) -> None:
    """Next to text, as it pays."""
    engine = built(right_layer, {}).engine
    answers(engine, asked())
    verified, accepted = outcome(engine)
    assert verified > 10
    assert accepted > 0.9 * verified


def test_drafts_from_a_part_of_the_vocabulary_change_no_answer(right_layer: Path) -> None:
    wanted = answers(built(right_layer, {"policy": "off"}).engine, asked())
    engine = built(right_layer, fixed(draft_vocab_size=200)).engine
    assert answers(engine, asked()) == wanted
    likely = sum(token_id < 200 for found, _ in wanted.values() for token_id in found)
    verified, accepted = outcome(engine)
    assert 0 < accepted <= likely
    assert accepted < verified
    whole = built(right_layer, fixed()).info.weight_bytes
    rows = 200 * 64 * 4
    assert built(right_layer, fixed(draft_vocab_size=200)).info.weight_bytes == whole + rows


def test_of_a_large_vocabulary_the_layer_chooses_how_many_tokens_it_drafts(tmp_path: Path) -> None:
    """And the one that ends generation, which is the last here. Answers do not depend on it."""
    size, end = 70_000, 69_999
    write_mtp_model(tmp_path, vocab_size=size, eos_token_id=end)
    whole = built(tmp_path, {"policy": "off"})
    drafters: list[Drafter] = []

    def wrap(drafter: Drafter) -> Drafter:
        drafters.append(drafter)
        return drafter

    chosen = built(tmp_path, fixed(), wrap_drafter=wrap)
    rows = (65_536 + 1) * (64 + 2 * 2)  # in 8 bits, with a scale for 32 values
    own = built(tmp_path, fixed(draft_vocab_size=size)).info.weight_bytes
    assert rows <= chosen.info.weight_bytes - own < 1.01 * rows
    (drafter,) = drafters
    assert isinstance(drafter, HeadDrafter)
    vocabulary = drafter.vocabulary
    assert isinstance(vocabulary, DraftVocabulary)
    assert (vocabulary.sizes, vocabulary.size) == ((8_192, 16_384, 32_768, 65_536), 32_768)
    sizes = cycle(range(4))
    found: dict[tuple[str, int], list[int]] = {}
    for request in asked():
        chosen.engine.add(request)
        found[request.request_id, 0] = []
    while chosen.engine.has_work():
        vocabulary.chosen = next(sizes)
        for delta in chosen.engine.step():
            found[delta.request_id, 0] += delta.token_ids
    assert found == {key: list(token_ids) for key, (token_ids, _) in answers(whole.engine, asked()).items()}
    assert outcome(chosen.engine)[0] > 20


@pytest.mark.parametrize("speculation", [{"model": "none"}, {"method": "suffix"}, {"policy": "off"}])
def test_it_can_be_left_out(speculation: dict[str, Any], right_layer: Path) -> None:
    without = built(right_layer, speculation)
    assert without.info.weight_bytes < built(right_layer, {}).info.weight_bytes
    if speculation != {"policy": "off"}:
        answers(without.engine, asked())
        assert outcome(without.engine) == (0, 0)


def test_passes_of_the_layer_are_measured_at_the_start(random_layer: tuple[Path, Any]) -> None:
    both = built(random_layer[0], {}, measured=True)
    assert both.costs is not None
    assert both.costs.tables[Role.PASS].seconds[0] > 0


def test_a_checkpoint_without_such_a_layer_is_named(tmp_path: Path) -> None:
    write_mtp_model(tmp_path)
    edit_weights(tmp_path, dict.fromkeys(mtp_shapes(json.loads((tmp_path / "config.json").read_text()))))
    with pytest.raises(ConfigError, match=r"method is mtp; .* has no layer that drafts: no tensors mtp\.\*"):
        built(tmp_path, {"method": "mtp"})
    assert answers(built(tmp_path, {}).engine, asked()[:1])


def test_several_layers_are_refused_where_they_are_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_mtp_model(tmp_path)
    edit_weights(tmp_path, {"mtp.layers.1.input_layernorm.weight": torch.zeros(64)})
    with pytest.raises(ModelError, match="2 MTP layers; only one is supported"):
        built(tmp_path, {"method": "mtp"})
    with caplog.at_level(logging.WARNING, "faser"):
        engine = built(tmp_path, {}).engine
    assert "2 MTP layers; only one is supported; it does not draft" in caplog.text
    assert answers(engine, asked()[:1])
