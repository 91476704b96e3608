"""Times drafts of a block drafter, in one native call and operation by operation, and steps that verify them.

    python -m benchmarks.speculation.block_rows MODEL OUT.json [--layers 5] [--states 5] [--rank 256]
        [--vocabulary 32768] [--quantization int4] [--sequences 1,4,16] [--rounds 20] [--threads 1]

MODEL: a directory or a .gguf file, with real weights or those of benchmarks.models.random_gguf. The drafter is a
DSpark with layers of the model's sizes and random weights: a pass takes as long with any.

`draft_ms`: of a draft of 2 to 8 tokens behind two committed ones, a row each. `steps`: of a step that verifies the
tokens of a draft and makes the next one. Times are CPU time of one thread, of several threads
elapsed time, the least over rounds in turn, at position 200; before each call other memory is read.

`over_off` is that of the best number of tokens. It follows from the times of steps and from the acceptance of a
token whose predecessors were accepted, which is *given*: .755 on chats and .875 on code, as published for DSpark
of Qwen3-4B in 16 bits (arXiv 2607.05147), and .66 and .80, as assumed of a target in 4 bits.
"""

import itertools
import json
import tempfile
import time
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.runner import about, command_line, in_turn, numbers, write_json
from faser.config.environment import cache_dir
from faser.config.speculation import DSPARK
from faser.engine.checkpoints.blocks import read_block_spec
from faser.engine.checkpoints.families.architecture import AttentionSpec, DecoderSpec
from faser.engine.checkpoints.files import read_model_config
from faser.engine.contract.plan import SequenceRows, StepRows
from faser.engine.execution.drafting.block_loop import BlockLoop, BlockRunner
from faser.engine.execution.drafting.block_weights import load_block
from faser.engine.execution.drafting.head_memory import HiddenStates
from faser.engine.execution.drafting.head_tensors import EMBEDDING, HEAD, block_shapes
from faser.engine.execution.drafting.loop import DraftInput
from faser.engine.execution.drafting.samplers import GreedyDraftSampler
from faser.engine.execution.models.decoder import Decoder
from faser.engine.execution.models.loader import load_decoder
from faser.engine.execution.runner.batch import BlockTable
from faser.engine.execution.runner.runner import Runner
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import library_path
from faser.kernels.interface.kv_cache import KvShape

