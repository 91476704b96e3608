"""Times drafts of an MTP layer: one native call against passes from Python, by rows of the vocabulary.

    python -m benchmarks speculation.mtp_thin MODEL.gguf OUT.json [--rounds 40] [--steps 40] [--brief]

MODEL.gguf: of benchmarks.models.random_gguf with --mtp. `draft_ms`: of one draft of one sequence at position 200,
1 to 4 tokens; before each draft other memory is read, as a step of the model does. `decoding`: a step of one
sequence that verifies draft_tokens tokens, in an engine. Times are CPU time of one thread, the least
over rounds in turn, so that other programs on the machine count little.

Tokens a step follow from the survival of drafts by position that was published for mixed text (ml-explore/mlx-lm,
pull request 990): times are measured, acceptance is given. With 32,768 rows it is lower, by .944 a position: the
share of English text that they cover.

--brief: neither all rows nor passes from Python, and one engine after the other, for larger models.
"""

import itertools
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.runner import about, command_line, in_turn, write_json
from faser.config.engine import EngineConfig
from faser.config.environment import cache_dir
from faser.engine.build import build
from faser.engine.checkpoints.heads import read_mtp_spec
from faser.engine.contract.plan import SequenceRows, StepRows
from faser.engine.contract.step_times import StepTimes
from faser.engine.engine import Engine
from faser.engine.execution.drafting.head import HeadLoop, HeadRunner
from faser.engine.execution.drafting.head_memory import HiddenStates
from faser.engine.execution.drafting.loop import DraftInput
from faser.engine.execution.drafting.mtp import load_mtp
from faser.engine.execution.drafting.samplers import DraftVocabularySampler, GreedyDraftSampler
from faser.engine.execution.models.decoder import Decoder
from faser.engine.execution.models.loader import load_decoder
from faser.engine.execution.runner.batch import BlockTable
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import library_path
from faser.kernels.interface.kv_cache import KvShape
from faser.types import Request, SamplingParams

ROWS = (8_192, 16_384, 32_768, 65_536, None)  # of the vocabulary; None: all
PLACE, MOST = 200, 4
OTHER_MEMORY = 128 << 20
SURVIVAL = (0.74, 0.48, 0.29)
THIN, COVERED = 32_768, 0.944
STEP_TIMES = StepTimes.proportional(step_s=2e-2, pass_s=1e-3, text_s=1e-6)  # policies here do not ask
PROMPT, WARM_UP = 32, 5


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=40, help="of each engine")
    parser.add_argument("--brief", action="store_true")
    options = parser.parse_args()
    result = {
        **about("speculation.mtp_thin"),
        "draft_ms": _draft_times(options.model, options.rounds, brief=options.brief),
        "decoding": _decoding(options.model, options.steps, brief=options.brief),
    }
    write_json(options.out, result, show=True)


def _draft_times(path: Path, rounds: int, *, brief: bool) -> list[dict[str, Any]]:
    """A cell by rows and way: milliseconds of 1, 2, 3 and 4 tokens."""
    backend = NativeBackend(library_path(cache_dir=cache_dir() / "kernels"), num_threads=1)
    decoder = load_decoder(path, backend, torch.bfloat16, max_model_len=256, max_rows=8, progress=lambda *_: None)
    arms = {
        (rows, way): _drafts(path, decoder, backend, rows, in_one_call=way == "one call")
        for rows, way in itertools.product(
            ROWS[: 4 if brief else 5], ("one call", "pass by pass")[: 1 if brief else 2]
        )
    }
    calls = [(arm, count) for arm in arms for count in range(1, MOST + 1)]
    seconds: dict[Any, list[float]] = {call: [] for call in calls}
    other = torch.zeros(OTHER_MEMORY, dtype=torch.uint8)
    for number in range(rounds + 1):
        for arm, count in in_turn(calls, number):
            other.add_(1)
            began_s = time.process_time()
            arms[arm](count)
            if number > 0:
                seconds[arm, count].append(time.process_time() - began_s)
    return [
        {
            "rows": arm[0] or decoder.spec.vocab_size,
            "way": arm[1],
            "ms": [round(1e3 * _least(seconds[arm, count]), 2) for count in range(1, MOST + 1)],
        }
        for arm in arms
    ]


