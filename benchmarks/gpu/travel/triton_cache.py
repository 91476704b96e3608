"""Compiles what Triton would compile on a machine without a network, into the cache that travels. Needs no GPU.

    TRITON_CACHE_DIR=DIR python -m benchmarks.gpu.travel.triton_cache [--arch 90] [--keys]

To be run with that machine's versions of Python and Triton, on which every key depends. The kernels are those that
the phases launch: of the layers of all their models, by numbers of rows, and of sampling and verification over
their vocabulary. The engine's own code launches them, over a backend whose device is emulated; instead of a launch
a kernel is compiled, so keys are Triton's own. Results are whatever was in memory. --keys prints them and compiles
nothing.
"""

import argparse
import logging
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia_driver
from triton.runtime.jit import JITFunction

from benchmarks.gpu.families import experts_of
from benchmarks.gpu.models import BLOCK_SIZE, Config, write_shape
from benchmarks.gpu.plan import ON_DEVICE
from benchmarks.gpu.steps import batch_of
from benchmarks.runner import command_line
from faser.config.speculation import SpeculationConfig
from faser.engine.checkpoints.families import decoder_spec
from faser.engine.checkpoints.families.architecture import DecoderSpec
from faser.engine.checkpoints.files import read_model_config
from faser.engine.execution.models import tensors
from faser.engine.execution.models.loader import load_decoder
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.startup.warm_up import WarmUp
from faser.kernels.cpu.build import find_compiler
from faser.kernels.cuda.choices import Choices, Way
from faser.kernels.cuda.flashinfer.backend import FlashInferBackend
from faser.kernels.cuda.flashinfer.device_kernels import triton_kernels
from faser.kernels.cuda.triton import launcher
from faser.kernels.cuda.triton.experts import tiles_for
from faser.kernels.cuda.triton.scaled_fp8 import ScaledFp8
from faser.kernels.interface.kv_cache import KvShape
from tests.kernels.cuda.fake_device import FakeAccelerator
from tests.kernels.cuda.flashinfer.fake_flashinfer import FakeFlashInfer

_MOST_ROWS = 1024  # of a mixture: no more tiles come behind
_ROWS = (1, 2, 3, 5, 16, 17, 32)  # one, few and many; multiples of 16, which Triton compiles apart, and others
_FP8_ROWS = (1, 2, 3, 5, 32)
_SLOTS = 7
_SMALL_VOCAB = 512  # no kernel of a layer knows the vocabulary
_DRIVER_CALL = re.compile(r"\bcu[A-Z]\w+")
_LAUNCHER = "__triton_launcher"  # a C module for each signature, in versions before 3.7


@dataclass(slots=True)
class Compiling:
    """Takes the place of launches. keys: of the kernels that were asked for. compiles: or only lists them."""

    arch: int
    compiles: bool
    keys: set[str] = field(default_factory=set)

    def install(self) -> None:
        triton.runtime.driver.set_active(_Nowhere(self.arch))
        launch, compiling = JITFunction.run, self

        def run(kernel: Any, *args: Any, **options: Any) -> Any:
            if "WIDE" in options:
                options["WIDE"] = False  # says that the tensors lie on a CPU, which they do not there
            if "DEPENDENT" in options:
                options |= {"DEPENDENT": True, "launch_pdl": True}  # as for tensors on a GPU
            found = launch(kernel, *args, **{**options, "warmup": True})
            if found is not None:
                _compile_launcher(found)
            return found

        JITFunction.run = run
        triton.knobs.runtime.jit_cache_hook = compiling.asked

    def asked(self, *, key: str, fn: Any, **_: Any) -> bool:
        """Note a kernel; return whether nothing is to be compiled."""
        if (said := f"{fn.name} {key}") not in self.keys:
            self.keys.add(said)
            sys.stderr.write(f"{len(self.keys)}: {fn.name}\n")
        return not self.compiles


@dataclass(frozen=True, slots=True)
class _Nowhere:
    """A driver of Triton's for a GPU that is not there."""

    arch: int

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def _compile_launcher(kernel: Any) -> None:
    """It is in the cache before it is loaded, which takes a driver; Triton says then that it cannot load it."""
    if _LAUNCHER in Path(nvidia_driver.__file__).read_text("utf-8"):
        try:
            nvidia_driver.CudaLauncher(kernel.src, kernel.metadata)
        except ImportError as error:
            if "libcuda" not in str(error):
                raise


class _Zeros:
    """A WeightSource: made in no time, whatever the shape."""

    def __init__(self, spec: DecoderSpec) -> None:
        self._shapes = tensors.tensor_shapes(spec)

    def names(self) -> list[str]:
        return list(self._shapes)

    def get(self, name: str) -> torch.Tensor:
        return torch.zeros(self._shapes[name], dtype=torch.bfloat16)


