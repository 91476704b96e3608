"""Engines over a small target and a noisy drafter, with early pruning, policy and lanes of the caller's choice."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from faser.config.speculation import SpeculationConfig
from faser.engine.contract.plan import SequenceRows, StepRows
from faser.engine.contract.step_times import StepTimes
from faser.engine.control.clock import SimulatedClock
from faser.engine.control.kv_cache import KvManager
from faser.engine.control.scheduler import Scheduler
from faser.engine.control.speculation.control import SpeculationControl
from faser.engine.control.speculation.overlap import OverlapOptions
from faser.engine.control.speculation.policy import Policy
from faser.engine.control.step_cost import CostModel
from faser.engine.engine import Engine
from faser.engine.execution.drafting.draft_model import DraftKvCache
from faser.engine.execution.drafting.registry import DrafterParts, DraftModelParts, make_drafter
from faser.engine.execution.model_executor import ModelExecutor, SpeculativeExecution
from faser.engine.execution.models.decoder import Decoder
from faser.engine.execution.models.loader import load_decoder
from faser.engine.execution.overlap.lanes import Lanes
from faser.engine.execution.overlap.partition import Cores, Draft, OverlapResult, Partition, Verify
from faser.engine.execution.pruning import Action, EarlyPruning, PlainForward, PreviewRows, PruneGate
from faser.engine.execution.runner.batch import BlockTable, RowBatch
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.sampler import Sampler
from faser.engine.execution.sampling.tokens import LOGITS_ONLY, TokenSampler
from faser.engine.execution.sampling.verify import make_verifier
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.kv_cache import KvShape
from faser.kernels.torch_backend import TorchBackend
from faser.types.arrays import Bools, Ints
from faser.types.request import Request
from tests.checkpoints import VOCAB_SIZE, llama_shapes, random_weights, tiny_llama_config, write_checkpoint
from tests.native_acceptance import make_native

NUM_LAYERS = 6
NUM_SLOTS = 6
BLOCK_SIZE = 16
NUM_BLOCKS = 24  # too few for all
MAX_LEN = 256
MAX_ROWS = 64
CAP = 5
D = TypeVar("D")
V = TypeVar("V")


class PatientCores(Cores):
    """Lets every draft reach the requested length, so that no draft depends on the load of the machine."""

    def run_both(self, draft: Draft[D], verify: Verify[V]) -> OverlapResult[D, V]:
        return super().run_both(lambda lane, _until: draft(lane, lambda: False), verify)


def write_pair(directory: Path, *, noise: float = 0.05) -> tuple[Path, Path]:
    """A target of six layers, and a drafter that is the target with noise on its matrices."""
    config = tiny_llama_config() | {"num_hidden_layers": NUM_LAYERS}
    weights = random_weights(llama_shapes(config), seed=3)
    generator = torch.Generator().manual_seed(5)
    noisy = {
        name: each + noise * each.std(correction=0) * torch.randn(each.shape, generator=generator)
        for name, each in weights.items()
    }
    for name, each in (("target", weights), ("drafter", noisy)):
        write_checkpoint(directory / name, config, each)
    return directory / "target", directory / "drafter"


def make_decoder(directory: Path, backend: Backend) -> Decoder:
    return load_decoder(
        directory, backend, torch.float32, max_model_len=MAX_LEN, max_rows=MAX_ROWS, progress=lambda *_: None
    )


def make_runner(directory: Path, backend: Backend, chooser: TokenSampler = LOGITS_ONLY) -> Runner:
    decoder = make_decoder(directory, backend)
    spec = decoder.spec
    shape = KvShape(
        heads=spec.kv_heads,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        dtype=torch.float32,
    )
    return Runner(decoder, backend, shape, chooser)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What engines are made of. Several may use it in turn: each writes a runner's KV cache before it reads it.

    lanes: None where drafting cannot overlap with a step.
    """

    target: Runner
    drafter: Runner
    lanes: Lanes | None = None


def make_world(
    pair: tuple[Path, Path],
    backend: Backend,
    partition: Partition | None = None,
    choosers: tuple[TokenSampler, TokenSampler] = (LOGITS_ONLY, LOGITS_ONLY),
) -> World:
    """partition: divides the processors between the two models; None: they take turns on one backend.

    choosers: of target and drafter, where runners choose.
    """
    draft_backend = backend if partition is None else backend.concurrent_instance()
    return World(
        target=make_runner(pair[0], backend, choosers[0]),
        drafter=make_runner(pair[1], draft_backend, choosers[1]),
        lanes=None if partition is None else Lanes(partition=partition, target=backend, draft=draft_backend),
    )


