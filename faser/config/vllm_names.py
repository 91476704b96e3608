"""Names that FASER does not have and knows: those of vLLM, and those that FASER had once. Data, and what it means.

A value that asks for nothing ("off", "one", the default) is accepted for each of them. A name that can only change
speed or logging is accepted with a warning. Every other one is refused, with the reason and what to use instead.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from faser import __version__


class Support(Enum):
    ACCEPT = "FASER always does what the name asks for"
    WARN = "the name has no effect on answers"
    REFUSE = "the name would change answers, or what is reachable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A flag with its short forms, or a key. neutral: values that ask for nothing; for flags also _ALWAYS_NEUTRAL.

    switch: takes no value. many: takes several values. instead: what to use; VALUE in it is the flag's value.
    origin: which program has it.
    """

    names: tuple[str, ...]
    support: Support
    reason: str
    neutral: tuple[Any, ...] = ()
    switch: bool = False
    many: bool = False
    instead: str = ""
    origin: str = "vLLM"

    @property
    def key(self) -> str:
        return self.names[0].removeprefix("--")

    def answer(self, label: str, value: Any) -> tuple[list[str], list[str]]:
        """(problems, warnings) for a value; both empty when FASER does what it asks for anyway."""
        is_flag = self.names[0].startswith("-")
        neutral = any(value == each and type(value) is type(each) for each in self.neutral)
        if self.support is Support.ACCEPT or neutral:
            return [], []
        if self.support is Support.WARN:
            return [], [f"{label} has no effect: {self.reason}"]
        if is_flag and value.lower() in _ALWAYS_NEUTRAL:
            return [], []
        instead = self.instead.replace(_VALUE, str(value) or _VALUE) if is_flag else self.instead
        given = f": '{value}'" if is_flag and not self.switch else ""
        return [f"{label}{given} {not_supported(self.reason, instead, self.origin)}"], []


def not_supported(reason: str, instead: str, origin: str = "vLLM") -> str:
    """The end of the sentence about a name that is refused."""
    alternative = f"Remove it or use {instead}." if instead else "Remove it."
    return f"is known from {origin} but not supported by FASER {__version__}: {reason}. {alternative}"


def _refuse(names: str, reason: str, **more: Any) -> Foreign:
    return Foreign(names=tuple(names.split()), support=Support.REFUSE, reason=reason, **more)


def _warn(names: str, reason: str, **more: Any) -> Foreign:
    return Foreign(names=tuple(names.split()), support=Support.WARN, reason=reason, **more)


def _accept(names: str, reason: str, **more: Any) -> Foreign:
    return Foreign(names=tuple(names.split()), support=Support.ACCEPT, reason=reason, **more)


def _by_name(*names: Foreign) -> dict[str, Foreign]:
    return {each.key: each for each in names}


_VALUE = "VALUE"  # in Foreign.instead: what the flag was given
_ALWAYS_NEUTRAL = ("none", "null", "off", "false", "")
_ONE = ("1",)

_ONE_DEVICE = "a model runs on one device"
_IN_JSON = "all settings of the drafter are in one JSON object"
_NO_LORA = "this build has no adapters"
_NO_MEDIA = "this build serves text only"
_KV_SCALES = "8-bit keys and values are stored with a scale of one"
_GRAPHS = "CUDA graphs are captured for the sizes of --cudagraph-capture-sizes, and for every length"
_NO_ADMIN = "this build has no admin routes"
_SNAPSHOTS = "where states are kept for other prompts follows from the prompts, within --state-snapshot-memory"
_OLDER = "it belongs to older versions"

