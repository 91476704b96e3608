"""Attention wrappers of FlashInfer that plan for the processors of a lane instead of all of the device.

The planner of its prefill kernel, which also decodes with tensor cores, splits sequences among two blocks for
every processor that the device says it has, less `num_colocated_ctas`. Its Python wrappers always give 0 for that
(prefill.py, decode.py). A lane's give as many blocks as the processors that it does not have would take: run on a
stand-in of the CUDA runtime, the planner was seen to plan for 132 processors less 112 as it does for 20.

Every plan looks its compiled module up anew, which is one for all wrappers of a process, and keeps it in
`_cached_module`. That is a property here, in a class of its own for each lane: what a wrapper finds there puts the
lane's number into the call. So no other wrapper's plans can change, on no other thread. The ways not taken: to
replace `plan` in the module itself, which had to be told, thread by thread, who is planning; and to choose the
pieces here, as `fixed_split_size`, which is public: plans of recordings would then be split or not, and one that
is not leaves out what a recorded kernel reads.

The planner of the decode kernel without tensor cores takes no such number.
"""

from typing import Any

PLANS_OF_VERSION = "0.7.2.post1"  # where the place of the argument was read
BLOCKS_PER_PROCESSOR = 2  # of the prefill kernel, as its planner counts
_NUM_ARGUMENTS = 20
_DISABLES_SPLIT, _COLOCATED = 17, 18  # places of a truth value and, behind it, the blocks that are not there
_ATTRIBUTE = "_cached_module"


def lane_wrapper(wrapper: Any, idle_processors: int) -> Any:
    """A class like `wrapper`, FlashInfer's of paged prefill or decode, whose plans leave some processors out.

    Only for backend fa2 and, of decode, with tensor cores: other planners take other arguments.
    """
    idle_blocks = BLOCKS_PER_PROCESSOR * idle_processors

    def module(self: Any) -> Any:
        return self.__dict__.get(_ATTRIBUTE)

    def keep(self: Any, module: Any) -> None:
        self.__dict__[_ATTRIBUTE] = None if module is None else _LaneModule(module, idle_blocks)

    return type(wrapper.__name__, (wrapper,), {_ATTRIBUTE: property(module, keep)})


class _LaneModule:
    """Stands for a compiled module. All but its plans are as they were."""

    def __init__(self, module: Any, idle_blocks: int) -> None:
        self._module = module
        self._idle_blocks = idle_blocks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def plan(self, *arguments: Any) -> Any:
        assert len(arguments) == _NUM_ARGUMENTS, f"FlashInfer plans with {len(arguments)} arguments"
        found = arguments[_DISABLES_SPLIT : _COLOCATED + 1]
        assert [type(each) for each in found] == [bool, int], f"FlashInfer plans with {found}"
        assert found[1] == 0, f"FlashInfer leaves out {found[1]} blocks by itself"
        return self._module.plan(*arguments[:_COLOCATED], self._idle_blocks, *arguments[_COLOCATED + 1 :])
