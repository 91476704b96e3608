"""Requests with LoRA adapters through a whole engine: the tokens of PEFT, whatever drafts and whoever is beside.

Oracle: PEFT over transformers, in float32: each token of an answer is the likeliest of its logits behind those
before it. Four adapters and the model itself take turns in two adapter slots; prompts are the same with each of
them, so that a prefix or a past answer of another adapter would be found; the pool is too small for all.

Planted bug that these tests have caught: prefixes keyed by the salt alone, so that another adapter finds them.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from faser.engine.checkpoints.adapter import read_adapter
from faser.engine.checkpoints.files import read_model_config
from faser.engine.engine import Engine
from faser.types.adapter import Adapter
from faser.types.request import Request
from faser.types.sampling import SamplingParams
from tests.checkpoints import VOCAB_SIZE, write_tokenizer
from tests.engine.checkpoints.adapter_files import adapt_by_peft
from tests.engine.checkpoints.family_models import write_family_model
from tests.engine.execution.drafting.seeded_heads import head_spec, write_seeded
from tests.engine.execution.test_adapters import ADAPTERS
from tests.engine.losslessness.equality import Answer, add_noise, answers, build

NUM_REQUESTS = 12
NUM_TOKENS = 40
POOL_TOKENS = 256  # the requests have about 1,000 together
GAMMA = 3
_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "num_hidden_layers": 8,  # a pool has 1 MiB at least
    "num_key_value_heads": 4,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "phi3": ("phi3", {}),
}
DRAFTERS: dict[str, dict[str, Any] | None] = {
    "off": None,
    "text": {"method": "auto"},
    "ngram": {"method": "ngram"},
    "draft_model": {"method": "draft_model", "model": "drafter"},
    "eagle3": {"method": "eagle3", "model": "head"},
}
Answers = dict[tuple[str, int], Answer]


@dataclass(frozen=True)
class World:
    """A model with adapters, what drafts for it, and the answers of each request alone."""

    folder: Path
    adapters: tuple[Adapter, ...]
    peft: PeftModel
    alone: Answers

    def crowded(self, drafter: str, **settings: Any) -> Engine:
        given = DRAFTERS[drafter]
        if given is not None and "model" in given:
            given = given | {"model": str(self.folder / given["model"])}
        spec = read_model_config(self.folder / "target").spec
        bytes_of_token = 2 * 4 * sum(count * channels for count, channels in spec.kv_heads)
        found = engine_over(
            self.folder,
            self.adapters,
            given,
            kv_cache_memory=POOL_TOKENS * bytes_of_token * (2 if drafter == "draft_model" else 1),
            max_num_batched_tokens=32,
            max_loras=2,
            **settings,
        )
        if given is not None:
            found.use_policy("fixed", GAMMA)
        return found


def engine_over(
    folder: Path, adapters: tuple[Adapter, ...], given: dict[str, Any] | None, **settings: Any
) -> Engine:
    """An engine in which the adapters are loaded."""
    engine = build((folder / "target", folder / "drafter"), given, enable_lora=True, max_model_len=224, **settings)
    for adapter in adapters:
        engine.load_adapter(adapter)
    return engine


def asked(adapters: tuple[Adapter, ...]) -> list[Request]:
    """Return requests with each adapter and none in turn, whose prompts begin alike, and repeat themselves."""
    return [
        Request(
            request_id=str(i),
            prompt_token_ids=(*range(3, 40), *(50 + i % 3, 61, 62, 63) * 3),
            sampling=SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS - i % 3, ignore_eos=True, logprobs=2),
            arrival_s=float(i),
            adapter=(*adapters, None)[i % 5],
        )
        for i in range(NUM_REQUESTS)
    ]


def make_world(name: str, folder: Path) -> World:
    model_type, fields = FAMILIES[name]
    for each in ("target", "drafter"):
        base = write_family_model(folder / each, model_type, _COMMON | fields)
        write_tokenizer(folder / each)
    add_noise(folder / "drafter")
    write_seeded(folder / "head", head_spec(state_layers=(0, 1, 3)))
    adapters = []
    for number, config in enumerate(ADAPTERS):
        path = folder / f"adapter-{number}"
        base = adapt_by_peft(base, path, seed=number, **config).unload()
        adapters.append(read_adapter(str(number), path, max_rank=64))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = PeftModel.from_pretrained(base, adapters[0].path, "0").eval()
        for adapter in adapters[1:]:
            peft.load_adapter(adapter.path, adapter.name)
    alone = engine_over(
        folder,
        tuple(adapters),
        None,
        enable_prefix_caching=False,
        kv_cache_memory=4 << 20,
        num_threads=1,
        max_num_seqs=1,
        max_num_batched_tokens=224,
    )
    found: Answers = {}
    for request in asked(tuple(adapters)):
        found |= answers(alone, [request])
    return World(folder, tuple(adapters), peft, found)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], World]:
    """The world of a family, made when first asked for."""

    @cache
    def make(name: str) -> World:
        return make_world(name, tmp_path_factory.mktemp(name))

    return make


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_are_those_of_peft(worlds: Callable[[str], World], name: str) -> None:
    world = worlds(name)
    for request in asked(world.adapters):
        ((token_ids, _),) = (each for key, each in world.alone.items() if key[0] == request.request_id)
        assert len(token_ids) == request.sampling.max_tokens
        line = torch.tensor([[*request.prompt_token_ids, *token_ids]])
        with torch.no_grad():
            if request.adapter is None:
                with world.peft.disable_adapter():
                    logits = world.peft(line).logits
            else:
                world.peft.set_adapter(request.adapter.name)
                logits = world.peft(line).logits
        likeliest = logits[0, len(request.prompt_token_ids) - 1 : -1].argmax(-1)
        assert likeliest.tolist() == list(token_ids)
    by_adapter = {request.request_id: request.adapter for request in asked(world.adapters)}
    same_prompt = [world.alone[str(i), 0][0][:6] for i in (0, 3, 6, 9)]  # with four adapters or none
    assert len({by_adapter[str(i)] for i in (0, 3, 6, 9)}) == 4
    assert len(set(same_prompt)) == 4, "adapters that change no token would prove nothing"


# Every kind of drafter; with --full all pairs of them with families, on the torch backend too.
_RUNS = [
    *(("llama", each, "native") for each in ("text", "draft_model", "eagle3")),
    ("qwen2", "ngram", "native"),
    ("phi3", "off", "native"),
]
_LONGER = [(name, each, backend) for name in FAMILIES for each in DRAFTERS for backend in ("native", "torch")]


@pytest.mark.parametrize(
    ("name", "drafter", "backend"),
    [*_RUNS, *(pytest.param(*each, marks=pytest.mark.full) for each in _LONGER if each not in _RUNS)],
)
def test_neighbours_drafts_and_preemptions_change_no_token(
    worlds: Callable[[str], World], name: str, drafter: str, backend: str
) -> None:
    """On native kernels no bit of a score either. Asked twice: the second time prefixes are in the cache."""
    world = worlds(name)
    engine = world.crowded(drafter, backend=backend)
    for turn in ("first", "second"):
        requests = [replace(each, request_id=f"{turn} {each.request_id}") for each in asked(world.adapters)]
        found = {(key.split()[1], index): answer for (key, index), answer in answers(engine, requests).items()}
        if backend == "native":
            assert found == world.alone
        assert {key: tokens for key, (tokens, _) in found.items()} == {
            key: tokens for key, (tokens, _) in world.alone.items()
        }
    stats = engine.stats()
    assert stats.num_preemptions
    assert stats.prefix_cache_hits
    if drafter != "off":
        assert stats.speculation is not None
        assert sum(each.verified for each in stats.speculation.methods)
