"""Keys and methods of the speculative config of vLLM that FASER does not have, with the reason for each.

FASER knows them by name, so that an operator who comes from vLLM gets an answer to each of them.
"""

from dataclasses import dataclass
from typing import Any

from faser.config.refused_heads import REFUSED_HEADS
from faser.config.speculation import AUTO


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignKey:
    """A key that FASER does not have. neutral: values that ask for nothing; null always does.

    only_speed: any other value is accepted with a warning, since it could only change speed; else it is refused.
    """

    reason: str
    neutral: tuple[Any, ...] = ()
    instead: str = ""
    only_speed: bool = False

    def asks_nothing(self, value: Any) -> bool:
        return any(value == neutral and type(value) is type(neutral) for neutral in self.neutral)


_OLDER = "it belongs to older versions"

FOREIGN_KEYS: dict[str, ForeignKey] = {
    "code_revision": ForeignKey(reason="no code of a checkpoint is run"),
    "quantization": ForeignKey(reason="weights are computed as they are, or dequantised (GGUF)"),
    "kv_cache_dtype": ForeignKey(reason="it is the target's: --kv-cache-dtype", neutral=(AUTO,)),
    "draft_load_config": ForeignKey(reason="how to load follows from the files", neutral=({},)),
    "hf_overrides": ForeignKey(reason="a checkpoint is served as it is", neutral=({},)),
    "draft_tensor_parallel_size": ForeignKey(reason="a model runs on one device", neutral=(1,), instead="1"),
    "use_heterogeneous_vocab": ForeignKey(
        reason="drafter and model must share a vocabulary", neutral=(False,), instead="method 'suffix'"
    ),
    "parallel_drafting": ForeignKey(reason="draft models draft token by token", neutral=(False,)),
    "attention_backend": ForeignKey(reason="it follows from --backend", neutral=(AUTO,), instead="--backend"),
    "moe_backend": ForeignKey(reason="it follows from --backend", neutral=(AUTO,), instead="--backend"),
    "speculative_token_tree": ForeignKey(reason="drafts are chains, not trees"),
    "synthetic_acceptance_length": ForeignKey(
        reason="an acceptance is given for each position", instead="'synthetic_acceptance_rates'"
    ),
    "disable_by_batch_size": ForeignKey(
        reason=_OLDER,
        neutral=(0,),
        instead='{"policy": "faser"}, which stops drafting where it does not pay, '
        'or {"num_speculative_tokens_per_batch_size": [[1, 16, 4], [17, 4096, 0]]}',
    ),
    "speculative_disable_by_batch_size": ForeignKey(reason=_OLDER, neutral=(0,), instead='{"policy": "faser"}'),
    "suffix_decoding_max_tree_depth": ForeignKey(
        reason="suffix lookup compares up to 24 tokens", neutral=(24,), only_speed=True
    ),
    "suffix_decoding_max_spec_factor": ForeignKey(
        reason="a suffix draft is no longer than its match", neutral=(1, 1.0), only_speed=True
    ),
    "suffix_decoding_min_token_prob": ForeignKey(
        reason="a suffix draft ends where the next token followed in less than a tenth of the matches",
        neutral=(0.1,),
        only_speed=True,
    ),
    "enforce_eager": ForeignKey(reason="--enforce-eager holds for both models", neutral=(False,), only_speed=True),
    "use_local_argmax_reduction": ForeignKey(
        reason="a model runs on one device", neutral=(False,), only_speed=True
    ),
    "disable_padded_drafter_batch": ForeignKey(
        reason="drafts are never padded", neutral=(False,), only_speed=True
    ),
}

FOREIGN_METHODS: dict[str, str] = {
    **{
        method: REFUSED_HEADS[method]
        for method in ("mtp", "mlp_speculator", "dflash", "dspark", "eagle", "medusa")
    },
    "custom_class": "no code of the operator's runs in the engine",
    "extract_hidden_states": "hidden states are not handed out",
}
REMOVED_METHODS: dict[str, str] = {
    "layer_skip": "drafts of the model's own first layers did not pay (docs/speculation.md)",
}
OLD_REJECTION_METHODS = ("strict", "probabilistic", "rejection_sampler", "typical_acceptance_sampler")