ROWS = (2, 3, 4, 6, 8)  # of a block: tokens of a draft
ACCEPTANCE = {"chat": 0.755, "code": 0.875, "chat, 4-bit target": 0.66, "code, 4-bit target": 0.8}
BLOCK, PLACE, COMMITTED = 8, 200, 2
CACHE_BLOCK, CACHE_BLOCKS = 16, 14  # of a sequence: room for PLACE and a draft
OTHER_MEMORY = 128 << 20
ONE_CALL, BY_OPERATIONS = "one call", "by operations"


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--states", type=int, default=5, help="layers of the model that the drafter reads")
    parser.add_argument("--rank", type=int, default=256, help="of the correction")
    parser.add_argument("--vocabulary", type=int, default=32_768, help="tokens that the drafter chooses from")
    parser.add_argument("--quantization", choices=("none", "int8", "int4"), default="int4", help="of the drafter")
    parser.add_argument("--sequences", type=numbers, default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        torch.set_num_threads(1)
        bench = Bench(Path(folder), options)
        result = {
            **about("benchmarks.speculation.block_rows"),
            "model_bytes": bench.decoder.weight_bytes,
            "drafter_bytes": bench.drafter_bytes,
            "given_acceptance": ACCEPTANCE,
            "draft_ms": draft_times(bench, options.sequences, options.rounds),
            "steps": step_times(bench, options.sequences, options.rounds),
        }
    write_json(options.out, result, show=True)


class Bench:
    """A model, a drafter, and sequences that all stand at the same position."""

    def __init__(self, folder: Path, options: Any) -> None:
        self._most = max(options.sequences)
        most_rows = self._most * (BLOCK + COMMITTED)
        backend = NativeBackend(library_path(cache_dir=cache_dir() / "kernels"), num_threads=options.threads)
        self._clock = time.process_time if options.threads == 1 else time.perf_counter
        num_layers = read_model_config(options.model).spec.num_layers
        read = tuple(1 + place * (num_layers - 3) // max(options.states - 1, 1) for place in range(options.states))
        self.decoder = self._load(options.model, backend, most_rows, read)
        spec, dtype = self.decoder.spec, self.decoder.dtype
        write_drafter(folder, spec, read, options.layers, options.rank)
        ids = torch.arange(options.vocabulary) if options.vocabulary < spec.vocab_size else None
        self.model = load_block(
            folder,
            read_block_spec(folder, spec, DSPARK),
            self.decoder,
            backend,
            max_positions=512,
            max_rows=most_rows,
            max_logit_rows=self._most * BLOCK,
            quantization=None if options.quantization == "none" else options.quantization,
            draft_ids=ids,
        )
        self.drafter_bytes = self.model.weight_bytes
        self._sampling, self._table = backend.sampling_kernels, BlockTable(self._most, CACHE_BLOCKS)
        for slot in range(self._most):
            self._table.append(slot, tuple(range(CACHE_BLOCKS * slot, CACHE_BLOCKS * (slot + 1))))

        def cache(heads: tuple[tuple[int, int], ...]) -> KvShape:
            blocks = CACHE_BLOCKS * self._most
            return KvShape(heads=heads, num_blocks=blocks, block_size=CACHE_BLOCK, dtype=dtype)

        self._target = Runner(self.decoder, backend, cache(spec.kv_heads))
        width = self.model.spec.states_size
        states = torch.zeros(most_rows, width, dtype=dtype)
        runner = BlockRunner(
            self.model,
            backend,
            cache(self.model.spec.decoder.kv_heads),
            states=states,
            vocab_size=spec.vocab_size,
        )
        ring = HiddenStates(
            num_slots=self._most, num_rows=most_rows, width=width, dtype=dtype, device=torch.device("cpu")
        )
        for slot in range(self._most):
            ring.start(slot)
            known = SequenceRows(slot=slot, start=0, token_ids=(7,) * COMMITTED, new_blocks=(), samples=True)
            ring.take_in(StepRows.of(known), [0], torch.randn(COMMITTED, width).to(dtype), [1])
        greedy = GreedyDraftSampler(self._sampling)
        self._loops = {
            way: BlockLoop(runner, self._table, ring, greedy, max_rows=most_rows, predicts=predicts)
            for way, predicts in ((ONE_CALL, greedy), (BY_OPERATIONS, None))
        }
        self._ring, self._other = ring, torch.zeros(OTHER_MEMORY, dtype=torch.uint8)

    def _load(self, path: Path, backend: NativeBackend, max_rows: int, read: tuple[int, ...]) -> Decoder:
        return load_decoder(
            path,
            backend,
            torch.bfloat16,
            max_model_len=512,
            max_rows=max_rows,
            state_layers=read,
            progress=lambda *_: None,
        )

    def draft(self, count: int, tokens: int, way: str) -> None:
        """Draft the given number of tokens for each of the given number of sequences."""
        inputs = [
            DraftInput(
                slot=slot,
                start=PLACE,
                token_ids=array("i", (7, 8)),
                max_tokens=tokens,
                states=self._ring.pieces(slot, 0),
            )
            for slot in range(count)
        ]
        self._loops[way].draft(inputs, None)

    def step(self, count: int, tokens: int) -> None:
        """Verify drafts of the given number of tokens and draft anew; 0 tokens: a step without drafts."""
        rows = np.full(count, tokens + 1, dtype=np.int32)
        starts = np.full(count, PLACE, dtype=np.int32)
        batch = self._table.lay_out([*range(count)], starts, rows, np.arange(count * (tokens + 1)) % 1000)
        self._target.forward(batch)
        self._sampling.best(self._target.logits(np.arange(batch.num_rows)))
        if tokens:
            self.draft(count, tokens, ONE_CALL)

    def seconds(self, call: Callable[[], object]) -> float:
        """Time of a call after other memory has been read."""
        self._other.add_(1)
        began_s = self._clock()
        call()
        return self._clock() - began_s


def draft_times(bench: Bench, sequences: list[int], rounds: int) -> list[dict[str, Any]]:
    arms = [*itertools.product(sequences, ROWS, (ONE_CALL, BY_OPERATIONS))]
    least: dict[Any, float] = dict.fromkeys(arms, float("inf"))
    for number in range(rounds):
        for arm in in_turn(arms, number):
            least[arm] = min(least[arm], bench.seconds(partial(bench.draft, *arm)))
    return [
        {"sequences": count, "rows": rows}
        | {way: round(1e3 * least[count, rows, way], 3) for way in (ONE_CALL, BY_OPERATIONS)}
        for count, rows in itertools.product(sequences, ROWS)
    ]


def step_times(bench: Bench, sequences: list[int], rounds: int) -> list[dict[str, Any]]:
    arms = [*itertools.product(sequences, (0, 1, *ROWS))]
    least: dict[Any, float] = dict.fromkeys(arms, float("inf"))
    for number in range(max(3, rounds // 2)):
        for arm in in_turn(arms, number):
            least[arm] = min(least[arm], bench.seconds(partial(bench.step, *arm)))
    cells = []
    for count in sequences:
        over_off = {}
        for profile, rate in ACCEPTANCE.items():
            gains = {
                tokens: sum(rate**place for place in range(tokens + 1)) * least[count, 0] / least[count, tokens]
                for tokens in (1, *ROWS)
            }
            best = max(gains, key=gains.__getitem__)
            over_off[profile] = {"tokens": best, "over_off": round(gains[best], 3)}
        step_ms = {str(tokens): round(1e3 * least[count, tokens], 2) for tokens in (0, 1, *ROWS)}
        cells.append({"sequences": count, "step_ms_by_tokens": step_ms, "expected": over_off})
    return cells


def write_drafter(folder: Path, target: DecoderSpec, read: tuple[int, ...], layers: int, rank: int) -> None:
    """A DSpark with layers of the target's sizes, without embedding and head."""
    attention = target.layers[0].attention
    assert isinstance(attention, AttentionSpec), "layers with attention are copied"
    config = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.inner_size,
        "num_hidden_layers": layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "block_size": BLOCK,
        "mask_token_id": 5,
        "target_layer_ids": [each - 1 for each in read],
        "markov_rank": rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    spec = read_block_spec(folder, target, DSPARK)
    shapes = block_shapes(spec, has_mask=False)
    generator = torch.Generator().manual_seed(0)
    save_file(
        {
            name: torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
            for name, shape in shapes.items()
            if name not in (EMBEDDING, HEAD)
        },
        folder / "model.safetensors",
    )


if __name__ == "__main__":
    main()
