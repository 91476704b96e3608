"""EngineConfig: every setting of an engine, each declared once. Checked when it is built, frozen afterwards.

Some defaults depend on the device, which is known only once the engine starts. EngineConfig has a CPU's numbers
and the names of the settings that were not given (by_device); execution/startup/device.py replaces them on a GPU.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

from faser.config.declaration import (
    ENGINE,
    MODEL,
    OUTPUT,
    SPECULATION,
    Kind,
    Label,
    Setting,
    raise_problems,
    read_keys,
    setting,
    settings_of,
    show_bytes,
)
from faser.config.environment import ranks_here
from faser.config.kv_events import KvEventsConfig, parse_kv_events
from faser.config.speculation import AUTO, POLICIES, SpeculationConfig
from faser.config.speculation_keys import Parsed, parse_speculation
from faser.config.vllm_names import FOREIGN_WRITING_KEYS, REFUSED_KV_TYPES, REFUSED_QUANTIZATIONS, REFUSED_WRITERS
from faser.machine import usable_cores, usable_memory
from faser.types.request import Slo
from faser.types.sampling import MAX_LOGPROBS


class DeviceDefault(int):
    """The default of a count on a CPU. on_gpu: on a GPU. on_small_gpu: on one of less than SMALL_GPU_BYTES.

    As a field's default it tells a value that was not given from the same number that was.
    """

    on_gpu: int
    on_small_gpu: int

    def __new__(cls, on_cpu: int, on_gpu: int, on_small_gpu: int) -> "DeviceDefault":
        found = super().__new__(cls, on_cpu)
        found.on_gpu, found.on_small_gpu = on_gpu, on_small_gpu
        return found


SMALL_GPU_BYTES = 64 << 30  # a step of 8192 rows takes gigabytes, which a smaller GPU has better use for
DEVICE_DEFAULTS = {
    "max_num_seqs": DeviceDefault(64, on_gpu=256, on_small_gpu=256),
    "max_num_batched_tokens": DeviceDefault(256, on_gpu=8192, on_small_gpu=2048),
}


def gpu_defaults(values: Mapping[str, Any], by_device: Collection[str], memory_bytes: int) -> dict[str, int]:
    """Values, by name, for the settings in by_device, on a GPU of this memory. values: a CPU's, or given ones.

    A number that was given bounds the other one: a step has a row for each sequence at least.
    """
    small = memory_bytes < SMALL_GPU_BYTES
    usual = {name: each.on_small_gpu if small else each.on_gpu for name, each in DEVICE_DEFAULTS.items()}
    found: dict[str, int] = {}
    if "max_num_seqs" in by_device:
        given = None if "max_num_batched_tokens" in by_device else values["max_num_batched_tokens"]
        found["max_num_seqs"] = min(usual["max_num_seqs"], given or usual["max_num_seqs"])
    if "max_num_batched_tokens" in by_device:
        seqs = found.get("max_num_seqs", values["max_num_seqs"])
        found["max_num_batched_tokens"] = max(usual["max_num_batched_tokens"], seqs)
    return found


_MOST_LOGIT_ROWS = 1024  # of a step; 600 MB for a vocabulary of 150,000

# Adapters kept in memory for each that may be in a step.
_CPU_LORAS = 4

# Without --kv-cache-memory the KV cache of a CPU gets this share of the free memory, up to this limit: other
# programs need memory too. Pages that are never used cost nothing.
_CPU_KV_SHARE = 0.25
_CPU_KV_MOST_BYTES = 4 << 30


def cpu_kv_memory(free_bytes: int) -> int:
    """The most that the KV cache of a CPU takes of this free memory unless its size is given."""
    return min(int(free_bytes * _CPU_KV_SHARE), _CPU_KV_MOST_BYTES)


_HALF = "it is not computed on a CPU; use bfloat16 or float32"
_NO_FLOAT32 = "flashinfer computes in 16 bits; use bfloat16, float16 or the torch backend"

_NO_FP8 = "no kernels for CPUs multiply 8-bit numbers; leave it out, or use the torch backend, which is slow"
KV_CACHE_DIR_ON_GPU = "KV is kept for models on a CPU only"
_NO_FP8_KV = "no kernels for CPUs read 8-bit floats; use int8, auto, or the torch backend, which is slow"
_NO_INT8_KV = "no kernels for GPUs read keys and values in int8; use fp8, auto, or the torch backend"

# The device of each backend that computes on one kind only.
_HOME = {"native": "cpu", "flashinfer": "cuda"}
# The device of each partition that divides one kind only.
_DIVIDED = {"cores": "cpu", "sm": "cuda", "streams": "cuda"}
# Settings that have no effect on a CPU.
_GPU_ONLY = (
    "gpu_memory_utilization",
    "enforce_eager",
    "cudagraph_capture_sizes",
    "compile_kernels",
    "disable_custom_all_reduce",
)


# The JSON of --structured-outputs-config, with vLLM's keys. vLLM calls llguidance guidance.
_WRITING_KEYS = (
    Setting(
        name="backend",
        kind=Kind.TEXT,
        help="Grammar engine for structured output.",
        group=OUTPUT,
        choices=("auto", "llguidance", "guidance"),
        refused=REFUSED_WRITERS,
    ),
    Setting(
        name="disable_any_whitespace",
        kind=Kind.SWITCH,
        help="false: JSON may have any white space between values.",
        group=OUTPUT,
    ),
)


@dataclass(frozen=True, slots=True)
class StructuredOutputsConfig:
    """any_whitespace: JSON may have any white space between values; else a space follows each comma and colon."""

    any_whitespace: bool = False


def parse_structured_outputs(given: Mapping[str, Any] | None) -> tuple[StructuredOutputsConfig, tuple[str, ...]]:
    """The settings, and every problem of the JSON in one line each."""
    problems: list[str] = []
    values = read_keys(given or {}, _WRITING_KEYS, FOREIGN_WRITING_KEYS, problems, [])
    return StructuredOutputsConfig(any_whitespace=values.get("disable_any_whitespace") is False), tuple(problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All settings of an engine. Raises ConfigError that names every problem in one line."""

    model: str | None = setting(
        MODEL,
        Kind.TEXT,
        None,
        "Model directory, .gguf file or hub id: owner/name, or owner/name:Q4_K_M for one of its GGUF files. "
        "Default: the embedded SmolLM2-135M-Instruct.",
        metavar="model",
        aliases=("-m", "--hf-repo", "-hf", "-hfr"),
        common=True,
    )
    tokenizer: str | None = setting(
        MODEL, Kind.TEXT, None, "Directory of another tokenizer. Default: the model's own.", metavar="path"
    )
    revision: str | None = setting(
        MODEL, Kind.TEXT, None, "Branch, tag or commit of a hub model. Default: the main branch."
    )
    dtype: str = setting(
        MODEL,
        Kind.TEXT,
        "auto",
        "Type of weights and activations. auto: the checkpoint's, or the nearest that the device supports.",
        choices=("auto", "bfloat16", "float16", "float32"),
        synonyms=(("float", "float32"), ("half", "float16")),
        common=True,
    )
    quantization: str | None = setting(
        MODEL,
        Kind.TEXT,
        None,
        "Weight quantization used at inference. int8, int4: all weights, rounded while loading. gguf: the blocks "
        "of a GGUF file as stored. fp8: the weights of the layers, rounded while loading (GPU only). awq, gptq, "
        "compressed-tensors, mxfp4: as the checkpoint stores them; it must have that format. none: weights in "
        "--dtype. Default: as a quantized checkpoint or a GGUF file stores them.",
        aliases=("-q",),
        choices=("none", "fp8", "gguf", "int8", "int4", "awq", "gptq", "compressed-tensors", "mxfp4"),
        synonyms=(("None", None), ("null", None), ("awq_marlin", "awq"), ("gptq_marlin", "gptq")),
        refused=REFUSED_QUANTIZATIONS,
    )
    max_model_len: int | None = setting(
        MODEL,
        Kind.COUNT,
        None,
        "Maximum context length in tokens, prompt and answer together. Default, or auto: the model's own.",
        aliases=("--ctx-size", "-c"),
        synonyms=(("0", None),),
        low=1,
        high=1 << 24,
        common=True,
    )
    enable_lora: bool = setting(
        MODEL,
        Kind.SWITCH,
        False,
        "Serve LoRA adapters: a request that names one as its model gets its answers. Off: no cost.",
    )
    max_loras: int = setting(
        MODEL,
        Kind.COUNT,
        4,
        "Maximum number of different adapters in one step. Requests for others wait.",
        low=1,
        high=256,
    )
    max_lora_rank: int = setting(
        MODEL,
        Kind.COUNT,
        64,
        "Largest rank of an adapter. A GPU reserves memory for it.",
        low=1,
        high=512,
    )
    max_cpu_loras: int | None = setting(
        MODEL,
        Kind.COUNT,
        None,
        "Maximum number of adapters kept in memory, with those in use; the least recently used leave. Default: "
        "four times --max-loras.",
        low=1,
        high=1 << 16,
    )
    seed: int = setting(
        MODEL,
        Kind.INTEGER,
        0,
        "Random seed of requests that set none.",
        low=-(2**63),
        high=2**63 - 1,
    )
    device: str = setting(
        ENGINE,
        Kind.TEXT,
        "auto",
        "Device that runs the model. auto: the first usable GPU, else the CPU.",
        choices=("auto", "cpu", "cuda"),
        numbered=("cuda",),
        common=True,
    )
    backend: str = setting(
        ENGINE,
        Kind.TEXT,
        "auto",
        "Kernel backend. auto: flashinfer on a GPU; on a CPU native, compiled for this CPU, if there is a C++ "
        "compiler, else torch.",
        choices=("auto", "torch", "native", "flashinfer"),
    )
    num_threads: int | None = setting(
        ENGINE,
        Kind.INTEGER,
        None,
        "CPU threads per rank. Default: the cores this process may use, divided among the ranks.",
        aliases=("--threads", "-t"),
        low=1,
        high=1024,
        common=True,
    )
    tensor_parallel_size: int = setting(
        ENGINE,
        Kind.COUNT,
        1,
        "Number of processes that each hold a part of the model and compute every step together. On GPUs each "
        "takes one, from --device on. CPUs use it for a model that does not fit into one machine, with torchrun: "
        "on one machine it is slower than one process there.",
        aliases=("-tp",),
        low=1,
        high=64,
    )
    disable_custom_all_reduce: bool = setting(
        ENGINE,
        Kind.SWITCH,
        False,
        "Let NCCL alone add up the parts of ranks on GPUs. Otherwise one kernel does, up to 512 KiB, where each "
        "GPU can read the memory of the others.",
    )
    max_num_seqs: int = setting(
        ENGINE,
        Kind.COUNT,
        DEVICE_DEFAULTS["max_num_seqs"],
        "Maximum number of sequences running concurrently. On a GPU the default is 256.",
        aliases=("--parallel", "-np"),
        low=1,
        high=4096,
        common=True,
    )
    max_num_batched_tokens: int = setting(
        ENGINE,
        Kind.COUNT,
        DEVICE_DEFAULTS["max_num_batched_tokens"],
        "Maximum tokens per engine step; longer prompts are prefilled in chunks. On a GPU the default is 8192, "
        "on one of less than 64 GiB 2048.",
        aliases=("--batch-size", "-b"),
        low=1,
        high=1 << 20,
        common=True,
    )
    max_num_queued_reqs: int = setting(
        ENGINE,
        Kind.COUNT,
        1024,
        "Maximum number of waiting sequences; further requests get status 503.",
        low=0,
        high=1 << 20,
    )
    block_size: int = setting(ENGINE, Kind.COUNT, 16, "Tokens per KV block.", low=16, high=256, multiple_of=16)
    kv_cache_memory: int | None = setting(
        ENGINE,
        Kind.BYTES,
        None,
        "Memory of the KV cache, recurrent states included. Default: sized from the memory left after loading "
        "the model.",
        aliases=("--kv-cache-memory-bytes",),
        low=1 << 20,
        high=1 << 50,
        common=True,
    )
    kv_cache_dtype: str = setting(
        ENGINE,
        Kind.TEXT,
        "auto",
        "Type of keys and values in the KV cache; 8 bits take half the memory of 16. auto: the type of "
        "activations; fp8: 8-bit floats (GPU only); int8: integers with a scale per head and token (CPU only).",
        choices=("auto", "fp8", "int8"),
        synonyms=(("fp8_e4m3", "fp8"), ("int8_per_token_head", "int8")),
        refused=REFUSED_KV_TYPES,
    )
    gpu_memory_utilization: float = setting(
        ENGINE,
        Kind.NUMBER,
        0.9,
        "Fraction of a GPU's memory for weights, steps and KV cache together. GPU only.",
        low=0,
        above=True,
        high=1,
    )
    enforce_eager: bool = setting(
        ENGINE,
        Kind.SWITCH,
        False,
        "Launch each kernel of a step separately instead of replaying CUDA graphs. GPU only.",
    )
    cudagraph_capture_sizes: tuple[int, ...] | None = setting(
        ENGINE,
        Kind.COUNTS,
        None,
        "Rows of the steps that are captured as CUDA graphs. Default: set by --max-num-seqs. GPU only.",
        one_flag_many=True,
        low=1,
        high=8192,
    )
    async_scheduling: bool | None = setting(
        ENGINE,
        Kind.SWITCH,
        None,
        "Launch a step before the host has the tokens of the last one. Default, or auto: on a GPU.",
    )
    compile_kernels: bool = setting(
        ENGINE,
        Kind.SWITCH,
        True,
        "Compile missing CUDA kernels at the start, which takes minutes. Off: a missing kernel is an error. GPU "
        "only.",
    )
    enable_prefix_caching: bool = setting(
        ENGINE,
        Kind.SWITCH,
        True,
        "Reuse the KV cache of prompts that begin with the same tokens.",
    )
    state_snapshot_memory: int | None = setting(
        ENGINE,
        Kind.BYTES,
        None,
        "Part of the KV cache's memory for snapshots of recurrent states (Qwen3.5), from which prompts with a "
        "common prefix continue. 0: none, and no prefix caching for such models. Default: one snapshot per four "
        "of --max-num-seqs, and at least 8, if --kv-cache-memory leaves room. No effect on models without such "
        "states.",
        low=0,
        high=1 << 50,
    )
    kv_cache_dir: str | None = setting(
        ENGINE,
        Kind.TEXT,
        None,
        "Folder that keeps the KV of prompts and answers, so that sessions continue after a restart without "
        "prefill. One server uses it at a time, on a CPU, in one process. Default: no KV is kept.",
        metavar="path",
    )
    kv_cache_dir_size: int = setting(
        ENGINE,
        Kind.BYTES,
        8 << 30,
        "Maximum size of --kv-cache-dir; the least recently used KV makes room.",
        low=1 << 20,
        high=1 << 50,
    )
    scheduling_policy: str = setting(
        ENGINE,
        Kind.TEXT,
        "fcfs",
        "Which request of a key or connection runs first: the first to arrive (fcfs), or the one with the lowest "
        "priority field, which then also goes before the requests of other keys (priority).",
        choices=("fcfs", "priority"),
    )
    speculative_config: Mapping[str, Any] | None = setting(
        SPECULATION,
        Kind.JSON,
        None,
        "How to draft and verify, as JSON with vLLM's keys. Default: drafts from text, with adaptive length.",
        example='{"method": "ngram"}',
        aliases=("-sc",),
        common=True,
    )
    speculative_policy: str | None = setting(
        SPECULATION,
        Kind.TEXT,
        None,
        "Policy that chooses the number of draft tokens; off: no drafts. Default: faser.",
        aliases=("--spec-policy",),
        choices=POLICIES,
        common=True,
    )
    spec_overlap: str = setting(
        SPECULATION,
        Kind.TEXT,
        "off",
        "Draft the next tokens while the model verifies the last ones. auto: while measurements show that it is "
        "faster.",
        choices=("auto", "on", "off"),
    )
    spec_partition: str = setting(
        SPECULATION,
        Kind.TEXT,
        "auto",
        "How overlapped drafting and verification share the processors. auto: cores on a CPU; on a GPU sm, else "
        "streams.",
        choices=("auto", "sm", "streams", "cores", "serial"),
    )
    early_prune: str = setting(
        SPECULATION,
        Kind.TEXT,
        "off",
        "Drop draft tokens early in the forward pass when they are clearly going to be rejected. Not faster on "
        "the models measured so far.",
        choices=("on", "off"),
    )
    audit_speculation: float = setting(
        SPECULATION,
        Kind.NUMBER,
        0.0,
        "Fraction of the answers with drafts that an idle engine computes again without drafts, to compare every "
        "token. 0: none.",
        metavar="rate",
        low=0,
        high=1,
    )
    trace_steps: str | None = setting(
        ENGINE,
        Kind.OUTPUT_FILE,
        None,
        "File for a trace of every step, which Perfetto and chrome://tracing can open. Default: no trace.",
    )
    slo_ttft_ms: float | None = setting(
        SPECULATION,
        Kind.NUMBER,
        None,
        "Target for the time to first token, in milliseconds, of requests that set none. Default: no target.",
        metavar="ms",
        low=0,
        above=True,
    )
    slo_tpot_ms: float | None = setting(
        SPECULATION,
        Kind.NUMBER,
        None,
        "Target for the time per output token after the first, in milliseconds, of requests that set none. "
        "Default: no target.",
        metavar="ms",
        low=0,
        above=True,
    )
    per_request_spec_decode_metrics: str = setting(
        OUTPUT,
        Kind.TEXT,
        "none",
        "Add vLLM's metrics.speculative_decoding to answers, besides metrics.faser.",
        choices=("none", "summary", "detailed"),
    )
    structured_outputs_config: Mapping[str, Any] | None = setting(
        OUTPUT,
        Kind.JSON,
        None,
        "Options of structured output, as JSON with vLLM's keys backend and disable_any_whitespace. Default: "
        "JSON answers have a space after each comma and colon, and no other white space.",
        example='{"disable_any_whitespace": false}',
    )
    kv_events_config: Mapping[str, Any] | None = setting(
        ENGINE,
        Kind.JSON,
        None,
        "Publish events of the prefix cache over ZeroMQ, for prefix-aware routers. JSON with vLLM's keys "
        "enable_kv_cache_events, endpoint, replay_endpoint, topic, buffer_steps, hwm and max_queue_size. The "
        "events contain the tokens of prompts. Default: nothing is published.",
        example='{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}',
    )
    max_logprobs: int = setting(
        OUTPUT,
        Kind.INTEGER,
        MAX_LOGPROBS,
        "Maximum number of log probabilities that a request may ask for at each position.",
        low=0,
        high=MAX_LOGPROBS,
    )

    by_device: tuple[str, ...] = ()  # settings that were not given, and have another default on a GPU

    def __post_init__(self) -> None:
        for name, default in DEVICE_DEFAULTS.items():  # a config from another process has plain numbers
            if name in self.by_device and getattr(self, name) == default:
                object.__setattr__(self, name, default)
        raise_problems(self)
        by_device = [name for name in DEVICE_DEFAULTS if isinstance(getattr(self, name), DeviceDefault)]
        for name in by_device:
            object.__setattr__(self, name, int(getattr(self, name)))
        object.__setattr__(self, "by_device", tuple(by_device))

    @property
    def threads(self) -> int:
        """num_threads, or the cores this process may use, divided among the ranks on this machine."""
        return self.num_threads or max(1, usable_cores() // ranks_here(self.tensor_parallel_size))

    @property
    def on_gpu(self) -> bool:
        """Return whether the device is a GPU. False for auto, which execution/startup/device.py replaces."""
        return _kind_of(self.device) == "cuda"

    @property
    def records_steps(self) -> bool:
        """Return whether steps are captured as CUDA graphs and replayed."""
        return self.on_gpu and not self.enforce_eager

    @property
    def schedules_async(self) -> bool:
        """Return whether a step is launched before the host has the tokens of the last one."""
        return self.on_gpu if self.async_scheduling is None else self.async_scheduling

    @property
    def max_logit_rows(self) -> int:
        """Return the most rows of a step whose logits are computed: one a sequence, and one a draft token.

        Logits take most of a step's memory: a crowd, which drafts little, has no room for its longest drafts.
        """
        seqs = self.max_num_seqs
        if self.speculation.policy == "off":
            return seqs
        most = max(_MOST_LOGIT_ROWS, 2 * seqs)
        return min(self.max_num_batched_tokens, seqs * (self.speculation.cap + 1), most)

    @property
    def num_cpu_loras(self) -> int:
        """Return how many adapters are kept in memory at most."""
        return _CPU_LORAS * self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras

    @property
    def without_effect(self) -> tuple[str, ...]:
        """Settings that were changed and have no effect on this device."""
        if self.device != "cpu":
            return ()
        defaults = {each.name: each.default for each in settings_of(EngineConfig)}
        return tuple(name for name in _GPU_ONLY if getattr(self, name) != defaults[name])

    @property
    def speculation(self) -> SpeculationConfig:
        """Return the parsed speculative config."""
        config = self._parsed.config
        assert config is not None, "problems were raised when this was built"
        return config

    @property
    def structured_outputs(self) -> StructuredOutputsConfig:
        """Return the parsed structured outputs config."""
        return parse_structured_outputs(self.structured_outputs_config)[0]

    @property
    def kv_events(self) -> KvEventsConfig | None:
        """Return where and how changes of the prefix cache are published; None: they are not."""
        return parse_kv_events(self.kv_events_config)[0]

    @property
    def speculation_warnings(self) -> tuple[str, ...]:
        """Keys of speculative_config that are accepted and have no effect, one sentence each."""
        return self._parsed.warnings

    @property
    def _parsed(self) -> Parsed:
        return _parse_speculation({each.name: getattr(self, each.name) for each in fields(self)})

    @staticmethod
    def conflicts(values: Mapping[str, Any], label: Label) -> list[str]:
        """Problems between settings. A value that is a problem by itself is None here."""
        found = []
        tokens, seqs = values["max_num_batched_tokens"], values["max_num_seqs"]
        may_grow = isinstance(tokens, DeviceDefault) and values["device"] != "cpu"
        if tokens is not None and seqs is not None and tokens < seqs and not may_grow:
            found.append(
                f"{label('max_num_batched_tokens')} is {tokens}; it must be at least "
                f"{label('max_num_seqs')}, which is {seqs}"
            )
        sizes = values["cudagraph_capture_sizes"]
        if sizes is not None and tokens is not None and max(sizes) > tokens and not may_grow:
            found.append(
                f"{label('cudagraph_capture_sizes')} has {max(sizes)}; no step has more rows than "
                f"{label('max_num_batched_tokens')}, which is {tokens}"
            )
        if values["state_snapshot_memory"] and values["enable_prefix_caching"] is False:
            given = show_bytes(values["state_snapshot_memory"])
            found.append(
                f"{label('state_snapshot_memory')} is {given}; snapshots are for prefix caching, and "
                f"{label('enable_prefix_caching')} is off"
            )
        slots, kept = values["max_loras"], values["max_cpu_loras"]
        if slots is not None and kept is not None and kept < slots:
            found.append(
                f"{label('max_cpu_loras')} is {kept}; it must be at least {label('max_loras')}, which is {slots}"
            )
        found += _device_problems(values, label)
        if values["kv_cache_dir"] is not None:
            found += _kv_cache_dir_problems(values, label)
        named = label("speculative_config")
        parsed = _parse_speculation(values, label("speculative_policy"))
        found += [f"{named}: {problem}" for problem in parsed.problems]
        _, problems = parse_structured_outputs(values["structured_outputs_config"])
        found += [f"{label('structured_outputs_config')}: {problem}" for problem in problems]
        _, problems = parse_kv_events(values["kv_events_config"])
        found += [f"{label('kv_events_config')}: {problem}" for problem in problems]
        if values["spec_overlap"] == "on" and parsed.config is not None:
            found += _overlap_problems(parsed.config, label)
        return found + _rank_problems(values, label)


def _kv_cache_dir_problems(values: Mapping[str, Any], label: Label) -> list[str]:
    """Return why no KV can be kept on disk."""
    named, found = f"{label('kv_cache_dir')} is {values['kv_cache_dir']}", []
    if values["enable_prefix_caching"] is False:
        found.append(f"{named}; it is for prefix caching, and {label('enable_prefix_caching')} is off")
    if values["tensor_parallel_size"] not in (None, 1):
        size = values["tensor_parallel_size"]
        found.append(f"{named}; it needs a model in one process, and {label('tensor_parallel_size')} is {size}")
    if values["device"] is not None and _kind_of(values["device"]) == "cuda":
        found.append(f"{named}; {KV_CACHE_DIR_ON_GPU}, and {label('device')} is {values['device']}")
    return found


def _rank_problems(values: Mapping[str, Any], label: Label) -> list[str]:
    """Return the settings that tensor-parallel ranks do not support."""
    size, found = values["tensor_parallel_size"], []
    if size in (None, 1):
        return []
    named = f"{label('tensor_parallel_size')} is {size}"
    if values["spec_overlap"] == "on":
        found.append(f"{named}; {label('spec_overlap')} on needs a model in one process")
    if values["async_scheduling"] and values["device"] == "cpu":
        found.append(f"{named}; {label('async_scheduling')} on a CPU needs a model in one process")
    return found


def _device_problems(values: Mapping[str, Any], label: Label) -> list[str]:
    """Return the settings that the chosen device does not support. Nothing is checked for auto."""
    device, backend, dtype = values["device"], values["backend"], values["dtype"]
    if device in (None, "auto"):
        return []
    found = []
    kind, home = _kind_of(device), _HOME.get(backend)
    if home not in (None, kind):
        found.append(f"{label('backend')} is {backend}; it computes on {home}, and {label('device')} is {device}")
    if kind == "cpu" and dtype == "float16":
        found.append(f"{label('dtype')} is {dtype}; {_HALF}")
    if kind == "cuda" and dtype == "float32" and backend in ("auto", "flashinfer"):
        found.append(f"{label('dtype')} is {dtype}; {_NO_FLOAT32}")
    if kind == "cpu" and values["quantization"] == "fp8" and backend in ("auto", "native"):
        found.append(f"{label('quantization')} is fp8; {_NO_FP8}")
    if kind == "cpu" and values["kv_cache_dtype"] == "fp8" and backend in ("auto", "native"):
        found.append(f"{label('kv_cache_dtype')} is fp8; {_NO_FP8_KV}")
    if kind == "cuda" and values["kv_cache_dtype"] == "int8" and backend in ("auto", "flashinfer"):
        found.append(f"{label('kv_cache_dtype')} is int8; {_NO_INT8_KV}")
    home = _DIVIDED.get(values["spec_partition"])
    if home not in (None, kind):
        found.append(
            f"{label('spec_partition')} is {values['spec_partition']}, which divides a {home} device; "
            f"{label('device')} is {device}"
        )
    memory, limit = values["kv_cache_memory"], usable_memory()
    if kind == "cpu" and memory is not None and memory > limit:
        found.append(
            f"{label('kv_cache_memory')} is {show_bytes(memory)}; it must be at most {show_bytes(limit)}, "
            f"the memory this process may use"
        )
    return found


def _overlap_problems(speculation: SpeculationConfig, label: Label) -> list[str]:
    """Return why drafting cannot overlap without a draft model, and what an operator can do."""
    if speculation.needs_draft_model or speculation.policy == "off":
        return []
    method = speculation.method
    drafter = "the default method" if method == AUTO else f"method {method}"
    source = "from text alone"
    if speculation.needs_head:
        source = "from the model's hidden states, which there are after its steps only"
    return [
        f"{label('spec_overlap')} is on, which needs a draft model, and {drafter} drafts {source}; "
        f"""add {label("speculative_config")} '{{"model": "DRAFT"}}' or leave {label("spec_overlap")} away"""
    ]


def _kind_of(device: str) -> str:
    return device.partition(":")[0]


def _parse_speculation(values: Mapping[str, Any], policy_label: str = "speculative_policy") -> Parsed:
    """values: of EngineConfig's settings, by name."""
    return parse_speculation(
        values["speculative_config"],
        policy=values["speculative_policy"],
        policy_label=policy_label,
        slo=Slo(ttft_ms=values["slo_ttft_ms"], tpot_ms=values["slo_tpot_ms"]),
    )
