"""Drafts of block drafters: whole drafts are those of the formulas, whatever came before.

Oracle: block_reference.py in float64, over the states of the committed tokens. The states are made up, for the
drafter reads nothing else of the target but its embedding and head.

Planted bugs that these tests have caught: anchor-first slots read as fill-in, and the other way round; context
rows at other places; a block that is causal where it should not be, and the reverse; windows that begin at the end
of the block, or are ignored; norms plus one; the layers' input norm on context rows; the correction given the
anchor instead of the token before, or indexed by the drafter's own ids; confidences without the token before; the
mask's embedding at the anchor; context rows of refused drafts kept; a block longer than trained; of GGUF files,
d2t taken for offsets, and norms minus one. Of DFlash 2: convolutions across the borders of blocks; the kernel of
side 1 from the output of the attention; sides or taps in the wrong order; convolved context rows; the selector's
first token before taken for the mask; its projection left out; a cap before the multiplier. Of Gemma 4: values
that are not normalised.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from faser.engine.checkpoints.blocks import block_method, read_block_spec
from faser.engine.contract.plan import DraftPlan, DraftRequest, SequenceRows, SequenceStart, StepRows
from faser.engine.execution.drafting.blocks.graphs import BlockGraphs
from faser.engine.execution.drafting.blocks.loop import BlockLoop, BlockRunner
from faser.engine.execution.drafting.blocks.weights import load_block
from faser.engine.execution.drafting.head_memory import HeadCache, HiddenStates
from faser.engine.execution.drafting.heads.head import HeadDrafter
from faser.engine.execution.drafting.samplers import (
    DraftSampler,
    GreedyDraftSampler,
    SampleAndMatchDraftSampler,
)
from faser.engine.execution.models.decoder import Decoder
from faser.engine.execution.models.loader import load_decoder
from faser.engine.execution.runner.batch import BlockTable
from faser.engine.execution.sampling.parameters import SamplingState
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.kv_cache import KvShape
from faser.kernels.torch_backend import TorchBackend
from faser.types.sampling import SamplingParams
from tests.checkpoints import llama_shapes, random_weights, tiny_llama_config, write_checkpoint
from tests.engine.execution.draft_lines import lines_of
from tests.engine.execution.drafting.block_reference import BlockReference, GemmaReference
from tests.engine.execution.drafting.seeded_blocks import BlockShape, block_path, draft_ids, write_block

VOCAB, NUM_SLOTS, BLOCK_SIZE, MAX_PLACES, MAX_ROWS = 211, 4, 16, 96, 24
STATE_LAYERS = (1, 2, 4)
PLAIN = BlockShape(vocab_size=VOCAB, state_layers=STATE_LAYERS)
BARE = replace(PLAIN, markov_rank=0, confidence=False)  # DFlash
SECOND = replace(BARE, from_anchor=False, block_size=7, selector_rank=12)  # DFlash 2

SHAPES = {
    "dspark": ("dspark", PLAIN),
    "dspark of three layers and blocks of seven": ("dspark", replace(PLAIN, num_layers=3, block_size=7)),
    "dflash": ("dflash", replace(BARE, from_anchor=False, block_size=7)),
    "dflash, anchor first": ("dspark", BARE),
    "causal": ("dspark", replace(PLAIN, causal=True, block_size=7)),
    "windows": (
        "dspark",
        replace(PLAIN, window=7, windowed=(True, False, True), num_layers=3, block_size=7, causal=False),
    ),
    "causal where windowed": (
        "dflash",
        replace(BARE, window=6, windowed=(True, False), from_anchor=False, block_size=7),
    ),
    "few tokens": ("speculators", replace(PLAIN, draft_vocab=100, block_size=7)),
    "few tokens, dflash": ("speculators", replace(BARE, draft_vocab=100, from_anchor=False)),
    "fill in, corrected": ("speculators", replace(PLAIN, from_anchor=False, block_size=7)),
    "own mask": ("speculators", replace(PLAIN, draft_vocab=100, mask_token_id=None)),
    "dflash 2": ("dflash", SECOND),
    "dflash 2, scaled and capped": (
        "dflash",
        replace(SECOND, embedding_scale=3.0, multiplier=0.4, cap=2.0, top_k=4, num_layers=3),
    ),
    "dflash 2, three taps, windows": (
        "dflash",
        replace(SECOND, taps=3, group=8, window=9, windowed=(True, True), causal=False),
    ),
    "dflash 2, causal": ("dflash", replace(SECOND, causal=True)),
    "gemma 4": ("dspark", replace(PLAIN, gemma=True, block_size=7)),
    "gemma 4, keys for values": ("dspark", replace(PLAIN, gemma=True, k_eq_v=True, cap=2.0, num_kv_heads=1)),
    "gguf, dflash 2": ("gguf", replace(SECOND, embedding_scale=3.0, multiplier=0.4, cap=2.0)),
    "gguf, dspark": ("gguf", replace(PLAIN, block_size=7)),
    "gguf, dflash": ("gguf", replace(BARE, from_anchor=False, block_size=7)),
    "gguf, few tokens": ("gguf", replace(PLAIN, draft_vocab=100)),
    "gguf, windows": ("gguf", replace(PLAIN, window=7, windowed=(True, False), causal=False)),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("target")
    config = tiny_llama_config() | {"num_hidden_layers": 5, "vocab_size": VOCAB, "tie_word_embeddings": False}
    weights = random_weights(llama_shapes(config))
    write_checkpoint(folder, config, weights)
    return folder, weights


@dataclass
class Line:
    """token_ids: committed ones. states: [N, K * H] of all of them but the last. first: that the drafter knows."""

    token_ids: list[int]
    states: Tensor
    first: int = 0


class Driven:
    """A block drafter, a target whose states are made up, and the oracle."""

    def __init__(
        self,
        folder: Path,
        target: tuple[Path, dict[str, Tensor]],
        backend: Backend,
        layout: str,
        shape: BlockShape,
        *,
        sampler: DraftSampler | None = None,
        max_rows: int = MAX_ROWS,
        rows: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        make_graphs: Callable[[BlockRunner, HiddenStates, Decoder, KvShape], BlockGraphs] | None = None,
        **config: Any,
    ) -> None:
        path, weights = target
        own = write_block(folder, shape, layout, target=weights, **config)
        folder = block_path(folder, layout)
        decoder = load_decoder(
            path, backend, dtype, max_model_len=MAX_PLACES, max_rows=64, max_logit_rows=64,
            state_layers=STATE_LAYERS, progress=lambda *_: None,
        )  # fmt: skip
        method = block_method(folder)
        assert method is not None
        self.spec = read_block_spec(folder, decoder.spec, method)
        model = load_block(
            folder, self.spec, decoder, backend, max_positions=MAX_PLACES, max_rows=max_rows, max_logit_rows=3,
            draft_ids=rows,
        )  # fmt: skip
        spec = self.spec.decoder
        kv = KvShape(heads=spec.kv_heads, num_blocks=NUM_SLOTS * 6, block_size=BLOCK_SIZE, dtype=dtype)
        self.runner = BlockRunner(model, backend, kv, states=decoder.states, vocab_size=VOCAB)
        self.ring = HiddenStates(
            num_slots=NUM_SLOTS,
            num_rows=1000,
            width=self.spec.states_size,
            dtype=dtype,
            device=torch.device("cpu"),
        )
        chosen = sampler or GreedyDraftSampler()
        if make_graphs is not None:
            self.runner.graphs = make_graphs(self.runner, self.ring, decoder, kv)
        self.table = BlockTable(NUM_SLOTS, -(-MAX_PLACES // BLOCK_SIZE))
        self.cache = HeadCache(self.table, num_blocks=kv.num_blocks, block_size=BLOCK_SIZE)
        self.free = [*range(kv.num_blocks)]
        self.loop = BlockLoop(
            self.runner,
            self.cache.table,
            self.ring,
            chosen,
            max_rows=max_rows,
            predicts=None if make_graphs is None else chosen,  # type: ignore[arg-type]
        )
        self.drafter = HeadDrafter(self.loop, self.ring, self.cache, method, trained=MAX_PLACES)
        self.lines: dict[int, Line] = {}
        doubles = {name: each.double().numpy() for name, each in (own | {"d2t": torch.zeros(1)}).items()}
        doubles["embed_tokens.weight"] = weights["model.embed_tokens.weight"].double().numpy()
        if "lm_head.weight" not in own:
            doubles["lm_head.weight"] = weights["lm_head.weight"].double().numpy()
        ids = draft_ids(shape).numpy() if "d2t" in own else np.arange(VOCAB)
        if rows is not None:
            ids = rows.numpy()
            of_rows = (
                *("lm_head.weight", "markov_head.markov_w2.weight"),
                "candidate_selector.successor_codebook",
            )
            doubles |= {name: doubles[name][ids] for name in of_rows if name in doubles}
        causal = [shape.window is not None and each for each in shape.windowed or [False] * shape.num_layers]
        if shape.causal is not None:
            causal = [shape.causal] * shape.num_layers
        kind = GemmaReference if shape.gemma else BlockReference
        self.reference = kind(shape=shape, weights=doubles, ids=ids, causal=causal)
        self._generator = torch.Generator().manual_seed(2)

    def start(
        self,
        slot: int,
        prompt: Sequence[int],
        chunks: Sequence[int] = (),
        after: "tuple[int, int] | None" = None,
        **sampling: float,
    ) -> None:
        """A prompt whose tokens but the last are computed in chunks of these sizes.

        after: a slot whose first so many blocks it begins with, which are computed.
        """
        params = SamplingParams(**{"temperature": 0.0} | sampling)  # type: ignore[arg-type]
        found = SequenceStart(
            slot=slot, sampling=params, seed=slot + 7, prompt_len=len(prompt), token_ids=tuple(prompt)
        )
        self.drafter.start(found)
        self.lines[slot] = Line(list(prompt), torch.empty(0, self.spec.states_size))
        if after is not None:
            other, num_blocks = after
            self.table.append(slot, tuple(self.table.blocks(other)[:num_blocks]))
            self.lines[slot].states = self.lines[other].states[: num_blocks * BLOCK_SIZE]
        rest = len(prompt) - 1 - sum(chunks) - len(self.lines[slot].states)
        for count in (*chunks, *([rest] if rest else [])):
            self.compute(slot, count)

    def compute(self, slot: int, count: int, num_drafts: int = 0, accepted: int = 0) -> None:
        """Rows of the next tokens, the last of which are drafts. States of the refused ones are made up too."""
        line, width = self.lines[slot], self.spec.states_size
        start = len(line.states)
        states = torch.randn(count + num_drafts, width, generator=self._generator)
        kept = count + accepted
        rows = SequenceRows(
            slot=slot, start=start, token_ids=(0,) * len(states), samples=False, num_drafts=num_drafts
        )
        self.ring.take_in(StepRows.of(rows), [0, len(states)], states, [accepted + 1])
        line.states = torch.cat((line.states, states[:kept]))

    def propose(self, requests: dict[int, int]) -> dict[int, tuple[list[int], list[float]]]:
        for slot, most in requests.items():
            while len(self.table.blocks(slot)) * BLOCK_SIZE < len(self.lines[slot].token_ids) + most:
                self.table.append(slot, (self.free.pop(),))
        plan = DraftPlan(
            step=1,
            width=8,
            requests=tuple(DraftRequest(slot=slot, max_tokens=most) for slot, most in requests.items()),
            stop=None,
        )
        found = self.drafter.propose(plan)
        self.cache.check_invariants()
        return {each.slot: (list(each.token_ids), list(each.confidences)) for each in lines_of(found.table)}

    def commit(self, slot: int, draft: Sequence[int], accepted: int, bonus: int) -> None:
        """The target has verified a draft."""
        tokens = [*draft[:accepted], bonus]
        self.compute(slot, 1, num_drafts=len(draft), accepted=accepted)
        self.lines[slot].token_ids += tokens
        self.drafter.commit([slot], [len(tokens)], tokens)

    def wanted(self, slot: int, most: int) -> tuple[list[int], list[float]]:
        line = self.lines[slot]
        most = min(most, self.spec.most_tokens)
        return self.reference.draft(line.states[line.first :].double().numpy(), line.token_ids[-1], most)

    def check(self, requests: dict[int, int]) -> dict[int, list[int]]:
        found = self.propose(requests)
        for slot, most in requests.items():
            token_ids, confidences = self.wanted(slot, most)
            assert found[slot][0] == token_ids
            assert found[slot][1] == pytest.approx(confidences, abs=2e-3)
        return {slot: draft for slot, (draft, _) in found.items()}


def prompt(length: int, seed: int = 1) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("name", SHAPES)
def test_whole_drafts_are_those_of_the_formulas(
    name: str, backend: Backend, target: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    """Two sequences at once, with blocks of different lengths, prompts in chunks, and drafts half accepted."""
    layout, shape = SHAPES[name]
    driven = Driven(tmp_path, target, backend, layout, shape)
    driven.start(0, prompt(19), chunks=(3, 7))
    driven.start(2, prompt(5, seed=2))
    most = driven.spec.most_tokens
    for accepted in (1, 0, 2):
        drafts = driven.check({2: most, 0: max(most - 1, 1)})
        for slot, draft in drafts.items():
            driven.commit(slot, draft, min(accepted, len(draft)), bonus=9 + accepted)
    driven.check({0: most})
    driven.check({0: most, 2: 1})  # asked for again: nothing has come since


@pytest.mark.parametrize("name", ["dspark", "dflash", "dflash 2", "gguf, dspark"])
def test_a_drafter_may_choose_from_some_rows_of_a_whole_vocabulary(
    name: str, backend: Backend, target: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    """Whether the checkpoint has the target's head or none."""
    layout, shape = SHAPES[name]
    rows = torch.arange(3, VOCAB, 2)
    driven = Driven(tmp_path, target, backend, layout, shape, rows=rows)
    driven.start(0, prompt(19))
    drafts = driven.check({0: driven.spec.most_tokens})
    assert {*drafts[0]} <= {*rows.tolist()}


