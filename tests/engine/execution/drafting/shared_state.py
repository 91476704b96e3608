"""What two groups of objects have in common that either could write to: found by following every reference.

Memory (tensors, arrays, ctypes structures) is compared by address, so that two views of one buffer count; anything
else that can be changed, generators of random numbers included, by identity. Values, functions and modules are no
state; bound methods and closures are followed to what they hold.
"""

import ctypes
import functools
from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import PurePath
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType

import numpy as np
import torch

_CFuncPtr = ctypes.CFUNCTYPE(None).__mro__[1]  # of functions in a library
_VALUES = (
    *(str, bytes, int, float, complex, bool, type(None), range, slice, type, ModuleType, BuiltinFunctionType),
    *(Enum, np.generic, np.dtype, torch.dtype, torch.device, ctypes.CDLL, PurePath, _CFuncPtr),
)
_MUTABLE = (list, dict, set, bytearray)
_MEMORY = (torch.Tensor, np.ndarray, ctypes.Structure, ctypes.Array)


def shared(one: Iterable[object], other: Iterable[object], *, on_purpose: Iterable[object] = ()) -> list[str]:
    """What both reach and may write, described; on_purpose: not followed from either side."""
    known = {id(each) for each in on_purpose}
    mine, yours = (_reachable(each, known) for each in (one, other))
    objects = [describe(mine[key]) for key in mine.keys() & yours.keys() if _can_change(mine[key])]
    return sorted([*objects, *_overlaps(mine.values(), yours.values())])


def describe(found: object) -> str:
    shape = f" {tuple(found.shape)}" if isinstance(found, torch.Tensor | np.ndarray) else ""
    return f"{type(found).__name__}{shape}" if shape else f"{type(found).__name__} {found!r:.80}"


def _reachable(roots: Iterable[object], skipped: set[int]) -> dict[int, object]:
    """By id. Temporary objects are kept alive by the result, so no id is used twice."""
    found: dict[int, object] = {}
    left = list(roots)
    while left:
        each = left.pop()
        if id(each) in found or id(each) in skipped or isinstance(each, _VALUES):
            continue
        found[id(each)] = each
        left.extend(_parts(each))
    return found


def _parts(found: object) -> Iterator[object]:
    if isinstance(found, _MEMORY):
        return
    if isinstance(found, dict):
        yield from found.keys()
        yield from found.values()
    elif isinstance(found, list | tuple | set | frozenset):
        yield from found
    elif isinstance(found, MethodType):
        yield found.__self__
    elif isinstance(found, FunctionType):
        yield from found.__closure__ or ()
    elif isinstance(found, CellType):
        yield found.cell_contents
    elif isinstance(found, functools.partial):
        yield from (found.func, found.args, found.keywords)
    else:
        yield from getattr(found, "__dict__", {}).values()
        for kind in type(found).__mro__:
            slots = vars(kind).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if name not in ("__weakref__", "__dict__") and hasattr(found, _mangled(kind, name)):
                    yield getattr(found, _mangled(kind, name))


def _mangled(kind: type, name: str) -> str:
    private = name.startswith("__") and not name.endswith("__")
    return f"_{kind.__name__.lstrip('_')}{name}" if private else name


def _can_change(found: object) -> bool:
    """Whether sharing it is sharing state in itself, beyond what it holds."""
    if isinstance(found, _MUTABLE):
        return True
    if isinstance(found, (*_MEMORY, tuple, frozenset, MethodType, FunctionType, CellType, functools.partial)):
        return False  # memory is compared by address
    return not getattr(getattr(type(found), "__dataclass_params__", None), "frozen", False)


def _overlaps(mine: Iterable[object], yours: Iterable[object]) -> list[str]:
    spans = sorted(
        (*span, side, describe(each))
        for side, group in enumerate((mine, yours))
        for each in group
        if isinstance(each, _MEMORY) and (span := _span(each))[0] < span[1]
    )
    found = []
    ends = [(0, ""), (0, "")]  # of either side so far: the farthest one, and whose it is
    for begin, end, side, what in spans:
        farthest, whose = ends[1 - side]
        if begin < farthest:
            found.append(f"memory of {what} and {whose}")
        ends[side] = max(ends[side], (end, what))
    return found


def _span(found: object) -> tuple[int, int]:
    """Addresses that it may write: of all its elements, not of the whole storage it is cut from."""
    if isinstance(found, torch.Tensor):
        reach = sum((size - 1) * stride for size, stride in zip(found.shape, found.stride(), strict=True)) + 1
        return found.data_ptr(), found.data_ptr() + (reach * found.itemsize if found.numel() else 0)
    if isinstance(found, np.ndarray):
        low, high = np.lib.array_utils.byte_bounds(found)
        return low, high if found.size else low
    assert isinstance(found, ctypes.Structure | ctypes.Array)
    return ctypes.addressof(found), ctypes.addressof(found) + ctypes.sizeof(found)
