"""Defaults that depend on the device, which is known only once the engine starts.

EngineConfig has a CPU's numbers and the names of the settings that were not given (EngineConfig.by_device);
execution/startup/device.py replaces their values on a GPU.
"""

from collections.abc import Collection, Mapping
from typing import Any


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
