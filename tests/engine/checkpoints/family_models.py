"""Tiny models of any family, made by transformers from a seed and saved as it saves them."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def write_family_model(directory: Path, model_type: str, fields: dict[str, Any]) -> Any:
    """Returns the model, in float32. fields: of its config, over the common ones."""
    common = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = AutoConfig.for_model(model_type, **(common | fields))
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    shake_norms(model)
    model.save_pretrained(directory)
    return model


@torch.no_grad()
def shake_norms(model: torch.nn.Module) -> None:
    """Norms and biases, made as ones and zeros, would hide mistakes; so would gates that no clamp reaches."""
    for name, parameter in model.named_parameters():
        if name.endswith(("gate_up_proj_bias", "sinks")):
            parameter.add_(3 * torch.randn_like(parameter))
        elif "norm" in name or name.endswith("bias"):
            parameter.add_(0.3 * torch.randn_like(parameter))