FOREIGN_FLAGS: tuple[Foreign, ...] = (
    _refuse("--pipeline-parallel-size -pp", _ONE_DEVICE, neutral=_ONE),
    _refuse("--decode-context-parallel-size -dcp", _ONE_DEVICE, neutral=_ONE),
    _refuse("--enable-expert-parallel -ep", _ONE_DEVICE, switch=True),
    _refuse("--distributed-executor-backend", _ONE_DEVICE, neutral=("mp", "uni")),
    _refuse("--api-server-count -asc", "one process answers HTTP", neutral=_ONE, instead="several servers"),
    _refuse("--headless", "every server answers HTTP", switch=True),
    _refuse("--grpc", "it answers HTTP only", switch=True),
    _refuse("--load-format", "it follows from the files", neutral=("auto", "safetensors", "gguf")),
    _refuse("--download-dir", "it is set in the environment", instead="the variable FASER_CACHE_DIR"),
    _refuse("--hf-overrides", "a checkpoint is served as it is", neutral=("{}",)),
    _refuse("--tokenizer-mode", "it follows from the files", neutral=("auto", "hf")),
    _refuse("--tokenizer-revision", "it is the model's", instead="--revision"),
    _refuse("--code-revision", "no code of a checkpoint is run"),
    _refuse("--runner", "it generates text only", neutral=("auto", "generate")),
    _refuse("--task", "it generates text only", neutral=("auto", "generate")),
    _refuse("--convert", "it generates text only", neutral=("auto",)),
    _refuse("--calculate-kv-scales", _KV_SCALES, switch=True),
    _refuse("--cpu-offload-gb", "there is no second memory to move weights to", neutral=("0", "0.0")),
    _refuse("--num-gpu-blocks-override", "blocks follow from the memory", instead="--kv-cache-memory"),
    _refuse("--speculative-model", _IN_JSON, instead=f'--speculative-config \'{{"model": "{_VALUE}"}}\''),
    _refuse(
        "--num-speculative-tokens",
        _IN_JSON,
        neutral=("0",),
        instead=f"--speculative-config '{{\"num_speculative_tokens\": {_VALUE}}}'",
    ),
    _refuse("--enable-lora", _NO_LORA, switch=True),
    _refuse("--lora-modules", _NO_LORA),
    _refuse("--max-lora-rank", _NO_LORA),
    _refuse("--max-loras", _NO_LORA),
    _refuse("--tool-parser-plugin", "no code of the operator's runs in the server", instead="--tool-call-parser"),
    _refuse(
        "--guided-decoding-backend",
        "its settings are in one JSON object",
        neutral=("auto", "guidance"),
        instead='--structured-outputs-config \'{"backend": "auto"}\'',
    ),
    _refuse("--limit-mm-per-prompt", _NO_MEDIA, neutral=("{}",)),
    _refuse("--enable-prompt-embeds", "prompts are text or token ids", switch=True),
    _refuse("--logits-processors", "no code of the operator's runs in the engine"),
    _refuse("--middleware", "no code of the operator's runs in the server", instead="a proxy"),
    _refuse("--chat-template-content-format", "it follows from the template", neutral=("auto",)),
    _refuse("--response-role", "answers have the role assistant", neutral=("assistant",)),
    _refuse("--return-tokens-as-token-ids", "log probabilities name tokens by their text", switch=True),
    _refuse("--stream-interval", "every step is sent", neutral=_ONE),
    _refuse("--max-num-queued-tokens", "the queue is limited in sequences", instead="--max-num-queued-reqs"),
    _refuse("--uds", "it listens on TCP", instead="--host and --port"),
    _refuse("--ssl-ca-certs", "client certificates are not checked", instead="a proxy"),
    _refuse("--ssl-cert-reqs", "client certificates are not checked", neutral=("0",), instead="a proxy"),
    _refuse("--enable-ssl-refresh", "certificates are read again on SIGHUP", switch=True, instead="SIGHUP"),
    _refuse("--enable-tokenizer-info-endpoint", "this build has no /tokenizer_info", switch=True),
    _refuse("--enable-sleep-mode", _NO_ADMIN, switch=True),
    _refuse("--admin-api-key", _NO_ADMIN),
    _refuse("--metrics-port", "metrics share the server's port", instead="--metrics-require-key"),
    _refuse("--legacy-vllm-metrics", "only current metric names are exported", switch=True),
    _refuse("--kv-transfer-config", "the KV cache stays in one process", neutral=("{}",)),
    _refuse(
        "--draft-share",
        "of the shares that a partition offers, drafting gets the best one, by measured step times",
        origin="an earlier version",
    ),
    _warn("--enable-server-load-tracking", "/load always says how many requests are answered", switch=True),
    _warn("--trust-remote-code", "no code of a checkpoint is ever run", switch=True),
    _warn("--compilation-config -cc -O", "torch compiles nothing here"),
    _warn("--cuda-graph-sizes", _GRAPHS, many=True),
    _warn("--max-cudagraph-capture-size", _GRAPHS),
    _warn("--max-seq-len-to-capture", _GRAPHS),
    _warn("--attention-backend", "the backend follows from --backend"),
    _warn("--enable-chunked-prefill", "long prompts are always computed in pieces", switch=True),
    _warn("--max-num-partial-prefills", "prompts share a step's tokens as they come"),
    _warn("--swap-space", "preempted sequences are computed again"),
    _warn("--max-parallel-loading-workers", "weights are read by one process"),
    _warn("--disable-custom-all-reduce", _ONE_DEVICE, switch=True),
    _warn("--disable-cascade-attn", "there is no such kernel", switch=True),
    _warn("--prefix-caching-hash-algo", "blocks are found by their tokens"),
    _warn("--mamba-cache-mode", _SNAPSHOTS),
    _warn("--mamba-block-size", _SNAPSHOTS),
    _warn("--disable-frontend-multiprocessing", "the engine always has its own process", switch=True),
    _warn("--collect-detailed-traces", "every span has the times of queue, prefill and decode", many=True),
    _warn("--log-config-file", "lines are text or JSON, by --log-format"),
    _warn("--disable-log-stats", "statistics are in /metrics, not in the log", switch=True),
    _warn("--enable-log-requests", "prompts are not logged", switch=True),
    _warn("--disable-log-requests", "prompts are not logged", switch=True),
    _warn("--max-log-len", "prompts are not logged"),
    _warn("--kv-cache-metrics", "there are no such metrics", switch=True),
    _accept("--enable-prompt-tokens-details", "usage always has them", switch=True),
    _accept("--enable-request-id-headers", "X-Request-Id is always echoed", switch=True),
)

