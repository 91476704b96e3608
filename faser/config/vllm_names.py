"""vLLM's names that FASER does not have, and those that FASER had once."""

from faser.config.foreign import VALUE, Foreign, accept, by_name, refuse, warn

_ONE = ("1",)

_ONE_DEVICE = "a model runs on one device"
_IN_JSON = "all settings of the drafter are in one JSON object"
_LORA_TYPE = "the weights of an adapter have the type of activations"
_NO_MEDIA = "models read and write text only"
_KV_SCALES = "8-bit keys and values are stored with a scale of one"
_GRAPHS = "CUDA graphs are captured for the sizes of --cudagraph-capture-sizes, and for every length"
_NO_ADMIN = "there are no admin routes"
_SNAPSHOTS = "where states are kept for other prompts follows from the prompts, within --state-snapshot-memory"
_SERVES_BOTH = "every model serves answers, embeddings and scores"
_OLDER = "it belongs to older versions"

VLLM_FLAGS: tuple[Foreign, ...] = (
    refuse("--pipeline-parallel-size -pp", _ONE_DEVICE, neutral=_ONE),
    refuse("--decode-context-parallel-size -dcp", _ONE_DEVICE, neutral=_ONE),
    refuse("--enable-expert-parallel -ep", _ONE_DEVICE, switch=True),
    refuse("--distributed-executor-backend", _ONE_DEVICE, neutral=("mp", "uni")),
    refuse("--api-server-count -asc", "one process answers HTTP", neutral=_ONE, instead="several servers"),
    refuse("--headless", "every server answers HTTP", switch=True),
    refuse("--grpc", "it answers HTTP only", switch=True),
    refuse("--load-format", "it follows from the files", neutral=("auto", "safetensors", "gguf")),
    refuse("--download-dir", "it is set in the environment", instead="the variable FASER_CACHE_DIR"),
    refuse("--hf-overrides", "a checkpoint is served as it is", neutral=("{}",)),
    refuse("--tokenizer-mode", "it follows from the files", neutral=("auto", "hf")),
    refuse("--tokenizer-revision", "it is the model's", instead="--revision"),
    refuse("--code-revision", "no code of a checkpoint is run"),
    refuse("--runner", _SERVES_BOTH, neutral=("auto", "generate", "pooling")),
    refuse("--task", _SERVES_BOTH, neutral=("auto", "generate", "embed", "score")),
    refuse("--convert", _SERVES_BOTH, neutral=("auto", "none", "embed")),
    refuse("--calculate-kv-scales", _KV_SCALES, switch=True),
    refuse("--cpu-offload-gb", "weights are not offloaded", neutral=("0", "0.0")),
    refuse("--num-gpu-blocks-override", "blocks follow from the memory", instead="--kv-cache-memory"),
    refuse("--speculative-model", _IN_JSON, instead=f'--speculative-config \'{{"model": "{VALUE}"}}\''),
    refuse(
        "--num-speculative-tokens",
        _IN_JSON,
        neutral=("0",),
        instead=f"--speculative-config '{{\"num_speculative_tokens\": {VALUE}}}'",
    ),
    refuse("--lora-dtype", _LORA_TYPE, neutral=("auto",)),
    refuse("--lora-extra-vocab-size", "adapters that add tokens are not served", neutral=("0", "256")),
    refuse("--enable-lora-bias", "adapters with biases are not served", switch=True),
    refuse("--default-mm-loras", _NO_MEDIA),
    warn("--fully-sharded-loras", "how ranks share an adapter follows from the product it adapts", switch=True),
    warn("--specialize-active-lora", "rows are grouped by adapter in every step", switch=True),
    refuse("--tool-parser-plugin", "no code of the operator's runs in the server", instead="--tool-call-parser"),
    refuse(
        "--guided-decoding-backend",
        "its settings are in one JSON object",
        neutral=("auto", "guidance"),
        instead='--structured-outputs-config \'{"backend": "auto"}\'',
    ),
    refuse("--limit-mm-per-prompt", _NO_MEDIA, neutral=("{}",)),
    refuse("--enable-prompt-embeds", "prompts are text or token ids", switch=True),
    refuse("--logits-processors", "no code of the operator's runs in the engine"),
    refuse("--middleware", "no code of the operator's runs in the server", instead="a proxy"),
    warn(
        "--chat-template-content-format", "templates get messages in the form that they expect", neutral=("auto",)
    ),
    refuse("--response-role", "answers have the role assistant", neutral=("assistant",)),
    refuse("--return-tokens-as-token-ids", "log probabilities name tokens by their text", switch=True),
    refuse("--stream-interval", "every step is sent", neutral=_ONE),
    refuse("--max-num-queued-tokens", "the queue is limited in sequences", instead="--max-num-queued-reqs"),
    refuse("--uds", "it listens on TCP", instead="--host and --port"),
    refuse("--ssl-ca-certs", "client certificates are not checked", instead="a proxy"),
    refuse("--ssl-cert-reqs", "client certificates are not checked", neutral=("0",), instead="a proxy"),
    refuse("--enable-ssl-refresh", "certificates are reloaded on SIGHUP", switch=True, instead="SIGHUP"),
    refuse("--enable-tokenizer-info-endpoint", "there is no /tokenizer_info", switch=True),
    refuse("--enable-sleep-mode", _NO_ADMIN, switch=True),
    refuse("--admin-api-key", _NO_ADMIN),
    refuse("--metrics-port", "metrics share the server's port", instead="--metrics-require-key"),
    refuse("--legacy-vllm-metrics", "only current metric names are exported", switch=True),
    refuse("--kv-transfer-config", "the KV cache stays in one process", neutral=("{}",)),
    refuse(
        "--draft-share",
        "of the shares that a partition offers, drafting gets the best one, by measured step times",
        origin="an earlier version",
    ),
    warn("--enable-server-load-tracking", "/load always says how many requests are answered", switch=True),
    warn("--trust-remote-code", "no code of a checkpoint is ever run", switch=True),
    warn("--compilation-config -cc -O", "torch compiles nothing here"),
    warn("--cuda-graph-sizes", _GRAPHS, many=True),
    warn("--max-cudagraph-capture-size", _GRAPHS),
    warn("--max-seq-len-to-capture", _GRAPHS),
    warn("--attention-backend", "the backend follows from --backend"),
    warn("--enable-chunked-prefill", "long prompts are always prefilled in chunks", switch=True),
    warn("--max-num-partial-prefills", "prompts share a step's tokens as they come"),
    warn("--swap-space", "preempted sequences are computed again"),
    warn("--max-parallel-loading-workers", "weights are read by one process"),
    warn("--disable-cascade-attn", "there is no such kernel", switch=True),
    warn("--prefix-caching-hash-algo", "blocks are found by their tokens"),
    warn("--mamba-cache-mode", _SNAPSHOTS),
    warn("--mamba-block-size", _SNAPSHOTS),
    warn("--disable-frontend-multiprocessing", "the engine always has its own process", switch=True),
    warn("--collect-detailed-traces", "every span has the times of queue, prefill and decode", many=True),
    warn("--log-config-file", "lines are text or JSON, by --log-format"),
    warn("--disable-log-stats", "statistics are in /metrics, not in the log", switch=True),
    warn("--enable-log-requests", "prompts are not logged", switch=True),
    warn("--disable-log-requests", "prompts are not logged", switch=True),
    warn("--max-log-len", "prompts are not logged"),
    warn("--kv-cache-metrics", "there are no such metrics", switch=True),
    accept("--enable-prompt-tokens-details", "usage always has them", switch=True),
    accept("--enable-request-id-headers", "X-Request-Id is always echoed", switch=True),
)

