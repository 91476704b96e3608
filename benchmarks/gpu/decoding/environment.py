"""Phase `environment`: which device, driver and versions this is, how fast it copies and multiplies right now.

    python -m benchmarks.gpu.decoding.environment

FlashInfer is imported and its compiled modules are loaded, which needs no GPU: where that fails no other phase has
anything to do. As a program it does only that, and prints where the package lies, and seconds by module. Reads
what the device says of itself and changes none of its settings.
"""

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.plan import ON_DEVICE, REFERENCE_BYTES_S, REFERENCE_FLOPS_S, Plan, Sizes
from benchmarks.gpu.record import Desk, Folder, Json
from benchmarks.gpu.steps import DeviceClock, clock_of
from benchmarks.runner import git_commit
from faser import __version__
from faser.config.environment import cache_dir, cuda_environment
from faser.engine.checkpoints.families import decoder_spec
from faser.engine.execution.startup.device import modules_of
from faser.engine.execution.startup.memory import CachedModel
from faser.errors import ConfigError
from faser.kernels.cuda.flashinfer.build import ARCH, Module, modules_dir, product_modules, spec_of
from faser.kernels.cuda.flashinfer.library import load_flashinfer
from faser.kernels.interface.fp8 import FP8


def needed_modules(sizes: Sizes) -> tuple[Module, ...]:
    """For all models that phases run on a device, and the target over keys and values in 8 bits."""
    shapes = (sizes.target, sizes.draft, *sizes.checked, *(config for _, config in sizes.overlap_drafts))
    shapes += (*sizes.mixtures, *sizes.families, sizes.answering)
    models = [
        CachedModel(spec=decoder_spec(each), dtype=torch.bfloat16, kv_dtype=stored)
        for each, stored in (*((each, torch.bfloat16) for each in shapes), (sizes.target, FP8))
    ]
    return (*modules_of(models), *product_modules(ARCH))


def loaded() -> Json:
    """Seconds of the import and of every module. Raises ConfigError naming those that are missing."""
    cuda_environment(compile_kernels=False)
    folder = modules_dir(cache_dir() / "kernels", ARCH)
    expect_modules(folder)
    began_s = time.perf_counter()
    load_flashinfer(folder)
    taken_s = round(time.perf_counter() - began_s, 2)
    found: Json = {"package": sys.modules["flashinfer"].__file__, "import": taken_s}
    for module in needed_modules(ON_DEVICE):
        began_s = time.perf_counter()
        spec_of(module.name).build_and_load()
        found[module.name] = round(time.perf_counter() - began_s, 2)
    return found


def expect_modules(folder: Path) -> None:
    """Raises ConfigError naming the modules that a folder lacks; FlashInfer's own error names none."""
    if missing := [each.name for each in needed_modules(ON_DEVICE) if not each.is_in([folder])]:
        names = ",".join(missing)
        raise ConfigError(
            f"{folder} lacks {names}; compile them with faser env --build-kernels --arch {ARCH} --only {names}"
        )


PHASE = "environment"
_PACKAGES = ("torch", "triton", "flashinfer-python", "apache-tvm-ffi", "numpy", "transformers", "vllm")
_QUERIES = (
    "name",
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "clocks.max.mem",
    "power.limit",
    "temperature.gpu",
    "memory.used",
    "memory.total",
)
_COUNTS = ("batches", "verify_batches", "policy_batches", "overlap_batches")  # those that the device has room for
_REPEATS = 20
_PRODUCT_SIDE = {"cuda": 8192, "cpu": 128}


def run(plan: Plan, desk: Desk) -> None:
    desk.keep("versions", {"faser": __version__, "python": platform.python_version(), **_versions()})
    desk.keep("commit", plan.commit or git_commit())
    desk.keep("system", platform.platform())
    desk.keep("device", _device(plan))
    desk.keep("sequences", {name: getattr(plan.sizes, name) for name in _COUNTS})
    desk.keep("as_read", _as_read())
    if not plan.dry_run:
        desk.keep("flashinfer", loaded())
    clock = clock_of(plan.device)
    desk.say("copying and multiplying")  # in any case: all other phases look at it
    desk.keep("copy_bytes_s", _copy_bytes_s(plan, clock))
    desk.keep("product_flops_s", _product_flops_s(plan, clock))
    desk.keep("as_read_after", _as_read())
    desk.say(json.dumps(desk.result["device"]))


def bytes_s(folder: Folder) -> float:
    """Return the measured bytes a second of copies; the reference where that phase did not get so far."""
    found = folder.load(PHASE)
    return float((found.result if found else {}).get("copy_bytes_s", REFERENCE_BYTES_S))


def flops_s(folder: Folder) -> float:
    found = folder.load(PHASE)
    return float((found.result if found else {}).get("product_flops_s", REFERENCE_FLOPS_S))


def _versions() -> dict[str, str]:
    found = {"torch CUDA": torch.version.cuda or "none"}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found


def _device(plan: Plan) -> dict[str, Any]:
    if plan.dry_run:
        return {"name": "cpu", "cores": torch.get_num_threads()}
    found = torch.cuda.get_device_properties(0)
    return {
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "multiprocessors": found.multi_processor_count,
        "memory_bytes": found.total_memory,
        "l2_bytes": found.L2_cache_size,
    }


def _as_read() -> dict[str, str]:
    """Clocks and the like, as nvidia-smi reads them; nothing where there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    command = [program, f"--query-gpu={','.join(_QUERIES)}", "--format=csv,noheader"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    values = [each.strip() for each in ended.stdout.splitlines()[0].split(",")] if ended.stdout else []
    return dict(zip(_QUERIES, values, strict=False))


def _copy_bytes_s(plan: Plan, clock: DeviceClock) -> float:
    """Bytes read plus bytes written in a second, of a large copy of random numbers."""
    source = torch.randint(256, (plan.sizes.copy_bytes,), dtype=torch.uint8, device=plan.device)
    target = torch.empty_like(source)
    return 2 * plan.sizes.copy_bytes / _median_s(clock, lambda: target.copy_(source))


def _product_flops_s(plan: Plan, clock: DeviceClock) -> float:
    """Measure the operations a second of a large square product in bfloat16."""
    side = _PRODUCT_SIDE[plan.device]
    one, other = (torch.randn(side, side, device=plan.device).to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(one)
    return float(2 * side**3 / _median_s(clock, lambda: torch.mm(one, other, out=out)))


def _median_s(clock: DeviceClock, work: Any) -> float:
    work()
    marks = [clock.mark()]
    for _ in range(_REPEATS):
        work()
        marks.append(clock.mark())
    return statistics.median(clock.between_s(marks))


if __name__ == "__main__":
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", ARCH)  # of the machine that this one stands for
    print(json.dumps(loaded()))