# Keys of --speculative-config.
FOREIGN_KEYS: dict[str, Foreign] = _by_name(
    _refuse("code_revision", "no code of a checkpoint is run"),
    _refuse("quantization", "weights are computed as they are, or dequantised (GGUF)"),
    _refuse("kv_cache_dtype", "it is the target's: --kv-cache-dtype", neutral=("auto",)),
    _refuse("draft_load_config", "how to load follows from the files", neutral=({},)),
    _refuse("hf_overrides", "a checkpoint is served as it is", neutral=({},)),
    _refuse("draft_tensor_parallel_size", _ONE_DEVICE, neutral=(1,), instead="1"),
    _refuse("tensor_parallel_size", "it does not apply to the drafter", instead="'draft_tensor_parallel_size' 1"),
    _refuse(
        "use_heterogeneous_vocab",
        "drafter and model must share a vocabulary",
        neutral=(False,),
        instead="method 'suffix'",
    ),
    _refuse("parallel_drafting", "draft models draft token by token", neutral=(False,)),
    _refuse("attention_backend", "it follows from --backend", neutral=("auto",), instead="--backend"),
    _refuse("moe_backend", "it follows from --backend", neutral=("auto",), instead="--backend"),
    _refuse("speculative_token_tree", "drafts are chains, not trees"),
    _refuse(
        "synthetic_acceptance_length",
        "an acceptance is given for each position",
        instead="'synthetic_acceptance_rates'",
    ),
    _refuse(
        "disable_by_batch_size",
        _OLDER,
        neutral=(0,),
        instead='{"policy": "faser"}, which stops drafting where it does not pay, '
        'or {"num_speculative_tokens_per_batch_size": [[1, 16, 4], [17, 4096, 0]]}',
    ),
    _refuse("speculative_disable_by_batch_size", _OLDER, neutral=(0,), instead='{"policy": "faser"}'),
    _warn("suffix_decoding_max_tree_depth", "suffix lookup compares up to 24 tokens", neutral=(24,)),
    _warn("suffix_decoding_max_spec_factor", "a suffix draft is no longer than its match", neutral=(1, 1.0)),
    _warn(
        "suffix_decoding_min_token_prob",
        "a suffix draft ends where the next token followed in less than a tenth of the matches",
        neutral=(0.1,),
    ),
    _warn("enforce_eager", "--enforce-eager holds for both models", neutral=(False,)),
    _warn("use_local_argmax_reduction", _ONE_DEVICE, neutral=(False,)),
    _warn("disable_padded_drafter_batch", "drafts are never padded", neutral=(False,)),
)

