"""`faser bench WHAT …`: runs one kind of measurement, which is imported only then."""

from collections.abc import Sequence

from faser import __version__
from faser.cli.flags.sources import UsageError
from faser.config.declaration import did_you_mean

_KINDS = {
    "spec": "a model and its drafter over concurrency and policies, on real prompts",
}
_VLLM_KINDS = ("serve", "latency", "throughput", "sweep", "startup", "mm-processor")


def bench(arguments: Sequence[str]) -> int:
    """Run one kind of measurement; returns its exit status. Raises UsageError for an unknown kind."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0 if arguments else 2
    kind, rest = arguments[0], arguments[1:]
    match kind:
        case "spec":
            from faser.cli.bench.spec import spec

            return spec(rest)
        case "simulate":
            raise UsageError(["'bench simulate' is now `python -m benchmarks.simulator`, in a checkout of FASER"])
    if kind in _VLLM_KINDS:
        raise UsageError([f"'bench {kind}' is known from vLLM but not supported by FASER {__version__}"])
    raise UsageError([f"unknown measurement '{kind}'.{did_you_mean(kind, _KINDS)} There are: {', '.join(_KINDS)}"])


def _overview() -> str:
    lines = "\n".join(f"  {kind:<9} {what}" for kind, what in _KINDS.items())
    return f"usage: faser bench WHAT …\n\n{lines}\n\nfaser bench WHAT --help says more."