# Keys of --speculative-config.
FOREIGN_KEYS: dict[str, Foreign] = by_name(
    refuse("code_revision", "no code of a checkpoint is run"),
    refuse("quantization", "the drafter's weights are used as stored, or dequantised (GGUF)"),
    refuse("kv_cache_dtype", "it is the target's: --kv-cache-dtype", neutral=("auto",)),
    refuse("draft_load_config", "how to load follows from the files", neutral=({},)),
    refuse("hf_overrides", "a checkpoint is served as it is", neutral=({},)),
    refuse("draft_tensor_parallel_size", _ONE_DEVICE, neutral=(1,), instead="1"),
    refuse("tensor_parallel_size", "it does not apply to the drafter", instead="'draft_tensor_parallel_size' 1"),
    refuse(
        "use_heterogeneous_vocab",
        "drafter and model must share a vocabulary",
        neutral=(False,),
        instead="method 'suffix'",
    ),
    refuse("parallel_drafting", "draft models draft token by token", neutral=(False,)),
    refuse("attention_backend", "it follows from --backend", neutral=("auto",), instead="--backend"),
    refuse("moe_backend", "it follows from --backend", neutral=("auto",), instead="--backend"),
    refuse("speculative_token_tree", "drafts are chains, not trees"),
    refuse(
        "synthetic_acceptance_length",
        "an acceptance is given for each position",
        instead="'synthetic_acceptance_rates'",
    ),
    refuse(
        "disable_by_batch_size",
        _OLDER,
        neutral=(0,),
        instead='{"policy": "faser"}, which stops drafting where it does not pay, '
        'or {"num_speculative_tokens_per_batch_size": [[1, 16, 4], [17, 4096, 0]]}',
    ),
    refuse("speculative_disable_by_batch_size", _OLDER, neutral=(0,), instead='{"policy": "faser"}'),
    warn("suffix_decoding_max_tree_depth", "suffix lookup compares up to 24 tokens", neutral=(24,)),
    warn("suffix_decoding_max_spec_factor", "a suffix draft is no longer than its match", neutral=(1, 1.0)),
    warn(
        "suffix_decoding_min_token_prob",
        "a suffix draft ends where the next token followed in less than a tenth of the matches",
        neutral=(0.1,),
    ),
    warn("enforce_eager", "--enforce-eager holds for both models", neutral=(False,)),
    warn("use_local_argmax_reduction", _ONE_DEVICE, neutral=(False,)),
    warn("disable_padded_drafter_batch", "drafts are never padded", neutral=(False,)),
)

