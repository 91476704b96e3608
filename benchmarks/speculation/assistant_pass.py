"""Times a pass of a Gemma 4 assistant, by how many sequences draft.

    python -m benchmarks speculation.assistant_pass OUT.json [--width 2560] [--context 512] [--repeats 40]

The assistant has the sizes of those of E2B and E4B (78 M values, 262,144 tokens in 2,048 groups) and random
weights; the target has its width and two layers, which is all that an assistant reads. Medians, in milliseconds,
in bfloat16, of first passes: the norm of the states and the choice of the best token are in it.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.runner import about, write_json
from faser.engine.checkpoints.assistant import assistant_spec
from faser.engine.checkpoints.families import decoder_spec
from faser.engine.checkpoints.heads import read_config
from faser.engine.execution.drafting.assistant import AssistantHead, assistant_shapes, load_assistant
from faser.engine.execution.drafting.head import HeadRunner
from faser.engine.execution.models.decoder import Decoder
from faser.engine.execution.models.loader import load_decoder
from faser.engine.execution.models.tensors import EMBEDDING, Shape, tensor_shapes
from faser.engine.execution.runner.batch import BlockTable
from faser.kernels.factory import make_backend
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.kv_cache import KvShape

SEQUENCES = (1, 4, 16)
BLOCK = 16


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--width", type=int, default=2560, help="of the target's states: 1536 of E2B, 2560 of E4B")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=40)
    wanted = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        ms = measured(Path(folder), wanted.width, wanted.context, wanted.repeats)
    conditions = about("speculation.assistant_pass", arguments)
    write_json(wanted.out, conditions | {"width": wanted.width, "context": wanted.context, "pass_ms": ms})
    print(ms)


def measured(folder: Path, width: int, context: int, repeats: int) -> dict[str, float]:
    """Median milliseconds of a pass, by sequences."""
    write(folder, width)
    torch.set_num_threads(1)  # as the engine does beside native kernels
    backend = make_backend("native", "cpu", num_threads=2, cache_dir=folder / "kernels")
    target = load_decoder(
        folder / "target", backend, torch.bfloat16, max_model_len=2048, max_rows=64, progress=lambda *_: None
    )
    config = read_config(folder / "assistant" / "config.json")
    head = load_assistant(
        folder / "assistant",
        assistant_spec(config, target.spec),
        target,
        backend,
        max_positions=2048,
        max_rows=64,
        max_logit_rows=64,
    )
    return timed(backend, target, head, context, repeats)


def timed(backend: Backend, target: Decoder, head: AssistantHead, context: int, repeats: int) -> dict[str, float]:
    blocks = -(-context // BLOCK)

    def shape(heads: tuple[tuple[int, int], ...]) -> KvShape:
        return KvShape(heads=heads, num_blocks=blocks * max(SEQUENCES), block_size=BLOCK, dtype=torch.bfloat16)

    head.read_from(backend.allocate_kv(shape(target.spec.kv_heads)))
    states = torch.randn(64, target.spec.hidden_size, dtype=torch.bfloat16)
    runner = HeadRunner(
        head, backend, shape(head.spec.decoder.kv_heads), states=states, vocab_size=target.spec.vocab_size
    )
    found = {}
    for count in SEQUENCES:
        table = BlockTable(count, blocks)
        for slot in range(count):
            table.append(slot, tuple(range(slot * blocks, (slot + 1) * blocks)))
        starts = torch.full((count,), context - 1, dtype=torch.int32).numpy()
        ones = torch.ones(count, dtype=torch.int32).numpy()
        batch = table.lay_out([*range(count)], starts, ones, torch.arange(count).numpy())
        seconds = []
        for _ in range(repeats):
            began_s = time.perf_counter()
            with torch.inference_mode():
                runner.logits_of(runner.read(batch, states[:count])).argmax(-1).tolist()
            seconds.append(time.perf_counter() - began_s)
        found[str(count)] = round(1000 * statistics.median(seconds), 3)
    return found


def write(folder: Path, width: int) -> None:
    """Write a target of two layers and an assistant, with random weights."""
    near, far = "sliding_attention", "full_attention"
    common: dict[str, Any] = {
        "model_type": "gemma4_text",
        "num_key_value_heads": 2,
        "num_attention_heads": 4,
        "intermediate_size": 2048,
        "vocab_size": 262_144,
        "hidden_size_per_layer_input": 0,
        "torch_dtype": "bfloat16",
    }
    target = common | {"hidden_size": width, "num_hidden_layers": 2, "layer_types": [near, far]}
    layers = {"hidden_size": 256, "num_hidden_layers": 4, "layer_types": [near, near, near, far]}
    assistant = {
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": width,
        "text_config": common | layers,
        "use_ordered_embeddings": True,
    }
    spec = decoder_spec(target | {"architectures": ["Gemma4ForCausalLM"]})
    drafts = assistant_spec(assistant, spec)
    own = assistant_shapes(drafts) | {EMBEDDING: (spec.vocab_size, drafts.hidden_size)}
    torch.manual_seed(0)
    order = {"masked_embedding.token_ordering": torch.randperm(spec.vocab_size)}
    _save(folder / "target", target | {"architectures": ["Gemma4ForCausalLM"]}, tensor_shapes(spec), {})
    _save(folder / "assistant", assistant, own, order)


def _save(folder: Path, config: dict[str, Any], shapes: Mapping[str, Shape], more: dict[str, Tensor]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: (torch.randn(shape) * 0.02).bfloat16() for name, shape in shapes.items()}
    save_file(weights | more, folder / "model.safetensors")
