"""Tiny checkpoints made from a seed: a Llama of two layers and a byte-level tokenizer, as files on disk.

Everything a model directory holds, small enough to be built in a moment; nothing is downloaded.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 512
BOS, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
EOS_TOKEN_ID = 2  # IM_END
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_WORDS = (
    "the quick brown fox jumps over the lazy dog while seven wizards quietly judge my vow of speculation "
    "a model reads a prompt and answers token by token until the end of its turn, and then it stops.\n"
    "def add(first, second):\n    return first + second\n\nfor number in range(10):\n    print(number)\n"
    "What is the capital of France? The capital of France is Paris. Größe, naïve, 你好, 🙂!\n"
)


def tiny_llama_config() -> dict[str, Any]:
    """The config.json of the tiny Llama: grouped heads, tied embedding."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": EOS_TOKEN_ID,
        "torch_dtype": "float32",
    }


def llama_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a Llama checkpoint without biases."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = hidden // config["num_attention_heads"]
    kv = config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}self_attn.q_proj.weight": (hidden, hidden),
            f"{prefix}self_attn.k_proj.weight": (kv, hidden),
            f"{prefix}self_attn.v_proj.weight": (kv, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, hidden),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
            f"{prefix}mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}mlp.up_proj.weight": (inner, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, inner),
        }
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def random_weights(
    shapes: dict[str, tuple[int, ...]], *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Seeded weights, spread widely enough that the logits have no near ties; norms lie around 1."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: ((1.0 if "norm" in name else 0.0) + 0.2 * torch.randn(shape, generator=generator)).to(dtype)
        for name, shape in shapes.items()
    }


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")


def write_checkpoint(
    directory: Path, config: dict[str, Any], weights: dict[str, torch.Tensor], name: str = "model.safetensors"
) -> None:
    """config.json and one safetensors file; no tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", config)
    save_file(weights, directory / name, metadata={"format": "pt"})


def tiny_tokenizer() -> Tokenizer:
    """Byte-level BPE of VOCAB_SIZE tokens: any text goes in and comes back unchanged."""
    return Tokenizer.from_str(_trained())


@cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(text, special=True, normalized=False) for text in (BOS, IM_START, IM_END)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=1,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_WORDS] * 2, trainer)
    missing = VOCAB_SIZE - tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([AddedToken(f"<|reserved_{i}|>", special=True) for i in range(missing)])
    return tokenizer.to_str()


def write_tokenizer(directory: Path) -> None:
    """tokenizer.json and a tokenizer_config.json with a ChatML template."""
    directory.mkdir(parents=True, exist_ok=True)
    tiny_tokenizer().save(str(directory / "tokenizer.json"))
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": IM_END,
            "model_max_length": 2048,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def write_tiny_checkpoint(directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """A complete model directory: weights, configuration, tokenizer, chat template, generation defaults."""
    config = tiny_llama_config() | {"torch_dtype": str(dtype).removeprefix("torch.")}
    write_checkpoint(directory, config, random_weights(llama_shapes(config), seed=seed, dtype=dtype))
    write_json(
        directory / "generation_config.json",
        {"bos_token_id": 0, "eos_token_id": [EOS_TOKEN_ID], "temperature": 0.7, "top_p": 0.95, "do_sample": True},
    )
    write_tokenizer(directory)
    return directory
