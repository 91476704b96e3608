"""FlashInfer as this machine has it: imported, and its compiled modules loaded, which needs no GPU. A program too.

    python -m benchmarks.gpu.common.flashinfer_modules

Prints where the package lies, and seconds by module. Nothing is compiled: what is missing is an error.
"""

import json
import os
import sys
import time

import torch

from benchmarks.gpu.common.plan import ON_DEVICE, Sizes
from benchmarks.gpu.common.record import Json
from faser.config.environment import cache_dir, cuda_environment
from faser.engine.checkpoints.families import decoder_spec
from faser.engine.execution.startup.device import modules_of
from faser.engine.execution.startup.memory import CachedModel
from faser.kernels.cuda.flashinfer.build import ARCH, Module, modules_dir, spec_of
from faser.kernels.cuda.flashinfer.library import load_flashinfer


def needed_modules(sizes: Sizes) -> tuple[Module, ...]:
    """For all models that phases run on a device."""
    shapes = (sizes.target, sizes.draft, *sizes.checked, *(config for _, config in sizes.overlap_drafts))
    models = [
        CachedModel(spec=decoder_spec(each), dtype=torch.bfloat16, kv_dtype=torch.bfloat16) for each in shapes
    ]
    return modules_of(models)


def loaded() -> Json:
    """Seconds of the import and of every module. Raises what FlashInfer raises for one that is missing."""
    cuda_environment(compile_kernels=False)
    began_s = time.perf_counter()
    load_flashinfer(modules_dir(cache_dir() / "kernels", ARCH))
    taken_s = round(time.perf_counter() - began_s, 2)
    found: Json = {"package": sys.modules["flashinfer"].__file__, "import": taken_s}
    for module in needed_modules(ON_DEVICE):
        began_s = time.perf_counter()
        spec_of(module.name).build_and_load()
        found[module.name] = round(time.perf_counter() - began_s, 2)
    return found


if __name__ == "__main__":
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", ARCH)  # of the machine that this one stands for
    print(json.dumps(loaded()))
