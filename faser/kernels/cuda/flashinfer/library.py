"""The part of FlashInfer that is called here, as a contract, and how it is loaded.

Names and arguments are those of FlashInfer 0.7.2.post1, which the extra `cuda` pins; tests hold every call against
that package's signatures. The package itself is imported here only, and only when asked for.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from faser.errors import ConfigError
from faser.kernels.cuda.flashinfer.lane_plans import PLANS_OF_VERSION, lane_wrapper


class PagedAttention(Protocol):
    """A wrapper object of FlashInfer: planned once a step from host arrays, run once a layer.

    Its arguments differ between prefill and decode. It owns a pinned buffer that plan fills and the device copies
    later: nobody may plan again before that copy is done.
    """

    def plan(self, *arguments: Any, **options: Any) -> None: ...

    def run(self, *arguments: Any, **options: Any) -> Tensor: ...


class FlashInfer(Protocol):
    """Functions write to `out`, or in place, on the current stream of their tensors' device."""

    def rmsnorm(self, *arguments: Any, **options: Any) -> Tensor: ...

    def silu_and_mul(self, *arguments: Any, **options: Any) -> Tensor: ...

    def BatchPrefillWithPagedKVCacheWrapper(self, *arguments: Any, **options: Any) -> PagedAttention: ...

    def BatchDecodeWithPagedKVCacheWrapper(self, *arguments: Any, **options: Any) -> PagedAttention: ...

    def planning_without(self, idle_processors: int) -> "FlashInfer":
        """The same, with wrappers that plan for a device with so many processors less. See lane_plans.

        Raises ConfigError where another version is installed than the one whose plans are known here.
        """
        ...


class _Installed:
    """The package. Wrappers plan without idle_processors."""

    def __init__(self, package: Any, idle_processors: int = 0) -> None:
        self._package = package
        self.rmsnorm = package.rmsnorm
        self.silu_and_mul = package.silu_and_mul
        prefill, decode = package.BatchPrefillWithPagedKVCacheWrapper, package.BatchDecodeWithPagedKVCacheWrapper
        if idle_processors:
            prefill, decode = (lane_wrapper(each, idle_processors) for each in (prefill, decode))
        self.BatchPrefillWithPagedKVCacheWrapper = prefill
        self.BatchDecodeWithPagedKVCacheWrapper = decode

    def planning_without(self, idle_processors: int) -> FlashInfer:
        version = self._package.__version__
        if version != PLANS_OF_VERSION:
            raise ConfigError(
                f"lanes of a GPU plan attention as FlashInfer {PLANS_OF_VERSION} does; {version} is installed; "
                "install that one, or divide nothing, with --spec-overlap off"
            )
        return _Installed(self._package, idle_processors)


def _import() -> Any:
    import flashinfer

    return flashinfer


def load_flashinfer(modules: Path | None, import_package: Callable[[], Any] = _import) -> FlashInfer:
    """The installed package. Takes seconds; makes a folder for its cache.

    modules: where modules were compiled ahead of time (flashinfer_build), which it then takes from there; None: it
    compiles each when it is first called, or takes one that came with the package.

    Raises ConfigError that names the module that is missing and the extra that brings it.
    """
    try:
        package = import_package()
    except ImportError as error:
        raise ConfigError(
            f"the flashinfer backend cannot be loaded, {error.name or error} is missing; install FASER with its "
            "extra cuda, as in pip install 'faser[cuda]'"
        ) from error
    if modules is not None:
        package.jit.env.FLASHINFER_AOT_DIR = modules
    return _Installed(package)