# Keys of --structured-outputs-config.
FOREIGN_WRITING_KEYS: dict[str, Foreign] = _by_name(
    _accept("disable_fallback", "there is one backend, so nothing falls back"),
    _refuse(
        "disable_additional_properties",
        "a schema holds as it is written; say additionalProperties in it",
        neutral=(False,),
    ),
    _refuse("reasoning_parser", "it is a flag", neutral=("",), instead="--reasoning-parser"),
    _refuse("reasoning_parser_plugin", "no code of the operator's runs in the server", neutral=("",)),
    _refuse("enable_in_reasoning", "a structure begins after the reasoning", neutral=(False,)),
)

# Values of --quantization and --kv-cache-dtype.
_OTHER_QUANTIZATION = "only fp8, gguf, int8 and int4 are implemented; use one of them or an unquantized checkpoint"
_OF_CHECKPOINT = "the type of a quantized checkpoint is read from its files; leave it out"
REFUSED_QUANTIZATIONS = (
    *((name, _OTHER_QUANTIZATION) for name in ("bitsandbytes", "modelopt", "nvfp4")),
    *((name, _OF_CHECKPOINT) for name in ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors")),
)
_OTHER_FP8 = "of 8-bit types only e4m3 and int8 are implemented; use fp8, int8 or auto"
_OTHER_KV = "keys and values are stored as they are computed, in --dtype, or in 8 bits; use auto, fp8 or int8"
REFUSED_KV_TYPES = (
    *((name, _OTHER_FP8) for name in ("fp8_e5m2", "fp8_inc", "fp8_ds_mla", "nvfp4")),
    *((name, _OTHER_KV) for name in ("bfloat16", "float16", "half", "float32")),
)

# Heads that draft from hidden states, as vLLM and speculators name them, that FASER does not compute: methods of
# --speculative-config, and what the config.json of a checkpoint says.
_BLOCK = (
    "it drafts a block of masked positions at once, each of which attends to the later ones; "
    "FASER's heads draft one token after another"
)

REFUSED_HEADS: dict[str, str] = {
    "dflash": _BLOCK,
    "dflash2": _BLOCK,
    "dspark": _BLOCK,
    "peagle": "it drafts the positions of a block at once from mask tokens; FASER's heads draft one after another",
    "eagle": "EAGLE-3's heads draft better, and they are computed",
    "medusa": "its heads do not read what the earlier ones drafted; EAGLE-3's heads do, and they are computed",
    "mlp_speculator": "each of its positions has layers of its own, which no kernel here computes",
    "eagle3 of another family": "only heads whose layers are Llama's or Qwen3's are computed",
    "mtp": "DeepSeek, GLM, MiMo and Qwen3-Next have such layers, and none of these families is served",
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

# Values of rejection_sample_method and of backend in --structured-outputs-config.
OLD_REJECTION_METHODS = tuple(
    (name, "it is an older name; use standard, block or synthetic")
    for name in ("strict", "probabilistic", "rejection_sampler", "typical_acceptance_sampler")
)
REFUSED_WRITERS = tuple(
    (name, "only llguidance is implemented; use auto") for name in ("xgrammar", "outlines", "lm-format-enforcer")
)
