"""The part of FlashInfer that the backend calls, and its attention wrappers with a planner of FASER's choosing.

Names and arguments are those of FlashInfer 0.7.4, which the extra `cuda` pins; tests check every call
against that package's signatures. This module alone imports the package, and only in load_flashinfer.

A wrapper's `plan` is Python that checks its arguments, copies arrays to the device and ends in one call of a
compiled planner. It looks that module up, which all wrappers of a process share, and keeps it in `_cached_module`.
Here that attribute is a property of a class of its own, which wraps the module (PlannerModule), so that

- the number of blocks that the planner counts on is FASER's;
- the call can be repeated without the Python before it (graph_capture.py says for which layouts).

The planner of FlashInfer's prefill kernel, which also decodes with tensor cores, splits sequences among two blocks
for every processor of the device, minus `num_colocated_ctas`, for which FlashInfer's Python always passes 0. A
lane's wrappers pass the number of blocks that the processors outside the lane would take: on a stand-in of the
CUDA runtime, the planner planned for 132 processors minus 112 as it does for 20. A negative number allows more
pieces than run at once. The planner of the decode kernel without tensor cores takes no such number.

Rejected for lanes: replacing `plan` in the module, which would need to know for each thread which wrapper plans;
and `fixed_split_size`, with which plans vary between split and not, and a captured kernel needs one of them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from faser.errors import ConfigError
from faser.kernels.cuda.flashinfer.build import VERSION

BLOCKS_PER_PROCESSOR = 2  # of the prefill kernel, as its planner counts
_NUM_ARGUMENTS = 21
_DISABLES_SPLIT, _COLOCATED = 17, 18  # positions of two arguments: a bool, then the number of blocks to leave out
_ATTRIBUTE = "_cached_module"


class PagedAttention(Protocol):
    """An attention wrapper of FlashInfer: planned once per step from host arrays, run once per layer.

    Its arguments differ between prefill and decode. `plan` fills a pinned buffer of the wrapper, which the device
    copies later: the caller must not plan again before that copy is done. left_out_blocks: see planning_wrapper.
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


def planning_wrapper(wrapper: Any) -> Any:
    """A subclass of `wrapper`, FlashInfer's class for paged prefill or decode, whose plans leave blocks out.

    For backend fa2 only. Its `left_out_blocks` is to be set before the first plan, and is 0 until then. Other
    numbers are for prefill, and for decode with tensor cores: other planners take other arguments.
    """

    def module(self: Any) -> Any:
        return self.__dict__.get(_ATTRIBUTE)

    def keep(self: Any, module: Any) -> None:
        self.__dict__[_ATTRIBUTE] = None if module is None else PlannerModule(module, self.left_out_blocks)

    return type(wrapper.__name__, (wrapper,), {_ATTRIBUTE: property(module, keep), "left_out_blocks": 0})


def planner_of(wrapper: Any) -> "PlannerModule":
    """The module that made the last plan of a wrapper, which has been planned."""
    found = getattr(wrapper, _ATTRIBUTE)
    assert isinstance(found, PlannerModule), f"{type(wrapper).__name__} keeps {found!r}"
    return found


class PlannerModule:
    """A compiled module with another `plan`.

    left_out_blocks: of the next call. arguments, found: of the last one. The arguments are FlashInfer's.
    """

    def __init__(self, module: Any, left_out_blocks: int) -> None:
        self._module = module
        self.left_out_blocks = left_out_blocks
        self.arguments: tuple[Any, ...] = ()
        self.found: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def plan(self, *arguments: Any) -> Any:
        self.arguments = arguments
        if self.left_out_blocks:
            arguments = self._leaving_out(arguments)
        self.found = self._module.plan(*arguments)
        return self.found

    def _leaving_out(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        assert len(arguments) == _NUM_ARGUMENTS, f"FlashInfer plans with {len(arguments)} arguments"
        found = arguments[_DISABLES_SPLIT : _COLOCATED + 1]
        assert [type(each) for each in found] == [bool, int], f"FlashInfer plans with {found}"
        assert found[1] == 0, f"FlashInfer leaves out {found[1]} blocks by itself"
        return (*arguments[:_COLOCATED], self.left_out_blocks, *arguments[_COLOCATED + 1 :])


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
    if package.__version__ != VERSION:
        raise ConfigError(
            f"FlashInfer {package.__version__} is installed, and FASER plans attention as {VERSION} "
            f"does; install that one: pip install flashinfer-python=={VERSION}"
        )
    if modules is not None:
        package.jit.env.FLASHINFER_AOT_DIR = modules
    return _Installed(package)