# Keys of --structured-outputs-config.
FOREIGN_WRITING_KEYS: dict[str, Foreign] = by_name(
    accept("disable_fallback", "there is one backend, so nothing falls back"),
    refuse(
        "disable_additional_properties",
        "a schema holds as it is written; say additionalProperties in it",
        neutral=(False,),
    ),
    refuse("reasoning_parser", "it is a flag", neutral=("",), instead="--reasoning-parser"),
    refuse("reasoning_parser_plugin", "no code of the operator's runs in the server", neutral=("",)),
    refuse("enable_in_reasoning", "a structure begins after the reasoning", neutral=(False,)),
)

# Values of --quantization and --kv-cache-dtype.
_OTHER_QUANTIZATION = (
    "it is not supported; use a checkpoint in 16 bits, AWQ, GPTQ, compressed-tensors, FP8 or GGUF"
)
REFUSED_QUANTIZATIONS = tuple((name, _OTHER_QUANTIZATION) for name in ("bitsandbytes", "modelopt", "nvfp4"))
_OTHER_FP8 = "the only supported 8-bit types are e4m3 and int8; use fp8, int8 or auto"
_OTHER_KV = "keys and values are stored as they are computed, in --dtype, or in 8 bits; use auto, fp8 or int8"
REFUSED_KV_TYPES = (
    *((name, _OTHER_FP8) for name in ("fp8_e5m2", "fp8_inc", "fp8_ds_mla", "nvfp4")),
    *((name, _OTHER_KV) for name in ("bfloat16", "float16", "half", "float32")),
)

# Heads that draft from hidden states, as vLLM and speculators name them, that FASER does not compute: methods of
# --speculative-config, and what the config.json of a checkpoint says.
_CORRECTED = "it corrects a block's drafts by a network of its own; DSpark and DFlash 2 are computed"

REFUSED_HEADS: dict[str, str] = {
    "block": "of drafters of blocks only DFlash and DFlash 2 with Qwen3's layers, and DSpark with Qwen3's or "
    "Gemma 4's, are computed (methods dflash and dspark)",
    "dspark_draft": "its slots may follow either convention; where the anchor's row predicts the first token, the "
    "architecture is Qwen3DSparkModel",
    "domino": _CORRECTED,
    "lilicorr": _CORRECTED,
    "kv_native_dflash": "it reads the model's keys and values, not its hidden states",
    "deepseek_v4": "its layers have hyper-connections and latent attention, which are not computed",
    "muse": "the model that it drafts for is not served",
    "dflash2": "DFlash 2 is read in its own layout, whose config.json names DFlash2DraftModel",
    "peagle": "it drafts the positions of a block at once from mask tokens; FASER's heads draft one after another",
    "eagle": "EAGLE-3's heads draft better, and they are supported",
    "medusa": "its heads do not read what the earlier ones drafted; EAGLE-3's heads do, and they are supported",
    "mlp_speculator": "each of its positions has layers of its own, which no kernel here computes",
    "eagle3 of another family": "only heads whose layers are Llama's or Qwen3's are supported",
    "mtp": "only Qwen3.5's MTP layers are supported, each a part of its model's own checkpoint",
}

MTP_NAMES = ("qwen3_5_mtp", "qwen3_next_mtp")  # older names of the method mtp; Qwen3.5's cards have the second

FOREIGN_METHODS: dict[str, str] = {
    **{method: REFUSED_HEADS[method] for method in ("mlp_speculator", "eagle", "medusa")},
    "custom_class": "no code of the operator's runs in the engine",
    "extract_hidden_states": "hidden states are not returned",
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
    (name, "only llguidance is supported; use auto") for name in ("xgrammar", "outlines", "lm-format-enforcer")
)