def _drafts(
    path: Path, decoder: Decoder, backend: NativeBackend, rows: int | None, *, in_one_call: bool
) -> Callable[[int], object]:
    """Drafts that many tokens after one committed token, always the same."""
    spec = read_mtp_spec(path, decoder.spec)
    assert spec is not None, f"{path} has no MTP layer"
    ids = None if rows is None else torch.arange(rows)
    head = load_mtp(path, spec, decoder, backend, max_positions=256, max_rows=8, max_logit_rows=1, draft_ids=ids)
    width, dtype = spec.states_size, decoder.dtype
    shape = KvShape(heads=spec.decoder.kv_heads, num_blocks=16, block_size=16, dtype=dtype)
    vocab_size = decoder.spec.vocab_size
    runner = HeadRunner(head, backend, shape, states=torch.zeros(8, width, dtype=dtype), vocab_size=vocab_size)
    table = BlockTable(1, 16)
    table.append(0, tuple(range(16)))
    ring = HiddenStates(num_slots=1, num_rows=8, width=width, dtype=dtype, device=torch.device("cpu"))
    ring.start(0)
    known = SequenceRows(slot=0, start=0, token_ids=(7,), new_blocks=(), samples=True)
    ring.take_in(StepRows.of(known), [0], torch.randn(1, width).to(dtype), [1])
    greedy = GreedyDraftSampler(backend.sampling_kernels)
    sampler = greedy if ids is None else DraftVocabularySampler(greedy, ids, vocab_size)
    loop = HeadLoop(runner, table, ring, sampler, max_rows=8, predicts=greedy if in_one_call else None)
    states = ring.pieces(0, 0)
    line = DraftInput(slot=0, start=PLACE, token_ids=array("i", (7,)), max_tokens=MOST, states=states)
    return lambda count: loop.draft([replace(line, max_tokens=count)], None)


def _decoding(path: Path, steps: int, *, brief: bool) -> list[dict[str, Any]]:
    """A cell by rows of the vocabulary and draft tokens. over_off: tokens a second over those without drafts."""
    arms: dict[tuple[int | None, int], dict[str, Any]] = {(None, 0): {"policy": "off"}}
    for rows, count in itertools.product((THIN,) if brief else (None, THIN), range(1, len(SURVIVAL) + 1)):
        fixed = {"policy": "fixed", "method": "mtp", "num_speculative_tokens": count}
        arms[rows, count] = fixed | {"draft_vocab_size": rows or 1 << 24}
    seconds: dict[Any, list[float]] = {arm: [] for arm in arms}
    for some in [[arm] for arm in arms] if brief else [list(arms)]:
        engines = {arm: _engine(path, arms[arm]) for arm in some}
        for number in range(steps):
            for arm in in_turn(some, number):
                began_s = time.process_time()
                engines[arm].step()
                seconds[arm].append(time.process_time() - began_s)
    cells = []
    for rows, count in arms:
        covered = COVERED if rows == THIN else 1.0
        tokens = 1 + sum(survival * covered**place for place, survival in enumerate(SURVIVAL[:count], 1))
        step_s = _least(seconds[rows, count])
        cells.append(
            {
                "rows": rows or "all",
                "draft_tokens": count,
                "step_ms": round(1e3 * step_s, 2),
                "tokens_per_step": round(tokens, 3),
                "over_off": round(tokens / step_s * _least(seconds[None, 0]), 3),
            }
        )
    return cells


def _engine(path: Path, speculation: dict[str, Any]) -> Engine:
    """It decodes one sequence."""
    config = EngineConfig(
        max_model_len=512,
        max_num_seqs=1,
        num_threads=1,
        kv_cache_memory=256 << 20,
        speculative_config=speculation,
    )
    engine = build(config, path, lambda *_: None, step_times=STEP_TIMES).engine
    prompt = tuple(1000 + 7 * place for place in range(PROMPT))
    sampling = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    engine.add(Request(request_id="0", prompt_token_ids=prompt, sampling=sampling, arrival_s=0.0))
    for _ in range(WARM_UP):
        engine.step()
    return engine


def _least(seconds: Sequence[float]) -> float:
    return min(seconds)
