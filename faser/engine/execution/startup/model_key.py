"""The key of a loaded model: models whose keys and values of the same tokens have the same bits have the same one.

It covers the bytes of the weights and all that decides what is computed from them and how it is stored. Reading
3 GB of weights takes 2 seconds, so the digest of a file is kept in FASER_CACHE_DIR and found by what no program
can restore after a write: the file's number, size, and time of its last change (ctime).
"""

import hashlib
import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from faser.config.environment import cache_dir
from faser.engine.checkpoints.families.architecture import LongRopeScaling
from faser.engine.checkpoints.files import weight_files
from faser.engine.execution.startup.executor import EngineParts
from faser.engine.execution.startup.step_times import fingerprint
from faser.files import write_atomically
from faser.kernels.cpu.build import chosen_isa, prebuilt_name

_PIECE_BYTES = 64 << 20
_LAYOUT = 1  # of records: raise it when the bytes of a block or snapshot mean something else

_log = logging.getLogger("faser.engine")


def model_key(parts: EngineParts) -> bytes:
    """Return 32 bytes."""
    target, config = parts.target, parts.config
    files, backend = target.files, target.backend
    ropes = [each.rope for each in files.spec.attentions if each.rope is not None]
    long_rope = any(isinstance(each.scaling, LongRopeScaling) for each in ropes)
    isa = chosen_isa() if backend.name == "native" else None
    described = {
        "layout": _LAYOUT,
        "weights": [file_digest(each) for each in weight_files(files.directory)],
        "model": (asdict(files.spec), str(files.dtype), config.quantization),
        "positions": files.max_positions if long_rope else None,
        "kv": (target.kv.heads, str(target.kv.dtype), target.kv.block_size),
        "states": parts.num_snapshots > 0,
        "kernels": (backend.name, isa and prebuilt_name(isa)),
    }
    return hashlib.sha256(fingerprint(described).encode()).digest()


def file_digest(path: Path) -> str:
    """Return a hexadecimal digest of a file's content, which is read unless that was done before."""
    status = path.stat()
    known_as = f"{path.resolve()} {status.st_ino} {status.st_size} {status.st_ctime_ns}"
    kept = cache_dir() / "digests" / hashlib.sha256(known_as.encode()).hexdigest()
    with suppress(OSError, ValueError):
        found = kept.read_text(encoding="ascii").strip()
        if len(bytes.fromhex(found)) == hashlib.sha256().digest_size:
            return found
    pieces = range(0, status.st_size, _PIECE_BYTES)
    with ThreadPoolExecutor() as pool:
        digests = pool.map(lambda start: _piece_digest(path, start), pieces)
        found = hashlib.sha256(b"".join(digests)).hexdigest()
    try:
        write_atomically(kept, found)
    except OSError as error:
        _log.warning(
            "the digest of %s cannot be cached, so every start with kv_cache_dir reads the file again: %s",
            path,
            error,
        )
    return found


def _piece_digest(path: Path, start: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return hashlib.sha256(file.read(_PIECE_BYTES)).digest()
