"""Cost of a step on the host: steps of a tiny model, in which Python is most of the time, in two checkouts.

    python -m benchmarks.speed.host_time BASE_CHECKOUT OUT.json [--rounds 4] [--blocks 12] [--steps 20]

A Llama of two layers and 64 channels, one thread, so the model takes little of the time: without speculation, with
drafts from text, and with itself as the draft model. The checkouts take turns: benchmarks/speed/checkouts.
"""

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.runner import about, git_commit, write_json
from benchmarks.speed.checkouts import compare, options_of

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, VOCAB = 2, 64, 128, 4, 2, 128
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
RUN = """
from pathlib import Path
from faser.engine.build import build_engine
from faser.types import Request, SamplingParams
try:
    from faser.config.engine import EngineConfig
except ImportError:  # a version with the modules' first places
    from faser.config import EngineConfig

model = Path(ARGUMENTS[0])
SPECULATION = {
    "off": {"policy": "off"},
    "text": {"method": "ngram", "policy": "fixed", "num_speculative_tokens": 3},
    "draft_model": {"method": "draft_model", "model": str(model), "policy": "fixed", "num_speculative_tokens": 2},
}
for name, speculation in SPECULATION.items():
    config = EngineConfig(
        speculative_config=speculation, dtype="float32", max_num_seqs=32, num_threads=1, kv_cache_memory=64 * 2**20
    )
    built = build_engine(config, model, lambda *_: None)
    engine = built[0] if isinstance(built, tuple) else built.engine
    for count, temperature in ((1, 0.0), (16, 0.0), (16, 0.8)):
        for i in range(count):
            prompt = tuple((3 + 7 * j + i) % 90 for j in range(24))
            sampling = SamplingParams(temperature=temperature, seed=i, max_tokens=None, ignore_eos=True)
            request_id = f"{count}/{temperature}/{i}"
            engine.add(Request(request_id=request_id, prompt_token_ids=prompt, sampling=sampling, arrival_s=i))
        for _ in range(20):
            engine.step()
        measure(f"{name}, {count} at once, temperature {temperature:g}", engine.step)
        assert engine.has_work(), "the context is too short for this number of steps"
        for i in range(count):
            engine.abort(f"{count}/{temperature}/{i}")
        engine.step()
"""


def main() -> None:
    options = options_of(__doc__, rounds=4, blocks=12, steps=20).parse_args()
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory))
        found = compare(RUN, options, directory)
    write_json(options.out, {**about("benchmarks.speed.host_time"), "base": git_commit(options.base), "ms": found})
    print(json.dumps(found, indent=2))


def write_model(directory: Path) -> None:
    """The tiny model as a checkpoint of seeded random weights, without a tokenizer."""
    kv = HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.input_layernorm.weight": (HIDDEN,),
            f"{at}.post_attention_layernorm.weight": (HIDDEN,),
            f"{at}.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            f"{at}.self_attn.k_proj.weight": (kv, HIDDEN),
            f"{at}.self_attn.v_proj.weight": (kv, HIDDEN),
            f"{at}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{at}.mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{at}.mlp.up_proj.weight": (INNER, HIDDEN),
            f"{at}.mlp.down_proj.weight": (HIDDEN, INNER),
        }
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: ("norm" in name) + 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()
    }
    (directory / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
