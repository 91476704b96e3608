"""A GGUF file of Muse Glimmer, written as llama.cpp's converter does; the gguf library has no names for it yet.

Planted bugs that this test has caught: the last norm without one taken off; the row order of queries; a window in
layers that attend everywhere.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter

from faser.engine.checkpoints.files import read_model_config
from faser.engine.execution.models.loader import open_source
from tests.engine.checkpoints.gguf.gguf_files import permute
from tests.engine.checkpoints.test_text_halves import make_oracle
from tests.engine.execution.models.paged import load

_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.gate_proj": "attn_gate",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_HEADS = {"attn_q": 4, "attn_k": 2}


@pytest.mark.parametrize("listed", [True, False])
def test_a_file_of_muse_glimmer_is_the_same_model(listed: bool, tmp_path: Path) -> None:
    """listed: windows are given layer by layer, else as a period."""
    oracle = make_oracle("muse-glimmer", tmp_path)
    expected, source = read_model_config(tmp_path).spec, open_source(tmp_path)
    writer = GGUFWriter(tmp_path / "model.gguf", "muse-glimmer")
    writer.add_block_count(8)
    writer.add_context_length(expected.max_position_embeddings)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(expected.inner_size)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(32)
    writer.add_value_length(32)
    writer.add_layer_norm_rms_eps(0.05)
    writer.add_rope_freq_base(1000.0)
    writer.add_sliding_window(13)
    writer.add_sliding_window_pattern([(layer + 1) % 4 != 0 for layer in range(8)] if listed else 4)
    writer.add_final_logit_softcapping(5.0)
    writer.add_logit_scale(0.4)
    writer.add_eos_token_id(2)
    for name in source.names():
        values = np.ascontiguousarray(source.get(name).float().numpy())
        stem = name.removesuffix(".weight")
        if stem in _OUTER:
            writer.add_tensor(f"{_OUTER[stem]}.weight", values)
            continue
        layer, part = stem.removeprefix("model.layers.").split(".", 1)
        stored = _NAMES[part]
        values = values + np.float32(1) if part.endswith("layernorm") else values
        values = permute(values, _HEADS[stored]) if stored in _HEADS else values
        writer.add_tensor(f"blk.{layer}.{stored}.weight", values)
        if stored == "attn_q":
            writer.add_tensor(f"blk.{layer}.attn_q_norm.weight", np.full(32, 3.0, np.float32))
            writer.add_tensor(f"blk.{layer}.attn_k_norm.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_model_config(tmp_path / "model.gguf").spec
    assert [each.attention for each in found.layers] == [each.attention for each in expected.layers]
    logits = load(tmp_path / "model.gguf").prefill(oracle.token_ids, (30,))
    torch.testing.assert_close(logits, oracle.logits, atol=1e-4, rtol=0)