def test_rows_of_a_gguf_drafter_are_taken_in_their_blocks(
    backend: Backend, target: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    shape, rows = replace(PLAIN, markov_rank=32, block_size=7), torch.arange(3, VOCAB, 2)
    both = []
    for layout in ("gguf", "dspark"):
        kept = GGMLQuantizationType.Q8_0
        driven = Driven(tmp_path / layout, target, backend, layout, shape, quantization=kept, rows=rows)
        driven.start(0, prompt(19))
        both.append(driven.propose({0: 7})[0][0])
    assert {*both[0]} <= {*rows.tolist()}
    assert np.mean(np.equal(both[0], both[1])) > 0.7, "activations in 8 bits: a near tie may fall otherwise"


@pytest.mark.parametrize("name", ["dspark", "windows", "causal", "dflash 2", "dflash 2, three taps, windows"])
def test_both_forms_of_the_oracle_agree(name: str, target: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    """Of one block, row by row; and of several blocks at once, under a mask."""
    reference = Driven(tmp_path, target, TorchBackend(), *SHAPES[name]).reference
    width, tokens = reference.shape.hidden_size * len(STATE_LAYERS), prompt(20)
    states, anchors = np.random.default_rng(4).standard_normal((20, width)), (3, 9, 10, 17)
    together = reference.hidden_of_blocks(states, tokens, anchors, 5)
    for anchor, found in zip(anchors, together, strict=True):
        assert found == pytest.approx(reference.hidden(states[:anchor], tokens[anchor], 5), abs=1e-9)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
def test_a_gguf_file_drafts_what_the_same_weights_in_safetensors_draft(
    kind: str, backend: Backend, target: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    """With the values that the file has, dequantised.

    The native backend multiplies blocks as they are stored, by activations of 8 bits: a near tie may fall
    otherwise. Of Q4_0 the drafter has some of the vocabulary's rows.
    """
    shape, kept = replace(PLAIN, markov_rank=32, block_size=7), GGMLQuantizationType[kind]
    rows = torch.arange(1, VOCAB, 2) if kind == "Q4_0" else None
    both = []
    for layout in ("gguf", "dspark"):
        own = Driven(tmp_path / layout, target, backend, layout, shape, quantization=kept, rows=rows)
        own.start(0, prompt(19), chunks=(3, 7))
        both.append(own)
    from_gguf, from_safetensors = both
    in_blocks, same = kind in ("Q8_0", "Q4_0") and backend.prefers_low_bit, []
    for accepted in (1, 0, 3, 2, 5, 1):
        draft = from_gguf.propose({0: 7})[0][0]
        same += np.equal(from_safetensors.propose({0: 7})[0][0], draft).tolist()
        for each in both:
            each.commit(0, draft, accepted, bonus=9 + accepted)
    assert np.mean(same) >= 0.9 if in_blocks else all(same)
    packed, floats = (each.runner.head.weight_bytes for each in both)
    assert packed < 0.5 * floats if in_blocks else packed == floats


def test_a_draft_is_no_longer_than_the_drafter_was_trained_for(
    backend: Backend, target: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    driven = Driven(tmp_path, target, backend, "dflash", replace(BARE, from_anchor=False))
    driven.start(0, prompt(9))
    assert len(driven.check({0: 8})[0]) == 3


def test_passes_have_a_limit_of_rows_and_drafts_do_not_depend_on_it(
    backend: Backend, target: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    driven = Driven(tmp_path, target, backend, *SHAPES["dspark"], max_rows=9)
    for slot in range(NUM_SLOTS):
        driven.start(slot, prompt(12 + slot, seed=slot))
    driven.check(dict.fromkeys(range(NUM_SLOTS), 4))


def test_a_cold_drafter_has_the_same_keys(
    backend: Backend, target: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    """After chunks and rejections. Bit for bit where rows do not depend on their batch."""
    driven = Driven(tmp_path, target, backend, *SHAPES["dspark of three layers and blocks of seven"])
    driven.start(1, prompt(21), chunks=(5, 9))
    for accepted in (0, 3, 7, 1):
        draft = driven.propose({1: 7})[1][0]
        driven.commit(1, draft, accepted, bonus=accepted)
    warm = driven.check({1: 7})
    assert not driven.drafter.rebuild(driven.spec.method, 1)
    if (memory := driven.loop.memory) is not None:
        (block, *_) = driven.table.blocks(1)
        memory[0][block, :64] += 1  # a fault, which is found and mended
        assert driven.drafter.rebuild(driven.spec.method, 1)
    assert driven.check({1: 7}) == warm


def test_a_prefix_that_was_drafted_for_is_known_to_the_next_sequence(
    backend: Backend, target: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    """The formulas over all states, of which the drafter has read only those behind the prefix."""
    driven = Driven(tmp_path, target, backend, *SHAPES["dspark of three layers and blocks of seven"])
    line = prompt(3 * BLOCK_SIZE + 2)
    driven.start(0, line)
    driven.check({0: 7})
    driven.start(2, [*line[: 2 * BLOCK_SIZE], *prompt(7, seed=5)], after=(0, 2))
    driven.check({2: 7, 0: 3})
    driven.start(1, line, after=(0, 1))
    driven.check({1: 7})


def test_a_sequence_that_ends_reads_what_its_last_full_block_lacks(
    backend: Backend, target: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    """Its last step has filled the block, after the last draft."""
    driven = Driven(tmp_path, target, backend, *SHAPES["dspark of three layers and blocks of seven"])
    driven.start(0, prompt(2 * BLOCK_SIZE - 1))
    draft = driven.check({0: 7})[0]
    driven.commit(0, draft, 3, bonus=5)
    said = driven.lines[0].token_ids
    assert len(said) > 2 * BLOCK_SIZE
    driven.drafter.release(0)
    driven.start(1, [*said[: 2 * BLOCK_SIZE], *prompt(6, seed=5)], after=(0, 2))
    driven.check({1: 7})


def test_a_prefix_that_was_not_drafted_for_is_left_out(
    backend: Backend, target: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    driven = Driven(tmp_path, target, backend, *SHAPES["dspark of three layers and blocks of seven"])
    line = prompt(3 * BLOCK_SIZE)
    driven.start(0, line)
    driven.table.append(0, (driven.free.pop(), driven.free.pop()))
    own = [*line[: 2 * BLOCK_SIZE], *prompt(2 * BLOCK_SIZE, seed=5)]
    driven.start(2, own, after=(0, 2))
    driven.lines[2].first = 2 * BLOCK_SIZE
    driven.check({2: 7})
    driven.commit(2, (), 0, bonus=4)
    driven.start(1, own, after=(2, 3))  # rows of slot 2 have places of their own: none is taken over
    driven.lines[1].first = 3 * BLOCK_SIZE
    driven.check({1: 7, 2: 4})


def test_drafts_of_requests_that_sample_race_with_their_random_numbers(
    backend: Backend, target: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    """A drafter whose every row is sure of the target's own distribution would be right: the noise is the same.

    Oracle: one sequence at a time over the candidates alone, by the same sampler.
    """
    state = SamplingState(NUM_SLOTS)
    sampler = SampleAndMatchDraftSampler(state)
    driven = Driven(tmp_path, target, backend, *SHAPES["few tokens"], sampler=sampler)
    for slot in range(3):
        line, params = prompt(9 + slot, seed=slot), SamplingParams(temperature=(0.0, 0.8, 1.5)[slot])
        found = SequenceStart(
            slot=slot, sampling=params, seed=slot + 7, prompt_len=len(line), token_ids=tuple(line)
        )
        state.start(found)
        driven.start(slot, line)
    together = driven.propose(dict.fromkeys(range(3), 7))
    alone = {slot: driven.propose({slot: 7})[slot] for slot in range(3)}
    assert {slot: draft for slot, (draft, _) in together.items()} == {
        slot: draft for slot, (draft, _) in alone.items()
    }
    assert together[0][0] == driven.wanted(0, 7)[0]
    assert together[2][0] != driven.wanted(2, 7)[0], "drawn, not the likeliest"
    assert together[1][1] != pytest.approx(driven.wanted(2, 7)[1])
