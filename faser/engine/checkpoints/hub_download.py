"""Downloads one model from the Hugging Face hub, as a program of its own, which can be killed at any time.

`python -m faser.engine.checkpoints.hub_download MODEL REVISION PATTERN…`; an empty REVISION is the main branch.
Prints "DONE TOTAL" in bytes while it downloads, then the path of the snapshot; or, with exit status 1, the reason
for which it cannot be had.
"""

import errno
import sys
import threading
from typing import Any

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    model_id, revision, *patterns = arguments
    try:
        path = _download(model_id, revision or None, patterns)
    except Exception as error:  # errors of the hub, of its HTTP client and of the disk have no common class
        _say(_reason(error))
        return 1
    _say(path)
    return 0


def _download(model_id: str, revision: str | None, patterns: list[str]) -> str:
    """The path of the snapshot. Without network: of one that is in the cache."""
    from huggingface_hub import snapshot_download

    try:
        planned = snapshot_download(model_id, revision=revision, allow_patterns=patterns, dry_run=True)
    except Exception as error:  # see main
        try:
            return snapshot_download(model_id, revision=revision, allow_patterns=patterns, local_files_only=True)
        except Exception:
            raise error.__cause__ or error from None
    total = sum(each.file_size or 0 for each in planned if each.will_download)
    return snapshot_download(
        model_id, revision=revision, allow_patterns=patterns, tqdm_class=_byte_counter(total) if total else None
    )


def _byte_counter(total: int) -> Any:
    """A class of progress bars that draws nothing, and prints how many bytes of all files have arrived.

    The hub counts the same bytes twice, as received and as written; the larger number counts here.
    """
    from huggingface_hub.utils.tqdm import tqdm

    class ByteCounter(tqdm):
        _printing = threading.Lock()
        _most = 0

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]
            self._counts_bytes = options.get("unit") == "B"
            self._arrived = 0

        def update(self, n: float | None = 1) -> None:
            if not self._counts_bytes:
                return
            with self._printing:
                self._arrived += int(n or 0)
                if self._arrived > ByteCounter._most:
                    ByteCounter._most = self._arrived
                    _say(f"{min(self._arrived, total)} {total}")

    return ByteCounter


def _reason(error: BaseException) -> str:
    """The first line of the error, or what is wrong with the disk."""
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        from huggingface_hub.constants import HF_HUB_CACHE

        return f"{HF_HUB_CACHE} cannot be written: {error.strerror}"
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _say(text: object) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