def make_engine(
    world: World,
    config: SpeculationConfig,
    pruning: EarlyPruning | None,
    *,
    policy: Policy | None = None,
    overlap: OverlapOptions | None = None,
    eos_token_ids: tuple[int, ...] = (),
    num_blocks: int = NUM_BLOCKS,
    samples_in_runner: bool = False,
) -> Engine:
    """An engine under the policy of config, or under another; `off` is the oracle. overlap: None: no lanes.

    num_blocks: at most NUM_BLOCKS, which the caches have. samples_in_runner: as of DrafterParts.
    """
    table = BlockTable(NUM_SLOTS, MAX_LEN // BLOCK_SIZE)
    sampler = Sampler(NUM_SLOTS, world.target.vocab_size, eos_token_ids, world.target.sampling_kernels)
    speculation, control, clock = None, None, SimulatedClock()
    if config.policy != "off":
        model = DraftModelParts(
            runner=world.drafter,
            kv=DraftKvCache(table, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE),
            max_positions=MAX_LEN,
        )
        parts = DrafterParts(
            table=table,
            sampling=sampler.state,
            max_rows=MAX_ROWS,
            model=model,
            samples_in_runner=samples_in_runner,
        )
        speculation = SpeculativeExecution(
            drafter=make_drafter(config, parts),
            verifier=make_verifier(config, sampler),
            forward=pruning or PlainForward(),
            lanes=None if overlap is None else world.lanes,
        )
        costs = CostModel(StepTimes.proportional(step_s=0.01, pass_s=1e-5, text_s=1e-7))
        control = SpeculationControl(
            config,
            costs,
            make_native=make_native,
            num_slots=NUM_SLOTS,
            clock=clock,
            policy=policy,
            overlap=overlap,
        )
    scheduler = Scheduler(
        kv=KvManager(num_blocks, BLOCK_SIZE, enable_prefix_caching=True),
        max_num_seqs=NUM_SLOTS,
        max_num_batched_tokens=MAX_ROWS,
        max_model_len=MAX_LEN,
        eos_token_ids=eos_token_ids,
        clock=clock,
        speculation=control,
    )
    executor = ModelExecutor(world.target, sampler, table, max_logit_rows=MAX_ROWS, speculation=speculation)
    return Engine(scheduler, executor)


class RandomGate(PruneGate):
    """Knows nothing: any drafted token is flagged with this chance; look_share of the steps only look."""

    def __init__(self, seed: int, *, chance: float = 0.3, look_share: float = 0.0) -> None:
        super().__init__()
        self._rng = np.random.default_rng(seed)
        self._chance = chance
        self._look_share = look_share

    def decide(self) -> Action:
        return Action.LOOK if self._rng.random() < self._look_share else Action.PRUNE

    def flags(self, ranks: Ints) -> Bools:
        flagged: Bools = self._rng.random(len(ranks)) < self._chance
        return flagged


def no_ranks(_runner: Runner, drafted: PreviewRows) -> Ints:
    """In the place of a look, where the gate does not go by ranks."""
    return np.zeros(len(drafted.depth), dtype=np.int64)


ForwardedStep = tuple[Runner, RowBatch, StepRows]


def four_sequences(pair: tuple[Path, Path]) -> ForwardedStep:
    """A step of four sequences: 2 drafted tokens, a prompt's, none, 3 drafted tokens."""
    runner = make_runner(pair[0], TorchBackend())
    table = BlockTable(NUM_SLOTS, 4)
    rows = []
    for slot, (count, num_drafts, samples) in enumerate(((3, 2, True), (5, 0, False), (1, 0, True), (4, 3, True))):
        table.append(slot, (slot,))
        token_ids = tuple(np.random.default_rng(slot).integers(3, VOCAB_SIZE, count).tolist())
        rows.append(
            SequenceRows(
                slot=slot, start=0, token_ids=token_ids, new_blocks=(), samples=samples, num_drafts=num_drafts
            )
        )
    step = StepRows.of(*rows)
    return runner, table.gather(step), step


Answer = tuple[tuple[int, ...], tuple[object, ...]]


def answers(engine: Engine, asked: Sequence[Request]) -> dict[str, Answer]:
    """Tokens and scores of every request."""
    for request in asked:
        engine.add(request)
    tokens: dict[str, list[int]] = {}
    scores: dict[str, list[object]] = {}
    while engine.has_work():
        for delta in engine.step():
            assert delta.error is None, delta.error
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            scores.setdefault(delta.request_id, []).extend(
                (*(delta.prompt_logprobs or ()), *(delta.logprobs or ()))
            )
    assert engine.stats().kv_usage == 0.0
    return {name: (tuple(each), tuple(scores[name])) for name, each in tokens.items()}
