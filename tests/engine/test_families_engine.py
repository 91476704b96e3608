"""Families of models through a whole engine: no drafter, batch or cache changes an answer.

Scores are compared too, bit for bit: a last bit that another batch changes hardly ever changes a token.

Oracle: each request alone in an engine that neither speculates, nor cuts prompts, nor shares blocks. Every engine
that is compared with it has too few blocks for all requests, so that sequences are preempted, cuts prompts into
chunks, and finds prompts in its prefix cache.

A bug these tests have been seen to catch: the sum of experts begins with another one in each row of a batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from faser.engine.checkpoints.files import read_model_config
from faser.engine.engine import Engine
from faser.engine.execution.models.layers import mixer_shapes
from faser.kernels.interface.mixers import StateShape
from faser.types.request import Request
from faser.types.statistics import EngineStats
from tests.checkpoints import VOCAB_SIZE, write_tokenizer
from tests.engine.checkpoints.family_models import store_in_mxfp4, write_family_model
from tests.engine.checkpoints.test_text_halves import WRAPPERS, write_wrapper
from tests.engine.execution.drafting.seeded_heads import head_spec, write_seeded
from tests.engine.losslessness.equality import CAP, Answer, add_noise, answers, build, requests

NUM_REQUESTS = 8
NUM_SNAPSHOTS = 5  # of recurrent states
NUM_TOKENS = 28
CHUNK = 24
POOL_TOKENS = 256  # the requests have about 600 together
GAMMA = 4
MAX_MODEL_LEN = 224
TEMPERATURES = (0.0, 0.8)


@dataclass(frozen=True)
class Case:
    """A tiny model. fields: see write_family_model. settings: of its engines. mxfp4: its experts are stored so.

    model_type: or a name of WRAPPERS, whose text half it is.

    has_states: recurrent ones, so that sequences share blocks from snapshots on.
    """

    model_type: str
    fields: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    mxfp4: bool = False
    has_states: bool = False


_GEMMA3 = {
    "head_dim": 32,
    "num_hidden_layers": 8,
    "query_pre_attn_scalar": 20,
    "sliding_window": 13,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,  # with embeddings as large as those of others it would repeat its last token
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
_PHI3 = {
    "num_hidden_layers": 8,
    "num_key_value_heads": 4,
    "original_max_position_embeddings": 64,
    "pad_token_id": 0,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0, 1.1, 1.3, 1.5, 1.8, 2.0],
        "long_factor": [1.5, 2.0, 3.0, 4.0, 6.0, 8.0],
    },
}
_MIXTURE = {
    "num_hidden_layers": 6,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}
_SMALL_EXPERTS = {
    "num_hidden_layers": 8,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 3,
    "intermediate_size": 32,
}
_GPT_OSS = {
    "num_hidden_layers": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_local_experts": 7,
    "num_experts_per_tok": 3,
    "sliding_window": 13,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "truncate": False,
    },
}
_QWEN3_5 = {
    "num_hidden_layers": 8,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.25},
}
_GEMMA4 = {
    "num_hidden_layers": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "global_head_dim": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 4,
    "sliding_window": 13,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 20.0,
    "pad_token_id": 0,
}
_GEMMA4_MOE = _GEMMA4 | {
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 2,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
    "enable_moe_block": True,
    "num_experts": 7,
    "top_k_experts": 3,
    "moe_intermediate_size": 32,
}
_QWEN3_5_MOE = _QWEN3_5 | {
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
_LFM2 = {
    "num_hidden_layers": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "layer_types": ["conv", "full_attention"] * 4,
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}
_LFM2_MOE = _LFM2 | {
    "num_dense_layers": 1,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
}
CASES = {
    "gemma3": Case("gemma3_text", _GEMMA3),
    "gemma4": Case("gemma4_text", _GEMMA4),
    "gemma4-moe-int8": Case("gemma4_text", _GEMMA4_MOE, {"quantization": "int8", "dtype": "bfloat16"}),
    "phi3": Case("phi3", _PHI3),
    "qwen3-moe": Case("qwen3_moe", _MIXTURE),
    "qwen3-moe-int8": Case(
        "qwen3_moe", _MIXTURE | {"num_hidden_layers": 8}, {"quantization": "int8", "dtype": "bfloat16"}
    ),
    "olmoe": Case("olmoe", _SMALL_EXPERTS | {"num_experts": 7, "pad_token_id": None}),
    "granite-moe": Case(
        "granitemoe",
        _SMALL_EXPERTS | {"num_local_experts": 7, "residual_multiplier": 0.7, "attention_multiplier": 0.2},
    ),
    "gpt-oss": Case("gpt_oss", _GPT_OSS, {"dtype": "bfloat16"}, mxfp4=True),
    "qwen3.5": Case("qwen3_5_text", _QWEN3_5, has_states=True),
    "qwen3.5-int8": Case("qwen3_5_text", _QWEN3_5, {"quantization": "int8", "dtype": "bfloat16"}, has_states=True),
    "qwen3.5-moe": Case("qwen3_5_moe_text", _QWEN3_5_MOE, has_states=True),
    "lfm2": Case("lfm2", _LFM2, has_states=True),
    "muse-glimmer": Case("muse-glimmer", {}),
    "lfm2-moe-int8": Case(
        "lfm2_moe",
        _LFM2_MOE | {"head_dim": 128},
        {"quantization": "int8", "dtype": "bfloat16"},
        has_states=True,
    ),
    "qwen3.5-moe-int8": Case(
        "qwen3_5_moe_text", _QWEN3_5_MOE, {"quantization": "int8", "dtype": "bfloat16"}, has_states=True
    ),
}
DRAFTERS: dict[str, dict[str, Any]] = {
    "off": {},
    "text": {"method": "auto"},
    "draft_model": {"method": "draft_model"},
    "eagle3": {"method": "eagle3"},
}
# Each text drafter alone, and one of all chosen for each request, with --full.
LONGER: dict[str, dict[str, Any]] = {
    "suffix": {"method": "suffix"},
    "ngram": {"method": "ngram"},
    "chooser": {"method": "auto"},
}
WITH_MODEL = ("draft_model", "chooser")

Answers = dict[tuple[str, int], Answer]


@dataclass(frozen=True)
class World:
    """A model, a drafter that is the model with noise on its weights, a seeded head, and the right answers."""

    case: Case
    target: Path
    drafter: Path
    head: Path
    wanted: dict[float, Answers]  # by temperature

    def engine(self, speculation: dict[str, Any] | None, **settings: Any) -> Engine:
        usual = {"max_model_len": MAX_MODEL_LEN} | self.case.settings
        return build((self.target, self.drafter), speculation, **usual | settings)

    def crowded(self, drafter: str) -> Engine:
        """An engine with too few blocks, which cuts prompts, shares blocks, and drafts by one of the drafters."""
        given = dict((DRAFTERS | LONGER)[drafter])
        if drafter in WITH_MODEL:
            given["model"] = str(self.drafter)
        if drafter == "eagle3":
            given["model"] = str(self.head)
        spec = read_model_config(self.target).spec
        value_bytes = 2 if self.case.settings.get("dtype") == "bfloat16" else 4
        bytes_of_token = 2 * sum(count * channels for count, channels in spec.kv_heads) * value_bytes
        # A head has as many keys and values as two layers with delta nets have none.
        twice = (*WITH_MODEL, "eagle3") if self.case.has_states else WITH_MODEL
        states = self._states(value_bytes, drafts=bool(given))
        found = self.engine(
            given if given else None,
            kv_cache_memory=POOL_TOKENS * bytes_of_token * (2 if drafter in twice else 1) + states.total_bytes,
            state_snapshot_memory=states.num_snapshots * states.snapshot_bytes,
            max_num_batched_tokens=CHUNK,
            max_num_seqs=NUM_REQUESTS,
        )
        if given:
            found.use_policy("fixed", GAMMA)
        return found

    def _states(self, value_bytes: int, *, drafts: bool) -> StateShape:
        dtype = torch.bfloat16 if value_bytes == 2 else torch.float32
        most_drafts = CAP if drafts else 0
        return StateShape(
            layers=mixer_shapes(read_model_config(self.target).spec),
            num_slots=NUM_REQUESTS,
            most_drafts=most_drafts,
            dtype=dtype,
            num_snapshots=NUM_SNAPSHOTS if self.case.has_states else 0,
        )


def asked(temperature: float) -> list[Request]:
    return requests(temperature=temperature, max_tokens=NUM_TOKENS, logprobs=2)[:NUM_REQUESTS]


def verified_and_accepted(stats: EngineStats) -> tuple[int, int]:
    assert stats.speculation is not None
    methods = stats.speculation.methods
    return sum(each.verified for each in methods), sum(each.accepted for each in methods)


def make_world(case: Case, folder: Path) -> World:
    fields = {"vocab_size": VOCAB_SIZE, "bos_token_id": 0, "eos_token_id": 2} | case.fields
    for name in ("target", "drafter"):
        if case.model_type in WRAPPERS:
            write_wrapper(case.model_type, folder / name, fields)
        else:
            write_family_model(folder / name, case.model_type, fields)
        write_tokenizer(folder / name)
    add_noise(folder / "drafter")
    if case.mxfp4:
        store_in_mxfp4(folder / "target")
        store_in_mxfp4(folder / "drafter")
    write_seeded(folder / "head", head_spec(state_layers=(0, 1, 3)))
    world = World(case, folder / "target", folder / "drafter", folder / "head", {})
    alone = world.engine(
        None,
        enable_prefix_caching=False,
        kv_cache_memory=4 << 20,
        num_threads=1,
        max_num_seqs=1,
        max_num_batched_tokens=MAX_MODEL_LEN,
    )
    for temperature in TEMPERATURES:
        each_alone = [answers(alone, [each]) for each in asked(temperature)]
        world.wanted[temperature] = {key: found for each in each_alone for key, found in each.items()}
    assert alone.stats().num_preemptions == alone.stats().prefix_cache_hits == 0
    return world


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], World]:
    """The world of a case by its name, made when first asked for."""

    @cache
    def make(name: str) -> World:
        return make_world(CASES[name], tmp_path_factory.mktemp(name))

    return make


# Every kind of layer and of drafter once or more; all pairs of models and drafters with --full.
_RUNS = [
    ("gemma3", "eagle3"),
    ("gemma4", "text"),
    ("gemma4-moe-int8", "text"),
    ("qwen3-moe-int8", "draft_model"),
    ("gpt-oss", "text"),
    ("qwen3.5", "text"),
    ("qwen3.5", "eagle3"),
    ("qwen3.5-moe-int8", "text"),
    ("lfm2", "off"),
    ("lfm2-moe-int8", "text"),
    ("muse-glimmer", "text"),
]
_LONGER_RUNS = [
    (name, drafter)
    for name, case in CASES.items()
    for drafter in (*DRAFTERS, *LONGER)
    if (name, drafter) not in _RUNS and not (case.has_states and drafter in WITH_MODEL)
]


@pytest.mark.parametrize(
    ("name", "drafter"), [*_RUNS, *(pytest.param(*each, marks=pytest.mark.full) for each in _LONGER_RUNS)]
)
def test_tokens_and_scores_are_those_of_each_request_alone(
    name: str, drafter: str, worlds: Callable[[str], World]
) -> None:
    """Greedy, sampled with seeds, and greedy again, on one engine: the last time it knows prompts and answers."""
    world = worlds(name)
    engine = world.crowded(drafter)
    for temperature in (*TEMPERATURES, 0.0):
        wanted = world.wanted[temperature]
        assert len({each for found, _ in wanted.values() for each in found}) > 20
        assert answers(engine, asked(temperature)) == wanted, f"temperature {temperature}"
    stats = engine.stats()
    assert stats.num_steps > NUM_TOKENS
    assert stats.prefix_cache_hits > 0
    if drafter != "eagle3":  # whose sequences hold blocks of the head too: fewer start at once
        assert stats.num_preemptions > 0, "the pool is meant to be too small"
    if drafter != "off":
        verified, accepted = verified_and_accepted(stats)
        assert accepted < verified, "a refused draft is where a wrong token would come from"
        assert accepted > 0 or drafter == "eagle3", "only a head of random weights may never be right"
