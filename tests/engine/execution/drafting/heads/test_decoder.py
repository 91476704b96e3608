"""Heads that run as draft models do, over replayed graphs, draft what the eager loop drafts, token for token.

Nothing here runs on a GPU: the device is the emulation of fake_graph, where captured work is repeated on the very
tensors that it had. Two halves have the same sequences, which come, end, are preempted and share prefixes, and
verify and accept the same parts of their drafts. One half has the graphs, of the target too, whose captured work
leaves the states. The other one is the oracle: it is eager and samples in the head's own vocabulary.

Planted bugs that these tests have caught: the states of the neighbour's row; padding rows are stored in block 0;
the numbers of states are those of the last pass; a vocabulary that is off by one; tokens that the head does not
have stay possible; states stay in place where sequences ended before; unknown states are not 0; a later piece of a
prompt reads the states of the first one.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from faser.engine.checkpoints.heads import read_mtp_spec
from faser.engine.contract.plan import SequenceRows, StepRows
from faser.engine.execution.drafting.fed_loop import FedPassLoop
from faser.engine.execution.drafting.head_memory import HeadCache, HiddenStates
from faser.engine.execution.drafting.heads.decoder import (
    HeadDecoder,
    HeadModelLoop,
    HeadModelPasses,
    StateReader,
)
from faser.engine.execution.drafting.heads.head import Head, HeadDrafter, HeadLoop, HeadRunner, StateLoop
from faser.engine.execution.drafting.heads.mtp import load_mtp
from faser.engine.execution.drafting.heads.weights import load_head
from faser.engine.execution.drafting.loop import PassLoop
from faser.engine.execution.drafting.samplers import (
    DraftSampler,
    DraftVocabularySampler,
    GreedyDraftSampler,
    PointMassSampler,
    ProbabilisticDraftSampler,
    SampleAndMatchDraftSampler,
)
from faser.engine.execution.models.decoder import Decoder
from faser.engine.execution.models.loader import load_decoder
from faser.engine.execution.runner.batch import BlockTable
from faser.engine.execution.runner.graph_runner import GraphRunner
from faser.engine.execution.runner.graph_sizes import GraphSizes
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.tokens import DeviceTokenSampler
from faser.kernels.cuda.flashinfer.backend import FlashInferBackend
from faser.kernels.interface.kv_cache import KvShape
from tests.checkpoints import VOCAB_SIZE
from tests.engine.checkpoints.mtp_models import write_mtp_model
from tests.engine.execution.draft_lines import DraftLine, lines_of
from tests.engine.execution.drafting.driving import (
    BLOCK_SIZE,
    MAX_LEN,
    MAX_ROWS,
    NUM_BLOCKS,
    NUM_SLOTS,
    World,
)
from tests.engine.execution.drafting.heads.test_head_drafter import Drafting
from tests.engine.execution.drafting.seeded_heads import (
    draft_vocabulary,
    head_layers,
    head_spec,
    write_seeded,
)
from tests.engine.execution.runner.test_graph_runner import write_heads_of_64
from tests.kernels.cuda.fake_device import FakeAccelerator
from tests.kernels.cuda.fake_graph import fake_backend

CAP, WIDTH, STATE_LAYERS = 6, 128, (0, 1, 2)
MAX_PLACES = MAX_LEN + CAP
BLOCKS_EACH = -(-MAX_PLACES // BLOCK_SIZE)
SIZES = GraphSizes(rows=(1, 2, 4, 8), max_sequences=NUM_SLOTS, max_blocks_each=BLOCKS_EACH)

Load = Callable[[FlashInferBackend], tuple[Decoder, Head]]


@dataclass(frozen=True)
class Files:
    """A target and what drafts for it. method: eagle3 or mtp."""

    method: str
    target: Path
    head: Path

    def load(self, backend: FlashInferBackend) -> tuple[Decoder, Head]:
        decoder = load_decoder(
            self.target,
            backend,
            torch.bfloat16,
            max_model_len=MAX_PLACES,
            max_rows=MAX_ROWS,
            max_logit_rows=MAX_ROWS,
            state_layers=STATE_LAYERS if self.method == "eagle3" else (8,),
            progress=lambda *_: None,
        )
        room: dict[str, Any] = {"max_positions": MAX_PLACES, "max_rows": MAX_ROWS, "max_logit_rows": NUM_SLOTS}
        if self.method == "eagle3":
            return decoder, load_head(self.head, decoder, backend, **room)
        spec = read_mtp_spec(self.target, decoder.spec)
        assert spec is not None
        ids = draft_vocabulary()
        return decoder, load_mtp(self.target, spec, decoder, backend, draft_ids=ids, **room)


@pytest.fixture(scope="module", params=["eagle3", "mtp"])
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "mtp":
        write_mtp_model(folder, head_dim=64)
        return Files("mtp", folder, folder)
    layers = head_layers(hidden_size=WIDTH, num_heads=2, num_kv_heads=1, head_dim=64)
    spec = head_spec(layers, target_hidden_size=WIDTH, state_layers=STATE_LAYERS)
    write_seeded(folder / "head", spec, dtype=torch.bfloat16)
    return Files("eagle3", write_heads_of_64(folder / "target"), folder / "head")


class Half(Drafting):
    """A target and a head on the emulated device. Of MTP the target's states are made up.

    graphs: whether steps and passes are replayed. drafts: of each proposal.
    """

    def __init__(
        self,
        files: Files,
        seed: int,
        *,
        graphs: bool,
        sampling: str = "greedy",
        accelerator: FakeAccelerator | None = None,
        ring_rows: int = 4000,
    ) -> None:
        backend = fake_backend(accelerator)
        decoder, head = files.load(backend)
        self.method, self.decoder, self.rng = files.method, decoder, random.Random(seed)
        self.ring = HiddenStates(
            num_slots=NUM_SLOTS,
            num_rows=ring_rows,
            width=head.spec.states_size,
            dtype=torch.bfloat16,
            device=backend.device,
        )
        table = BlockTable(NUM_SLOTS, BLOCKS_EACH)
        self.cache = HeadCache(table, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        if files.method == "eagle3":
            self.runner = self._runner(backend, decoder, kv_of(decoder), graphs=graphs)
        kv = KvShape(
            heads=head.spec.decoder.kv_heads, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=torch.bfloat16
        )
        self.world = World(None, table, self.rng)  # type: ignore[arg-type]
        kernels = backend.sampling_kernels
        masses: PointMassSampler | None = GreedyDraftSampler(kernels)
        if sampling != "greedy":
            masses = SampleAndMatchDraftSampler(self.world.sampling, kernels=kernels)
        sampler: DraftSampler | None = masses
        if sampling == "drawn":
            sampler, masses = ProbabilisticDraftSampler(self.world.sampling, kernels=kernels), None
        assert sampler is not None
        loop: StateLoop
        if graphs:
            model = HeadDecoder(head, max_rows=MAX_ROWS, logits=decoder.logit_rows)
            passing = self._runner(backend, model, kv, graphs=True)
            reader = StateReader(model, self.ring, backend, backend.graph_capture, SIZES.rows)
            passes = HeadModelPasses(passing, self.cache.table, self.ring, reader, max_rows=MAX_ROWS)
            loop = HeadModelLoop(
                passes, PassLoop(passes, sampler) if masses is None else FedPassLoop(passes, masses)
            )
        else:
            assert head.draft_ids is not None
            eager = HeadRunner(head, backend, kv, states=decoder.states, vocab_size=VOCAB_SIZE)
            own = DraftVocabularySampler(sampler, head.draft_ids, VOCAB_SIZE)
            loop = HeadLoop(eager, self.cache.table, self.ring, own, max_rows=MAX_ROWS)
        self.world.drafter = HeadDrafter(loop, self.ring, self.cache, files.method, trained=MAX_PLACES)
        self.sampling = sampling
        self.computed, self.read, self.began = {}, {}, {}
        self.drafts: list[list[DraftLine]] = []

    def start(self, slot: int, prompt: list[int]) -> None:
        sampling = {"temperature": 0.8 * (slot % 2), "top_p": 0.9} if self.sampling != "greedy" else {}
        self.computed[slot] = min(self.world.start(slot, prompt, **sampling), len(prompt) - 1)
        self.began[slot] = self.computed[slot]

    def step(self, rows: list[SequenceRows], num_tokens: dict[int, int]) -> None:
        if self.method == "eagle3":
            super().step(rows, num_tokens)
            return
        step = StepRows.of(*rows)
        batch = self.world.table.gather(step)
        states = made_up(batch.token_ids.tolist(), batch.layout.positions.tolist(), self.ring.ring.shape[1])
        counts = [num_tokens.get(each.slot, 0) for each in rows]
        self.ring.take_in(step, batch.layout.query_start.tolist(), states, counts)

    def propose(self, requests: dict[int, int], *, exact: bool = True) -> None:
        del exact
        found = self.world.propose(requests)
        self.cache.check_invariants()
        self.ring.check_invariants()
        self.drafts.append(lines_of(found.table))

    def _runner(self, backend: FlashInferBackend, model: Any, kv: KvShape, *, graphs: bool) -> Runner:
        kernels = backend.device_sampling_kernels(NUM_SLOTS, VOCAB_SIZE)
        sampler = DeviceTokenSampler(kernels, backend.graph_capture, backend.device, NUM_SLOTS)
        if not graphs:
            return Runner(model, backend, kv, sampler)
        return GraphRunner(
            model,
            backend,
            kv,
            sampler,
            backend.graph_capture,
            sizes=SIZES,
            max_logit_rows=NUM_SLOTS,
            drafts=True,
            report=lambda *_: None,
        )


def kv_of(decoder: Decoder) -> KvShape:
    heads = decoder.spec.kv_heads
    return KvShape(heads=heads, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=torch.bfloat16)


def made_up(token_ids: list[int], positions: list[int], width: int) -> Tensor:
    """States that depend on a token and its position."""
    generator = torch.Generator()
    rows = [
        torch.randn(width, generator=generator.manual_seed(1000 * position + token_id))
        for token_id, position in zip(token_ids, positions, strict=True)
    ]
    return torch.stack(rows).bfloat16()


@pytest.mark.parametrize("sampling", ["greedy", "coupled", "drawn"])
@pytest.mark.full(but=("eagle3-coupled", "mtp-drawn", "mtp-greedy"))
def test_graphs_draft_what_the_eager_loop_drafts(files: Files, sampling: str) -> None:
    """Coupled drafts have a ring that loses states, so that some are unknown."""
    ring_rows = 40 if sampling == "coupled" else 4000
    graphs, eager = (Half(files, 3, graphs=each, sampling=sampling, ring_rows=ring_rows) for each in (True, False))
    for half in (graphs, eager):
        half.run(25)
    assert_same(graphs.drafts, eager.drafts)
    assert sum(len(line.token_ids) for lines in graphs.drafts for line in lines) > 100


def assert_same(ours: list[list[DraftLine]], theirs: list[list[DraftLine]]) -> None:
    """The same tokens. A product of another number of rows may round a margin otherwise."""
    for one, other in zip(ours, theirs, strict=True):
        assert [line[:3] for line in one] == [line[:3] for line in other]
        for line, wanted in zip(one, other, strict=True):
            assert line.confidences == pytest.approx(wanted.confidences, abs=2.0**-4)
