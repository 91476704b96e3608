"""Finds attention kernels that FlashInfer has yet to compile for the models, and reports or refuses them."""

from collections.abc import Sequence
from pathlib import Path

from faser.engine.checkpoints.families.architecture import DecoderSpec
from faser.engine.execution.startup.sizing import CachedModel
from faser.errors import ConfigError
from faser.kernels.cuda.flashinfer.build import (
    Attention,
    Module,
    compile_time,
    folder_of_compiled,
    needed_modules,
    package_of_modules,
    precompiled_folders,
)
from faser.kernels.cuda.flashinfer.paged_attention import AttentionKind
from faser.kernels.interface.fp8 import FP8
from faser.kernels.interface.shapes import AttentionShape
from faser.types import ProgressCallback


def check_kernels(
    models: Sequence[CachedModel],
    arch: str,
    progress: ProgressCallback,
    *,
    kernels: Path,
    workspace: Path,
    may_compile: bool,
) -> None:
    """Report the kernels that FlashInfer will compile at their first call, and about how long that takes.

    Call it before the first step. Reports nothing where all are compiled, or where a package of compiled modules
    is installed. arch: of arch_of. kernels, workspace: folders of the modules that were compiled ahead of time,
    and of those that FlashInfer compiles.

    Raises ConfigError naming the missing kernels where none may be compiled.
    """
    if package_of_modules():
        return
    folders = precompiled_folders(kernels, arch)
    if may_compile:
        folders = (*folders, folder_of_compiled(workspace, arch))
    missing = [each for each in modules_of(models) if not each.is_in(folders)]
    if not missing:
        return
    listed = ", ".join(each.label for each in missing)
    if not may_compile:
        places = " and ".join(str(folder) for folder in folders)
        raise ConfigError(
            f"no kernels may be compiled, and these are missing: {listed}; looked in {places}; "
            f"{_remedy(missing, arch)}"
        )
    progress(f"compiling kernels for {arch}, {compile_time(missing)} on one core: {listed}", 0, 0)


def modules_of(models: Sequence[CachedModel]) -> tuple[Module, ...]:
    """FlashInfer's modules that these models call."""
    return needed_modules(each for model in models for each in _attention(model))


def _remedy(missing: Sequence[Module], arch: str) -> str:
    if any(each.dtype != "bfloat16" for each in missing):
        return "only those of bfloat16 can be compiled ahead of time: use --dtype bfloat16 or --compile-kernels"
    return f"faser env --build-kernels --arch {arch} --only {','.join(each.name for each in missing)}"


def _attention(model: CachedModel) -> set[Attention]:
    """The kinds of attention among a model's layers."""
    return {_kind(model, window) for window in set(model.spec.windows)}


def _kind(model: CachedModel, window: int | None) -> Attention:
    single = AttentionKind(_shape(model.spec, window), model.dtype, model.kv_dtype, one_row_each=True)
    return Attention(
        head_dim=model.spec.head_dim,
        window=window is not None,
        dtype=str(model.dtype).removeprefix("torch."),
        fp8=model.kv_dtype is FP8,
        decodes=not single.uses_tensor_cores,
    )


def _shape(spec: DecoderSpec, window: int | None) -> AttentionShape:
    return AttentionShape(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        scale=1.0,
        window=window,
    )