@torch.inference_mode()
def layers(
    config: Config,
    directory: Path,
    *,
    quantization: str | None = None,
    rows_of: Sequence[int] = _ROWS,
) -> None:
    """One layer of a model, and its logits, for every number of rows. quantization: the setting."""
    one = config | {"num_hidden_layers": 1, "vocab_size": _SMALL_VOCAB, "bos_token_id": 0}
    spec = read_model_config(write_shape(directory, one)).spec
    backend = _backend(fp8=quantization == "fp8")
    most = max(rows_of)
    decoder = load_decoder(
        directory,
        backend,
        torch.bfloat16,
        max_model_len=BLOCK_SIZE,
        max_rows=most,
        quantization=quantization,
        source=_Zeros(spec),
        progress=lambda *_: None,
    )
    kv = KvShape(
        heads=((spec.num_kv_heads, spec.head_dim),),
        num_blocks=most,
        block_size=BLOCK_SIZE,
        dtype=torch.bfloat16,
    )
    runner = Runner(decoder, backend, kv)
    for rows in rows_of:
        batch = batch_of(
            sequences=rows,
            rows_each=1,
            context=BLOCK_SIZE,
            num_blocks=most,
            block_size=BLOCK_SIZE,
            vocab_size=_SMALL_VOCAB,
        )
        runner.forward(batch)
        runner.logits(range(rows))


def sampling(vocab: int, cap: int) -> None:
    """All that requests can ask for, with drafts of both kinds."""
    logits = torch.zeros(_SLOTS * (cap + 1), vocab)
    backend = _backend()
    for method in ("coupled", "probabilistic"):
        drafts = SpeculationConfig(
            policy="fixed", method="draft_model", num_speculative_tokens=cap, draft_sample_method=method
        )
        WarmUp(backend, logits, drafts, verifies=True, drafts=True).run(1)


def _backend(*, fp8: bool = False) -> FlashInferBackend:
    device = FakeAccelerator()
    products = ScaledFp8(device.device) if fp8 else None
    choices = Choices(_EveryWay())
    return FlashInferBackend(device, FakeFlashInfer(device), triton_kernels(device.device), products, choices)


class _EveryWay:
    """A clock that lets every way to compute something ask for its kernels."""

    def seconds(self, work: Way) -> float:
        work()
        return 1.0


def run() -> None:
    sizes = ON_DEVICE
    sampling(sizes.vocab, sizes.cap)
    with tempfile.TemporaryDirectory(prefix="faser-shapes-") as work:
        for place, config in enumerate((sizes.target, sizes.draft, *sizes.checked)):
            layers(config, Path(work, str(place)))
        layers(sizes.target, Path(work, "fp8"), quantization="fp8", rows_of=_FP8_ROWS)
        for place, config in enumerate(sizes.families):
            layers(config, Path(work, f"family{place}"), rows_of=(*_ROWS, *_rows_by_tiles(decoder_spec(config))))


def _rows_by_tiles(spec: DecoderSpec) -> list[int]:
    """Return, for each way to divide a mixture's products, the least rows that are computed so."""
    if not spec.has_experts:
        return []
    network = experts_of(spec)
    found = {tiles_for(rows * network.top_k, network.num_experts): rows for rows in range(_MOST_ROWS, 0, -1)}
    return sorted(found.values())


def add_loader() -> None:
    """The C module by which Triton loads kernels."""
    with tempfile.TemporaryDirectory(prefix="faser-loader-") as work:
        launcher.build(Path(work))
        launcher.add_to_cache(Path(work))


def empty_driver(directory: Path) -> None:
    """A library that launchers are linked with as with the driver's: it has the names of its functions."""
    compiler = find_compiler(("gcc", "clang", "cc"))
    assert compiler is not None, "there is no C compiler"
    names = sorted(set(_DRIVER_CALL.findall(Path(nvidia_driver.__file__).read_text("utf-8"))))
    source, library = directory / "driver.c", directory / "libcuda.so.1"
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in names), "utf-8")
    flags = ("-shared", "-fPIC", "-Wl,-soname,libcuda.so.1")
    subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True)
    (directory / "libcuda.so").symlink_to(library)
    triton.knobs.nvidia.libcuda_path = str(directory)


def main(arguments: Sequence[str]) -> int:
    asked = parser().parse_args(arguments)
    if not hasattr(triton, "knobs") or triton.knobs.runtime.interpret:
        sys.exit("TRITON_INTERPRET is set: nothing would be compiled")
    compiling = Compiling(arch=asked.arch, compiles=not asked.keys)
    compiling.install()
    with tempfile.TemporaryDirectory(prefix="faser-driver-") as driver:
        if compiling.compiles:
            for name in ("triton.runtime.build", "faser"):  # which warns of results, that nothing has computed
                logging.getLogger(name).setLevel(logging.ERROR)
            empty_driver(Path(driver))
            add_loader()
        run()
    if asked.keys:
        print("\n".join(sorted(compiling.keys)))
    else:
        print(f"{len(compiling.keys)} variants, Triton {triton.__version__}, Python {sys.version.split()[0]}")
    return 0


def parser() -> argparse.ArgumentParser:
    made = command_line(__doc__)
    made.add_argument("--arch", type=int, default=90, help="compute capability without its point [90]")
    made.add_argument("--keys", action="store_true", help="print Triton's keys, compile nothing")
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
