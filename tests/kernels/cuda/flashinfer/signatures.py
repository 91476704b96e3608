"""What FlashInfer 0.7.4 accepts: the parameters of everything that is called, by name and in order.

A parameter with a default ends in "="; those after "*" are given by name only. One test holds this table against
the installed package; the emulation binds every call to it.
"""

import inspect
from inspect import Parameter, Signature

VERSION = "0.7.4"

SIGNATURES = {
    "BatchPrefillWithPagedKVCacheWrapper.__init__": (
        "self float_workspace_buffer kv_layout= use_cuda_graph= qo_indptr_buf= paged_kv_indptr_buf= "
        "paged_kv_indices_buf= paged_kv_last_page_len_buf= custom_mask_buf= mask_indptr_buf= backend= jit_args= "
        "jit_kwargs= variant_owns_mask= max_total_num_rows="
    ),
    "BatchPrefillWithPagedKVCacheWrapper.plan": (
        "self qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads num_kv_heads "
        "head_dim_qk page_size head_dim_vo= custom_mask= packed_custom_mask= causal= pos_encoding_mode= "
        "use_fp16_qk_reduction= sm_scale= window_left= logits_soft_cap= rope_scale= rope_theta= q_data_type= "
        "kv_data_type= o_data_type= non_blocking= prefix_len_ptr= token_pos_in_items_ptr= token_pos_in_items_len= "
        "max_item_len_ptr= seq_lens= seq_lens_q= block_tables= max_token_per_sequence= max_sequence_kv= "
        "fixed_split_size= disable_split_kv= uniform_q_len= use_token_head_sf="
    ),
    "BatchPrefillWithPagedKVCacheWrapper.run": (
        "self q paged_kv_cache *args q_scale= k_scale= v_scale= out= lse= return_lse= lse_base= lse_layout= "
        "enable_pdl= window_left= sinks= kv_cache_sf= skip_softmax_threshold_scale_factor= use_fp16_softmax= "
        "uses_spcompress="
    ),
    "BatchPrefillWithPagedKVCacheWrapper.reset_workspace_buffer": (
        "self float_workspace_buffer int_workspace_buffer"
    ),
    "BatchDecodeWithPagedKVCacheWrapper.reset_workspace_buffer": (
        "self float_workspace_buffer int_workspace_buffer"
    ),
    "BatchDecodeWithPagedKVCacheWrapper.__init__": (
        "self float_workspace_buffer kv_layout= use_cuda_graph= use_tensor_cores= paged_kv_indptr_buffer= "
        "paged_kv_indices_buffer= paged_kv_last_page_len_buffer= backend= jit_args= jit_kwargs="
    ),
    # plan() takes anything and hands it on to _plan_impl(); this is what that accepts.
    "BatchDecodeWithPagedKVCacheWrapper._plan_impl": (
        "self indptr indices last_page_len num_qo_heads num_kv_heads head_dim page_size * pos_encoding_mode= "
        "window_left= window_right= logits_soft_cap= q_data_type= kv_data_type= o_data_type= data_type= sm_scale= "
        "rope_scale= rope_theta= non_blocking= block_tables= seq_lens= fixed_split_size= disable_split_kv= "
        "q_len_per_req= is_causal= use_token_head_sf="
    ),
    "BatchDecodeWithPagedKVCacheWrapper.run": (
        "self q paged_kv_cache *args q_scale= k_scale= v_scale= out= lse= return_lse= enable_pdl= window_left= "
        "sinks= q_len_per_req= skip_softmax_threshold_scale_factor= kv_cache_sf="
    ),
}


def signature(name: str) -> Signature:
    """The signature that a line of the table describes. Defaults are None, whatever they really are."""
    parameters = []
    by_name_only = False
    for word in SIGNATURES[name].split():
        if word.startswith("*"):
            by_name_only = True
            if word != "*":
                parameters.append(Parameter(word[1:], Parameter.VAR_POSITIONAL))
            continue
        kind = Parameter.KEYWORD_ONLY if by_name_only else Parameter.POSITIONAL_OR_KEYWORD
        default = None if word.endswith("=") else Parameter.empty
        parameters.append(Parameter(word.removesuffix("="), kind, default=default))
    return Signature(parameters)


def described(real: Signature) -> str:
    """A signature as a line of the table."""
    words = []
    is_open = True  # no star yet
    for each in real.parameters.values():
        if each.kind is Parameter.VAR_POSITIONAL:
            words.append(f"*{each.name}")
            is_open = False
            continue
        if each.kind is Parameter.KEYWORD_ONLY and is_open:
            words.append("*")
            is_open = False
        words.append(each.name + ("" if each.default is Parameter.empty else "="))
    return " ".join(words)


def describe(package: object) -> dict[str, str]:
    """Lines of the table, made from a package."""
    found = {}
    for name in SIGNATURES:
        item = package
        for part in name.split("."):
            item = getattr(item, part)
        assert callable(item)
        found[name] = described(inspect.signature(item))
    return found
