"""Flags that FASER does not have and knows by name: those of vLLM, and those that FASER had once.

A value that means "off", "one" or the default is always accepted. A flag that can only change speed or logging is
accepted with a warning. Every other one is refused, with the reason and what to use instead.
"""

from dataclasses import dataclass
from enum import Enum

from faser import __version__


class FlagSupport(Enum):
    ACCEPT = "FASER always does what the flag asks for"
    WARN = "the flag has no effect on answers"
    REFUSE = "the flag would change answers, or what is reachable"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignFlag:
    """One flag. neutral: values that ask for nothing, apart from _ALWAYS_NEUTRAL. origin: which program has it.

    switch: takes no value. many: takes several values. instead: what to use; VALUE in it is the flag's value.
    """

    flags: tuple[str, ...]
    support: FlagSupport
    reason: str
    neutral: tuple[str, ...] = ()
    switch: bool = False
    many: bool = False
    instead: str = ""
    origin: str = "vLLM"

    @property
    def key(self) -> str:
        return self.flags[0].removeprefix("--")


_VALUE = "VALUE"  # in ForeignFlag.instead: what the flag was given
_ALWAYS_NEUTRAL = ("none", "null", "off", "false", "")
_ONE = ("1",)


def judge(foreign: ForeignFlag, label: str, text: str) -> tuple[str | None, str | None]:
    """(problem, warning) for a flag and its value; both None when FASER does what it asks for anyway."""
    neutral = text.lower() in _ALWAYS_NEUTRAL or text in foreign.neutral
    if foreign.support is FlagSupport.ACCEPT or (neutral and foreign.support is FlagSupport.REFUSE):
        return None, None
    if foreign.support is FlagSupport.WARN:
        return None, f"{label} has no effect: {foreign.reason}"
    instead = foreign.instead.replace(_VALUE, text or _VALUE)
    alternative = f"Remove it or use {instead}." if instead else "Remove it."
    value = "" if foreign.switch else f": '{text}'"
    known = f"{label}{value} is known from {foreign.origin} but not supported by FASER {__version__}"
    return f"{known}: {foreign.reason}. {alternative}", None


def _refuse(
    flags: str,
    reason: str,
    *,
    neutral: tuple[str, ...] = (),
    switch: bool = False,
    instead: str = "",
    origin: str = "vLLM",
) -> ForeignFlag:
    return ForeignFlag(
        flags=tuple(flags.split()),
        support=FlagSupport.REFUSE,
        reason=reason,
        neutral=neutral,
        switch=switch,
        instead=instead,
        origin=origin,
    )


def _warn(flags: str, reason: str, *, switch: bool = False, many: bool = False) -> ForeignFlag:
    return ForeignFlag(
        flags=tuple(flags.split()), support=FlagSupport.WARN, reason=reason, switch=switch, many=many
    )


def _accept(flags: str, reason: str, *, switch: bool = True) -> ForeignFlag:
    return ForeignFlag(flags=tuple(flags.split()), support=FlagSupport.ACCEPT, reason=reason, switch=switch)


_ONE_DEVICE = "a model runs on one device"
_IN_JSON = "all settings of the drafter are in one JSON object"
_NO_LORA = "this build has no adapters"
_NO_MEDIA = "this build serves text only"
_KV_SCALES = "8-bit keys and values are stored with a scale of one"
_GRAPHS = "CUDA graphs are captured for the sizes of --cudagraph-capture-sizes, and for every length"
_NO_ADMIN = "this build has no admin routes"

FOREIGN_FLAGS: tuple[ForeignFlag, ...] = (
    _refuse("--tensor-parallel-size -tp", _ONE_DEVICE, neutral=_ONE),
    _refuse("--pipeline-parallel-size -pp", _ONE_DEVICE, neutral=_ONE),
    _refuse("--data-parallel-size -dp", "one process serves one replica", neutral=_ONE, instead="several servers"),
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
    _refuse("--kv-events-config", "the KV cache stays in one process", neutral=("{}",)),
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
    _warn("--disable-frontend-multiprocessing", "the engine always has its own process", switch=True),
    _warn("--collect-detailed-traces", "every span has the times of queue, prefill and decode", many=True),
    _warn("--log-config-file", "lines are text or JSON, by --log-format"),
    _warn("--disable-log-stats", "statistics are in /metrics, not in the log", switch=True),
    _warn("--enable-log-requests", "prompts are not logged", switch=True),
    _warn("--disable-log-requests", "prompts are not logged", switch=True),
    _warn("--max-log-len", "prompts are not logged"),
    _warn("--kv-cache-metrics", "there are no such metrics", switch=True),
    _accept("--enable-prompt-tokens-details", "usage always has them"),
    _accept("--enable-request-id-headers", "X-Request-Id is always echoed"),
)
