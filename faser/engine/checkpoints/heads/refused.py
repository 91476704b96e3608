"""The kinds of heads that FASER knows by name and does not compute, with the reason for each."""

from collections.abc import Mapping
from typing import Any

from faser.config.vllm_names import REFUSED_HEADS
from faser.errors import ModelError

# Endings and beginnings of architectures, and the kind of head that they stand for.
_ARCHITECTURES = {
    "DFlash2": "dflash2",
    "DFlash": "dflash",
    "DSpark": "dspark",
    "XPress": "dflash",
    "PEagle": "peagle",
    "Peagle": "peagle",
    "MLPSpeculator": "mlp_speculator",
    "Eagle3": "eagle3 of another family",
    "MTP": "mtp",
}


def refuse_kind(kind: object) -> None:
    """Raises ModelError with the reason if this kind of head is refused."""
    reason = REFUSED_HEADS.get(str(kind))
    if reason is not None:
        raise ModelError(f"the head is of kind {kind}, which is not supported: {reason}")


def refuse_architecture(architecture: str) -> None:
    """Raises ModelError with the reason if heads of this architecture are refused."""
    for part, kind in _ARCHITECTURES.items():
        if part in architecture:
            raise ModelError(f"architecture {architecture} of the head is not supported: {REFUSED_HEADS[kind]}")


def refuse_parallel(config: Mapping[str, Any]) -> None:
    """Raises ModelError for a head that drafts several positions in one pass."""
    for name in ("mask_token_id", "pard_token", "ptd_token_id"):
        if config.get(name) is not None:
            raise ModelError(
                f"config.json: {name} is {config[name]!r}, so it drafts in parallel, which is not supported: "
                f"{REFUSED_HEADS['peagle']}"
            )
