"""A tiny Gemma 4 and its assistant, made by transformers from a seed, and drafts as transformers computes them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

from tests.checkpoints import VOCAB_SIZE, write_tokenizer
from tests.engine.checkpoints.family_models import shake_norms, write_family_model

_NEAR, _FAR = "sliding_attention", "full_attention"
_HEADS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 48,
    "sliding_window": 13,
    "max_position_embeddings": 256,
}
CENTROIDS = {"use_ordered_embeddings": True, "num_centroids": 16, "centroid_intermediate_top_k": 3}


def write_target(directory: Path, **fields: Any) -> Any:
    """Returns the model, in float32. Its last layers read the keys of earlier ones."""
    own = {
        "num_hidden_layers": 6,
        "layer_types": [_NEAR, _FAR, _NEAR, _NEAR, _NEAR, _FAR],
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "num_kv_shared_layers": 3,
        "pad_token_id": 0,
    }
    model = write_family_model(directory, "gemma4_text", _HEADS | own | fields)
    write_tokenizer(directory)
    return model


def write_assistant(directory: Path, **fields: Any) -> Gemma4AssistantForCausalLM:
    """Returns the model, in float32. fields: of its config; text: of its text_config."""
    text: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "layer_types": [_NEAR, _NEAR, _NEAR, _FAR],
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "initializer_range": 0.2,
        "pad_token_id": 0,
    }
    config = Gemma4AssistantConfig(
        text_config=Gemma4TextConfig(**(_HEADS | text | fields.pop("text", {}))),
        **({"backbone_hidden_size": 64} | fields),
    )
    torch.manual_seed(12)
    # Some versions of transformers refuse a model whose layers all read others' keys, as their assistants' do.
    reads = property(lambda config: ["reuse"] * config.num_hidden_layers)
    with patch.object(Gemma4TextConfig, "kv_sharing_modes", reads):
        model = Gemma4AssistantForCausalLM._from_config(config, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=0.2)
    shake_norms(model)
    if config.use_ordered_embeddings:
        model.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB_SIZE))
    model.save_pretrained(directory)
    return model


@torch.no_grad()
def draft(target: Any, assistant: Any, known: Sequence[int], count: int) -> tuple[list[int], Tensor]:
    """The count tokens that the assistant drafts behind known ones, and their logits, [count, V].

    Local layers get the keys that a local layer of the target sees at the position of the last token.
    """
    at, tokens, found = len(known) - 1, [known[-1]], []
    computed = target(
        torch.tensor([[*known[:-1]]]),
        output_hidden_states=True,
        return_shared_kv_states=True,
        use_cache=True,
    )
    hidden, seen = computed.hidden_states[-1][:, -1:], computed.shared_kv_states
    before = target.config.sliding_window - 1
    seen[_NEAR] = tuple(each[:, :, -before:] for each in seen[_NEAR])
    for _ in range(count):
        embedded = target.get_input_embeddings()(torch.tensor([tokens[-1:]]))
        out = assistant(
            inputs_embeds=torch.cat([embedded, hidden], -1),
            position_ids=torch.tensor([[at]]),
            shared_kv_states=seen,
        )
        hidden = out.last_hidden_state
        found.append(out.logits[0, -1])
        tokens.append(int(found[-1].argmax()))
    return tokens[1:], torch.stack(found)
