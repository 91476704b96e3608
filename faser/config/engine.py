"""EngineConfig: every setting of an engine, each declared once. Checked when it is built, frozen afterwards."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from faser.config.checks import Label, raise_problems
from faser.config.declaration import Kind, setting, settings_of, show_bytes
from faser.config.device_default import DEVICE_DEFAULTS, DeviceDefault
from faser.config.groups import ENGINE, MODEL, OUTPUT, SPECULATION
from faser.config.speculation import AUTO, POLICIES, SpeculationConfig
from faser.config.speculation_parser import Parsed, parse_speculation
from faser.config.structured_outputs import StructuredOutputsConfig, parse_structured_outputs
from faser.machine import usable_cores, usable_memory
from faser.types import MAX_LOGPROBS, Slo

_HALF = "it is not computed on a CPU; use bfloat16 or float32"
_NO_FLOAT32 = "flashinfer computes in 16 bits; use bfloat16, float16 or the torch backend"
_OTHER_QUANTIZATION = "only fp8, gguf, int8 and int4 are implemented; use one of them or an unquantized checkpoint"
_OF_CHECKPOINT = "the type of a quantized checkpoint is read from its files; leave it out"

_METHODS_OF_CHECKPOINTS = ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors")
_LOW_BIT = ("gguf", "int8", "int4")

_OTHER_FP8 = "of 8-bit types only e4m3 and int8 are implemented; use fp8, int8 or auto"
_OTHER_KV = "keys and values are stored as they are computed, in --dtype, or in 8 bits; use auto, fp8 or int8"
_NO_FP8 = "no kernels for CPUs multiply 8-bit numbers; leave it out, or use the torch backend, which is slow"
_NO_LOW_BIT = "no kernels for GPUs multiply low-bit weights; leave it out, or use the torch backend"
_NO_FP8_KV = "no kernels for CPUs read 8-bit floats; use int8, auto, or the torch backend, which is slow"
_NO_AUTO_PRUNE = (
    "on a GPU a step that prunes replays no CUDA graph and waits in its middle, which auto does not count; set it "
    "to off, or to on to compare"
)
_NO_INT8_KV = "no kernels for GPUs read keys and values in int8; use fp8, auto, or the torch backend"

# The device of each backend that computes on one kind only.
_HOME = {"native": "cpu", "flashinfer": "cuda"}
# The device of each partition that divides one kind only.
_DIVIDED = {"cores": "cpu", "sm": "cuda", "streams": "cuda"}
# Settings that have no effect on a CPU.
_GPU_ONLY = (
    "gpu_memory_utilization",
    "enforce_eager",
    "few_row_kernels",
    "cudagraph_capture_sizes",
    "compile_kernels",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All settings of an engine. Raises ConfigError that names every problem in one line."""

    model: str | None = setting(
        None,
        "Model directory, .gguf file or hub id. None: the embedded SmolLM2-135M-Instruct.",
        group=MODEL,
        kind=Kind.TEXT,
        metavar="model",
        common=True,
    )
    tokenizer: str | None = setting(
        None, "Directory of another tokenizer. None: the model's own.", group=MODEL, kind=Kind.TEXT, metavar="path"
    )
    revision: str | None = setting(
        None, "Branch, tag or commit of a hub model. None: the main branch.", group=MODEL, kind=Kind.TEXT
    )
    dtype: str = setting(
        "auto",
        "Type of weights and activations. auto: the checkpoint's, or the nearest the device computes.",
        group=MODEL,
        kind=Kind.TEXT,
        choices=("auto", "bfloat16", "float16", "float32"),
        synonyms=(("float", "float32"), ("half", "float16")),
        common=True,
    )
    quantization: str | None = setting(
        None,
        "Weights as they are multiplied. int8, int4: all of them, rounded while loading (on a CPU). gguf: what a "
        "GGUF file stores in blocks, as stored (on a CPU). fp8: those of the layers, rounded while loading (on a "
        "GPU). none: in --dtype. Not given: as a quantized checkpoint or, on a CPU, a GGUF file stores them.",
        group=MODEL,
        kind=Kind.TEXT,
        aliases=("-q",),
        choices=("none", "fp8", "gguf", "int8", "int4"),
        synonyms=(("None", None), ("null", None)),
        refused=(
            *((name, _OTHER_QUANTIZATION) for name in ("bitsandbytes", "modelopt", "nvfp4")),
            *((name, _OF_CHECKPOINT) for name in _METHODS_OF_CHECKPOINTS),
        ),
    )
    max_model_len: int | None = setting(
        None,
        "Longest context, prompt and answer together, in tokens. None or auto: the model's own.",
        group=MODEL,
        kind=Kind.COUNT,
        low=1,
        high=1 << 24,
        common=True,
    )
    seed: int = setting(
        0,
        "Random seed of requests that have none of their own.",
        group=MODEL,
        kind=Kind.INTEGER,
        low=-(2**63),
        high=2**63 - 1,
    )
    device: str = setting(
        "auto",
        "Where the model runs. auto: the first GPU that can be used, else the CPU.",
        group=ENGINE,
        kind=Kind.TEXT,
        choices=("auto", "cpu", "cuda"),
        numbered=("cuda",),
        common=True,
    )
    backend: str = setting(
        "auto",
        "Kernels that compute. auto: flashinfer on a GPU; on a CPU native, compiled for it, if there is a C++ "
        "compiler, else torch.",
        group=ENGINE,
        kind=Kind.TEXT,
        choices=("auto", "torch", "native", "flashinfer"),
    )
    num_threads: int | None = setting(
        None,
        "Threads that compute. None: the cores this process may use.",
        group=ENGINE,
        kind=Kind.INTEGER,
        low=1,
        high=1024,
        common=True,
    )
    max_num_seqs: int = setting(
        DEVICE_DEFAULTS["max_num_seqs"],
        "Most sequences that run at the same time. On a GPU the default is 256.",
        group=ENGINE,
        kind=Kind.COUNT,
        low=1,
        high=4096,
        common=True,
    )
    max_num_batched_tokens: int = setting(
        DEVICE_DEFAULTS["max_num_batched_tokens"],
        "Most tokens that one step computes. Longer prompts are computed in pieces. On a GPU the default is 8192, "
        "on one of less than 64 GiB 2048.",
        group=ENGINE,
        kind=Kind.COUNT,
        low=1,
        high=1 << 20,
        common=True,
    )
    max_num_queued_reqs: int = setting(
        1024,
        "Most sequences that wait; further requests get status 503.",
        group=ENGINE,
        kind=Kind.COUNT,
        low=0,
        high=1 << 20,
    )
    block_size: int = setting(
        16, "Tokens in a KV block.", group=ENGINE, kind=Kind.COUNT, low=16, high=256, multiple_of=16
    )
    kv_cache_memory: int | None = setting(
        None,
        "Memory of the KV cache. None: chosen from the memory that is free after the model is loaded.",
        group=ENGINE,
        kind=Kind.BYTES,
        aliases=("--kv-cache-memory-bytes",),
        low=1 << 20,
        high=1 << 50,
        common=True,
    )
    kv_cache_dtype: str = setting(
        "auto",
        "Type of keys and values in the KV cache; 8 bits take half the memory. auto: that of activations; fp8: "
        "8-bit floats, on a GPU; int8: integers with a scale for each head and token, on a CPU.",
        group=ENGINE,
        kind=Kind.TEXT,
        choices=("auto", "fp8", "int8"),
        synonyms=(("fp8_e4m3", "fp8"), ("int8_per_token_head", "int8")),
        refused=(
            *((name, _OTHER_FP8) for name in ("fp8_e5m2", "fp8_inc", "fp8_ds_mla", "nvfp4")),
            *((name, _OTHER_KV) for name in ("bfloat16", "float16", "half", "float32")),
        ),
    )
    gpu_memory_utilization: float = setting(
        0.9,
        "Share of a GPU's memory for weights, steps and KV cache together. No effect on a CPU.",
        group=ENGINE,
        kind=Kind.NUMBER,
        low=0,
        above=True,
        high=1,
    )
    enforce_eager: bool = setting(
        False,
        "Launch each kernel of a step separately instead of replaying CUDA graphs. No effect on a CPU.",
        group=ENGINE,
        kind=Kind.SWITCH,
    )
    few_row_kernels: bool = setting(
        False,
        "Compute steps of at most 8 rows with kernels that fuse norms, gate and residual into the products. "
        "Unmeasured. No effect on a CPU.",
        group=ENGINE,
        kind=Kind.SWITCH,
    )
    cudagraph_capture_sizes: tuple[int, ...] | None = setting(
        None,
        "Rows of the steps that are captured as CUDA graphs. None: set by --max-num-seqs. No effect on a CPU.",
        group=ENGINE,
        kind=Kind.COUNTS,
        one_flag_many=True,
        low=1,
        high=8192,
    )
    async_scheduling: bool | None = setting(
        None,
        "Launch a step before the host has the tokens of the last one. None or auto: on a GPU.",
        group=ENGINE,
        kind=Kind.SWITCH,
    )
    compile_kernels: bool = setting(
        True,
        "Compile missing CUDA kernels at the start, which takes minutes. Off: a missing kernel is an error. "
        "No effect on a CPU.",
        group=ENGINE,
        kind=Kind.SWITCH,
    )
    enable_prefix_caching: bool = setting(
        True, "Reuse the KV cache of prompts that begin with the same tokens.", group=ENGINE, kind=Kind.SWITCH
    )
    scheduling_policy: str = setting(
        "fcfs",
        "Which request of a key or connection runs first: the first to arrive (fcfs), or the one with the lowest "
        "priority field, which then goes before those of other keys, too.",
        group=ENGINE,
        kind=Kind.TEXT,
        choices=("fcfs", "priority"),
    )
    speculative_config: Mapping[str, Any] | None = setting(
        None,
        "How to draft and verify, as JSON with vLLM's keys. None: drafts from text, as many as pay off.",
        group=SPECULATION,
        kind=Kind.JSON,
        example='{"method": "ngram"}',
        aliases=("-sc",),
        common=True,
    )
    speculative_policy: str | None = setting(
        None,
        "How the number of drafted tokens is chosen; off: no drafts. None: faser.",
        group=SPECULATION,
        kind=Kind.TEXT,
        aliases=("--spec-policy",),
        choices=POLICIES,
        common=True,
    )
    spec_overlap: str = setting(
        "off",
        "Draft the next tokens while the model verifies the last ones. auto: when that is faster; the start takes "
        "longer, as it measures that.",
        group=SPECULATION,
        kind=Kind.TEXT,
        choices=("auto", "on", "off"),
    )
    spec_partition: str = setting(
        "auto",
        "How drafting and verification share the processors while they overlap. auto: cores on a CPU; on a GPU "
        "sm, or streams.",
        group=SPECULATION,
        kind=Kind.TEXT,
        choices=("auto", "sm", "streams", "cores", "serial"),
    )
    early_prune: str = setting(
        "off",
        "Let drafted tokens that the model will clearly reject leave its forward pass early. auto: when that is "
        "faster; not on a GPU.",
        group=SPECULATION,
        kind=Kind.TEXT,
        choices=("auto", "on", "off"),
    )
    audit_speculation: float = setting(
        0.0,
        "Share of the answers that drafts were made for which an idle engine computes again without drafts, to "
        "compare every token. 0: none.",
        group=SPECULATION,
        kind=Kind.NUMBER,
        metavar="rate",
        low=0,
        high=1,
    )
    trace_steps: str | None = setting(
        None,
        "File for a trace of every step, which Perfetto and chrome://tracing can open.",
        group=ENGINE,
        kind=Kind.OUTPUT_FILE,
    )
    slo_ttft_ms: float | None = setting(
        None,
        "Target for the time to the first token, in milliseconds, of requests that have none of their own.",
        group=SPECULATION,
        kind=Kind.NUMBER,
        metavar="ms",
        low=0,
        above=True,
    )
    slo_tpot_ms: float | None = setting(
        None,
        "Target for the time per further token, in milliseconds, of requests that have none of their own.",
        group=SPECULATION,
        kind=Kind.NUMBER,
        metavar="ms",
        low=0,
        above=True,
    )
    per_request_spec_decode_metrics: str = setting(
        "none",
        "Whether answers have vLLM's metrics.speculative_decoding, in addition to metrics.faser.",
        group=OUTPUT,
        kind=Kind.TEXT,
        choices=("none", "summary", "detailed"),
    )
    structured_outputs_config: Mapping[str, Any] | None = setting(
        None,
        "How structured output is written, as JSON with vLLM's keys backend and disable_any_whitespace. None: "
        "JSON answers have a space after each comma and colon, and no other one.",
        group=OUTPUT,
        kind=Kind.JSON,
        example='{"disable_any_whitespace": false}',
    )
    max_logprobs: int = setting(
        MAX_LOGPROBS,
        "Most log probabilities that a request may ask for at each position.",
        group=OUTPUT,
        kind=Kind.INTEGER,
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
        """num_threads, or the cores this process may use."""
        return self.num_threads or usable_cores()

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU. False for auto, which execution/startup/device.py replaces by a device."""
        return _kind_of(self.device) == "cuda"

    @property
    def records_steps(self) -> bool:
        """Whether steps are captured as CUDA graphs and replayed."""
        return self.on_gpu and not self.enforce_eager

    @property
    def schedules_async(self) -> bool:
        """Whether a step is launched before the host has the tokens of the last one."""
        return self.on_gpu if self.async_scheduling is None else self.async_scheduling

    @property
    def without_effect(self) -> tuple[str, ...]:
        """Settings that were changed and have no effect on this device."""
        if self.device != "cpu":
            return ()
        defaults = {each.name: each.default for each in settings_of(EngineConfig)}
        return tuple(name for name in _GPU_ONLY if getattr(self, name) != defaults[name])

    @property
    def speculation(self) -> SpeculationConfig:
        """How the engine speculates."""
        config = self._parsed.config
        assert config is not None, "problems were raised when this was built"
        return config

    @property
    def structured_outputs(self) -> StructuredOutputsConfig:
        """How structured output is written."""
        return parse_structured_outputs(self.structured_outputs_config)[0]

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
        found += _device_problems(values, label)
        named = label("speculative_config")
        parsed = _parse_speculation(values, label("speculative_policy"))
        found += [f"{named}: {problem}" for problem in parsed.problems]
        _, problems = parse_structured_outputs(values["structured_outputs_config"])
        found += [f"{label('structured_outputs_config')}: {problem}" for problem in problems]
        if values["spec_overlap"] == "on" and parsed.config is not None:
            found += _overlap_problems(parsed.config, label)
        return found


def _device_problems(values: Mapping[str, Any], label: Label) -> list[str]:
    """What the chosen device cannot do. Nothing is checked for auto."""
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
    if kind == "cuda" and values["quantization"] in _LOW_BIT and backend in ("auto", "flashinfer"):
        found.append(f"{label('quantization')} is {values['quantization']}; {_NO_LOW_BIT}")
    if kind == "cpu" and values["kv_cache_dtype"] == "fp8" and backend in ("auto", "native"):
        found.append(f"{label('kv_cache_dtype')} is fp8; {_NO_FP8_KV}")
    if kind == "cuda" and values["kv_cache_dtype"] == "int8" and backend in ("auto", "flashinfer"):
        found.append(f"{label('kv_cache_dtype')} is int8; {_NO_INT8_KV}")
    if kind == "cuda" and values["early_prune"] == "auto":
        found.append(f"{label('early_prune')} is auto; {_NO_AUTO_PRUNE}")
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
    """Why drafting cannot overlap without a draft model, and what an operator can do."""
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
