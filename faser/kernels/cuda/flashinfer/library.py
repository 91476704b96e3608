"""The part of FlashInfer that the backend calls, as a protocol, and how the package is loaded.

Names and arguments are those of FlashInfer 0.7.2.post1, which the extra `cuda` pins; tests check every call
against that package's signatures. This module alone imports the package, and only in load_flashinfer.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from faser.errors import ConfigError
from faser.kernels.cuda.flashinfer.planners import PLANS_OF_VERSION, planning_wrapper


class PagedAttention(Protocol):
    """An attention wrapper of FlashInfer: planned once per step from host arrays, run once per layer.

    Its arguments differ between prefill and decode. `plan` fills a pinned buffer of the wrapper, which the device
    copies later: the caller must not plan again before that copy is done. left_out_blocks: see planners.py.
    """

    left_out_blocks: int

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None: ...

    def plan(self, *arguments: Any, **options: Any) -> None: ...

    def run(self, *arguments: Any, **options: Any) -> Tensor: ...


class FlashInfer(Protocol):
    def BatchPrefillWithPagedKVCacheWrapper(self, *arguments: Any, **options: Any) -> PagedAttention: ...

    def BatchDecodeWithPagedKVCacheWrapper(self, *arguments: Any, **options: Any) -> PagedAttention: ...


class _Installed:
    """The installed package."""

    def __init__(self, package: Any) -> None:
        self.BatchPrefillWithPagedKVCacheWrapper = planning_wrapper(package.BatchPrefillWithPagedKVCacheWrapper)
        self.BatchDecodeWithPagedKVCacheWrapper = planning_wrapper(package.BatchDecodeWithPagedKVCacheWrapper)


def _import() -> Any:
    import flashinfer

    return flashinfer


def load_flashinfer(modules: Path | None, import_package: Callable[[], Any] = _import) -> FlashInfer:
    """Import the package. Takes seconds; FlashInfer creates its cache folder.

    modules: folder of modules that build.py compiled ahead of time; None: FlashInfer takes the modules that came
    with its package, or compiles each at its first call.

    Raises ConfigError that names the missing module and the extra that installs it, or the version that is not the
    one whose plans FASER reads.
    """
    try:
        package = import_package()
    except ImportError as error:
        raise ConfigError(
            f"the flashinfer backend cannot be loaded, {error.name or error} is missing; install FASER with its "
            "extra cuda, as in pip install 'faser[cuda]'"
        ) from error
    if package.__version__ != PLANS_OF_VERSION:
        raise ConfigError(
            f"FlashInfer {package.__version__} is installed, and FASER plans attention as {PLANS_OF_VERSION} "
            f"does; install that one: pip install flashinfer-python=={PLANS_OF_VERSION}"
        )
    if modules is not None:
        package.jit.env.FLASHINFER_AOT_DIR = modules
    return _Installed(package)
