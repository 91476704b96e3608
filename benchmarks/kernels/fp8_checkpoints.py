"""Published 8-bit floats on a CPU: quality and speed as int8, in bfloat16, and in the checkpoint's own arithmetic.

    python -m benchmarks kernels.fp8_checkpoints OUT.json [--model MODEL] [--windows 16] [--tokens 256]
        [--rounds 9] [--keep DIR]

The weights of MODEL, by default the embedded one, are written as a checkpoint of 8-bit floats, as Qwen and
DeepSeek publish theirs: one scale for 128 x 128 values. The base of all comparisons is what those values stand
for, in float32. The checkpoint's own arithmetic, which rounds the inputs of products to 8-bit floats too, is the
torch backend's; it is slow, and not timed. Steps of both native arms take turns, round by round; medians are kept.
--keep leaves the checkpoint there.
"""

import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.engines import model_directory
from benchmarks.kernels.low_bit_quality import compare, paged_model, windows
from benchmarks.runner import about, command_line, in_turn, write_json
from faser.engine.execution.models.loader import load_decoder, open_source
from faser.kernels.torch_backend import TorchBackend
from tests.engine.checkpoints.fp8_checkpoints import FP8_BLOCKS, quantised_blocks
from tests.engine.execution.models.paged import PagedModel, Rows

_QUANTIZATIONS = {"bfloat16": "none", "int8": None}
_STEPS = {"1 row": 1, "8 rows": 8}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", help="model directory (default: the embedded model)")
    parser.add_argument("--windows", type=int, default=16, help="of the documents")
    parser.add_argument("--tokens", type=int, default=256, help="of a window")
    parser.add_argument("--rounds", type=int, default=9, help="of timed steps")
    parser.add_argument("--keep", type=Path, help="folder for the checkpoint")
    options = parser.parse_args()
    source = model_directory(options.model)
    with tempfile.TemporaryDirectory() as folder:
        directory = options.keep or Path(folder)
        publish(source, directory)
        texts = list(windows(source, options.windows, options.tokens))
        base = paged_model(directory, options.tokens, "none", torch.float32)
        arms = {
            name: paged_model(directory, options.tokens, quantization, torch.bfloat16)
            for name, quantization in _QUANTIZATIONS.items()
        }
        own = {"as the checkpoint says": own_arithmetic(directory, options.tokens)}
        quality = compare(base, arms | own, texts)
        report = {
            **about("kernels.fp8_checkpoints"),
            "model": source.name,
            "quality": quality,
            "step_ms": timed(arms, options.rounds),
            "weight_bytes": {name: arm.decoder.weight_bytes for name, arm in arms.items()},
        }
    write_json(options.out, report)
    print(json.dumps({key: report[key] for key in ("quality", "step_ms", "weight_bytes")}, indent=1))


def publish(source: Path, directory: Path) -> None:
    """Write the products of a model in 8-bit floats with scales of blocks, all other weights in bfloat16."""
    opened, stored = open_source(source), dict[str, Tensor]()
    directory.mkdir(parents=True, exist_ok=True)
    for name in opened.names():
        weight = opened.get(name).float()
        if name.endswith("_proj.weight"):
            stored[name], stored[f"{name}_scale_inv"] = quantised_blocks(weight, (128, 128))
        else:
            stored[name] = weight.bfloat16()
    save_file(stored, directory / "model.safetensors")
    for each in source.glob("*.json"):
        shutil.copy(each, directory)
    config = json.loads((source / "config.json").read_text("utf-8"))
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": FP8_BLOCKS}))


def own_arithmetic(directory: Path, tokens: int) -> PagedModel:
    backend = TorchBackend()
    decoder = load_decoder(
        directory, backend, torch.float32, max_model_len=tokens, max_rows=tokens, progress=lambda *_: None
    )
    return PagedModel(decoder, backend, block_size=16, max_positions=tokens)


def timed(arms: dict[str, PagedModel], rounds: int) -> dict[str, dict[str, float]]:
    """Return the median of each arm's steps of one sequence, ms, and the ratio of bfloat16 to int8."""
    found: dict[str, dict[str, float]] = {}
    for step, rows in _STEPS.items():
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        for number in range(rounds + 1):
            for name in in_turn(arms, number):
                began_s = time.perf_counter()
                arms[name].step([Rows(sequence=0, start=0, token_ids=range(1, rows + 1))])
                if number:  # the first round touches memory for the first time
                    seconds[name].append(time.perf_counter() - began_s)
        found[step] = {name: round(1000 * statistics.median(each), 2) for name, each in seconds.items()}
        ratios = [one / other for one, other in zip(seconds["bfloat16"], seconds["int8"], strict=True)]
        found[step]["ratio"] = round(statistics.median(ratios), 2)
    return found
