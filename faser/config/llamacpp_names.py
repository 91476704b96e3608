"""llama-server's flags that FASER does not have. Those that it has under another name are aliases of settings."""

from faser.config.foreign import VALUE, Foreign, accept, refuse, warn


def _default(names: str, key: str) -> Foreign:
    """A flag for a default of sampling."""
    instead = f"--override-generation-config '{{\"{key}\": {VALUE}}}'"
    return refuse(names, "defaults of sampling are in one JSON object", instead=instead, origin=_ORIGIN)


def _refuse(names: str, reason: str, *, instead: str = "", neutral: tuple[str, ...] = ()) -> Foreign:
    return refuse(names, reason, instead=instead, neutral=neutral, origin=_ORIGIN)


_ORIGIN = "llama.cpp"
_ONE_DEVICE = "a model runs on one device"
_FROM_FILE = "it follows from the model's files"
_IN_JSON = "all settings of the drafter are in one JSON object"
_PER_REQUEST = "a request asks for it, in structured_outputs or response_format"
_SERVES_BOTH = "every model serves answers, embeddings and scores"
_KV_TYPES = "keys and values have one type"
_LORA = "an adapter answers the requests that have its name as their model"
_THREADS = "--threads holds for every part of a step"

LLAMACPP_FLAGS: tuple[Foreign, ...] = (
    _default("--temp --temperature", "temperature"),
    _default("--top-k", "top_k"),
    _default("--top-p", "top_p"),
    _default("--min-p", "min_p"),
    _default("--repeat-penalty", "repetition_penalty"),
    _default("--presence-penalty", "presence_penalty"),
    _default("--frequency-penalty", "frequency_penalty"),
    _default("--predict --n-predict -n --max-tokens", "max_tokens"),
    _refuse("--tensor-split -ts", _ONE_DEVICE),
    _refuse("--split-mode -sm", _ONE_DEVICE, neutral=("none", "layer")),
    _refuse("--main-gpu -mg", "--device chooses the GPU", instead=f"--device cuda:{VALUE}", neutral=("0",)),
    _refuse("--cache-type-k -ctk", _KV_TYPES, instead="--kv-cache-dtype", neutral=("f16", "bf16")),
    _refuse("--cache-type-v -ctv", _KV_TYPES, instead="--kv-cache-dtype", neutral=("f16", "bf16")),
    _refuse("--model-draft -md", _IN_JSON, instead=f'--speculative-config \'{{"model": "{VALUE}"}}\''),
    _refuse(
        "--draft-max --draft --draft-n",
        _IN_JSON,
        instead=f"--speculative-config '{{\"num_speculative_tokens\": {VALUE}}}'",
    ),
    _refuse("--draft-min", "the policy decides how many tokens are drafted", neutral=("0",)),
    _refuse("--draft-p-min", "the policy decides which tokens are drafted"),
    _refuse("--hf-file -hff", "the file is named after the repository", instead="OWNER/NAME:Q4_K_M as the model"),
    _refuse("--hf-token -hft", "secrets are not read from the command line", instead="the variable HF_TOKEN"),
    _refuse("--model-url -mu", "models come from the hub or from disk", instead="a path or OWNER/NAME"),
    _refuse("--lora", _LORA, instead=f"--lora-modules NAME={VALUE}"),
    _refuse("--lora-scaled", f"{_LORA}, with the scale of its files", instead=f"--lora-modules NAME={VALUE}"),
    accept("--lora-init-without-apply", _LORA, switch=True, origin=_ORIGIN),
    _refuse("--control-vector", "a checkpoint is served as it is"),
    _refuse("--mmproj -mm", "models read and write text only"),
    accept("--embedding --embeddings", _SERVES_BOTH, switch=True, origin=_ORIGIN),
    accept("--reranking --rerank", _SERVES_BOTH, switch=True, origin=_ORIGIN),
    _refuse("--pooling", "the checkpoint says how embeddings are made"),
    _refuse("--grammar", _PER_REQUEST),
    _refuse("--grammar-file", _PER_REQUEST),
    _refuse("--json-schema -j", _PER_REQUEST),
    _refuse("--rope-scaling", _FROM_FILE),
    _refuse("--rope-scale", _FROM_FILE),
    _refuse("--rope-freq-base", _FROM_FILE),
    _refuse("--rope-freq-scale", _FROM_FILE),
    _refuse("--override-kv", _FROM_FILE),
    _refuse("--api-prefix", "it has another name", instead=f"--root-path {VALUE}"),
    _refuse("--reasoning-format", "the parser has a name", instead="--reasoning-parser", neutral=("auto",)),
    _refuse("--system-prompt-file -spf", "requests have a system message"),
    _refuse("--slot-save-path", "the KV cache stays in the engine's process"),
    refuse("--context-shift", "an answer ends with the context", switch=True, origin=_ORIGIN),
    refuse(
        "--ignore-eos", _PER_REQUEST.replace("structured_outputs or response_format", "ignore_eos"), switch=True
    ),
    warn("--gpu-layers --n-gpu-layers -ngl", "the whole model is on the device that --device chooses"),
    warn("--flash-attn -fa", "the attention kernel follows from --backend"),
    warn("--mlock", "weights are not swapped by FASER", switch=True),
    warn("--mmap", "weights are packed for this processor while they are read", switch=True),
    warn("--numa", "threads run where the system puts them"),
    warn("--ubatch-size -ub", "--batch-size bounds a step"),
    warn("--threads-batch -tb", _THREADS),
    warn("--threads-http", "one process answers HTTP"),
    warn("--verbose -v", "--log-level debug logs more", switch=True),
    warn("--log-disable", "--log-level error logs less", switch=True),
    warn("--log-file", "the log goes to stderr"),
    warn("--cache-reuse", "prefixes are found by their tokens, in blocks"),
    warn("--kv-unified -kvu", "sequences always share one paged cache", switch=True),
    warn("--swa-full", "layers with windows keep what they need", switch=True),
    warn("--prio", "threads have the priority of the process"),
    warn("--poll", "threads wait as long as pays"),
    warn("--timeout -to", "--request-timeout bounds a whole request"),
    accept("--jinja", "chat templates are always Jinja", switch=True),
    accept("--metrics", "/metrics always answers", switch=True),
    accept("--slots", "/live shows the running requests", switch=True),
    accept("--props", "/v1/models describes the model", switch=True),
    accept("--cont-batching -cb", "batches are always continuous", switch=True),
    accept("--cache-prompt", "prefixes are always kept", switch=True),
    accept("--warmup", "a start always warms up", switch=True),
    accept("--offline", "a model that is on disk needs no network", switch=True),
)
