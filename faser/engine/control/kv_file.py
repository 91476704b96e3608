"""KvFile: the keys and values of blocks in a bounded file, found by digest, which outlives the process.

    DIR/lock                     held by the process that uses DIR
    DIR/<key of model>/index     a header, then an entry for each record
    DIR/<key of model>/records   records of one size, in the order of the entries

A record counts once its entry is written, and an entry is cleared before its record is written anew: a process
that is killed leaves no record that is half old and half new. What a machine that loses power leaves, and what
others damage, the checksums show: that of an entry at the start, that of a record whenever it is read. The
checksum of a record covers its digest, so no record is taken for another one.

Files are read and written by calls, and not mapped into memory: a page of a mapped file that cannot be read ends
the process. Only one thread may use a KvFile, but for `has` and the counts. Knows neither tokens nor tensors.
"""

import errno
import fcntl
import logging
import os
import shutil
import stat
import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from faser.errors import ConfigError
from faser.files import make_private_folder

_MAGIC = b"FASERKV1"
_CHECK_BYTES = 16
_HEADER = struct.Struct("<8s32sQ")  # magic, key of the model, bytes of a record
_ENTRY = struct.Struct("<32s16sQ")  # digest, checksum of the record, when it was used
_HEADER_BYTES = _HEADER.size + _CHECK_BYTES
_ENTRY_BYTES = _ENTRY.size + _CHECK_BYTES
_CLEARED = bytes(_ENTRY_BYTES)

_log = logging.getLogger("faser.engine")


@dataclass(slots=True)
class _Record:
    slot: int
    checksum: bytes


class KvFile:
    """File of KV blocks. size: bytes that all models together may take. key: 32 bytes, all that records depend on.

    Raises ConfigError where the directory cannot be used, and where another process uses it.
    """

    def __init__(self, directory: Path, size: int, *, key: bytes, record_bytes: int) -> None:
        self.record_bytes = record_bytes
        self.num_read_bytes = self.num_written_bytes = 0
        self._directory = directory
        self._folder = directory / key.hex()
        self._size = size
        self.capacity = size // (record_bytes + _ENTRY_BYTES)
        if not self.capacity:
            raise ConfigError(f"kv_cache_dir_size is {size} bytes; one block of this model takes {record_bytes}")
        self._lock = _locked(directory)
        self._records: OrderedDict[bytes, _Record] = OrderedDict()  # least recently used first
        self._free: list[int] = []
        self._num_slots = 0
        self._tick = 0
        self._complained = False
        self.accepts = True  # False: the disk has refused a record
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._index = _open(self._folder / "index")
            self._data = _open(self._folder / "records")
            self._read_index(_HEADER.pack(_MAGIC, key, record_bytes))
        except OSError as error:
            raise ConfigError(f"kv_cache_dir is {directory}; it cannot be used: {error}") from None
        self._others = self._other_models()

    def __len__(self) -> int:
        return len(self._records)

    @property
    def num_bytes(self) -> int:
        """Bytes of this model's records."""
        return self._num_slots * self.record_bytes

    def has(self, digest: bytes) -> bool:
        """Return whether there is a record, which may still prove damaged. May be called in any thread."""
        return digest in self._records

    def read(self, digest: bytes, into: memoryview) -> bool:
        """Read a record. False: there is none, or it is damaged, and then it is forgotten."""
        record = self._records.get(digest)
        if record is None:
            return False
        try:
            complete = os.preadv(self._data, [into], record.slot * self.record_bytes) == self.record_bytes
        except OSError as error:
            complete, problem = False, str(error)
        else:
            problem = "it is damaged"
        if not complete or _checksum(digest, into) != record.checksum:
            self._complain("a record of %s is not used: %s", self._folder, problem)
            self._forget(digest)
            return False
        self.num_read_bytes += self.record_bytes
        return True

    def write(self, digest: bytes, content: memoryview) -> None:
        """Add a record, in place of the least recently used one where there is no room."""
        if not self.accepts or digest in self._records:
            return
        try:
            slot = self._take_slot()
            _write_all(self._data, content, slot * self.record_bytes)
            self._tick += 1
            record = _Record(slot, _checksum(digest, content))
            self._write_entry(digest, record)
        except OSError as error:
            self.accepts = False
            reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error)
            _log.warning("no more KV is kept in %s until the next start: %s", self._directory, reason)
            return
        self._records[digest] = record
        self.num_written_bytes += self.record_bytes

    def use(self, digests: Sequence[bytes]) -> None:
        """Note that a sequence has used these records, which follow each other: the last ones make room first."""
        for digest in reversed(digests):
            if (record := self._records.get(digest)) is not None:
                self._records.move_to_end(digest)
                self._tick += 1
                with suppress(OSError):  # then the old entry stays
                    self._write_entry(digest, record)

    def close(self) -> None:
        """Let another process use the directory."""
        for each in (self._index, self._data, self._lock):
            os.close(each)

    @property
    def _total_bytes(self) -> int:
        own = self._num_slots * (self.record_bytes + _ENTRY_BYTES)
        return own + sum(num_bytes for _, num_bytes in self._others)

    def _read_index(self, header: bytes) -> None:
        """Take in the entries that are whole, and whose record there is."""
        header += _check(header)
        content = _read_all(self._index)
        if content[:_HEADER_BYTES] != header:
            if content:
                _log.warning(
                    "%s is damaged or was not written by FASER; starting with an empty cache", self._folder
                )
            os.ftruncate(self._data, 0)
            os.ftruncate(self._index, 0)
            _write_all(self._index, memoryview(header), 0)
            return
        entries = memoryview(content)[_HEADER_BYTES:]
        num_whole = os.fstat(self._data).st_size // self.record_bytes
        self._num_slots = min(-(-len(entries) // _ENTRY_BYTES), num_whole, self.capacity)
        found, num_bad = [], max(len(entries) // _ENTRY_BYTES - num_whole, 0)
        for slot in range(self._num_slots):
            entry = entries[slot * _ENTRY_BYTES : (slot + 1) * _ENTRY_BYTES]
            if entry == _CLEARED:
                continue
            if len(entry) < _ENTRY_BYTES or _check(entry[: _ENTRY.size]) != entry[_ENTRY.size :]:
                num_bad += 1
                continue
            digest, checksum, tick = _ENTRY.unpack(entry[: _ENTRY.size])
            found.append((tick, digest, _Record(slot, checksum)))
        for tick, digest, record in sorted(found, key=lambda each: each[0]):
            self._records[digest] = record
            self._tick = tick
        held = {each.slot for each in self._records.values()}
        self._free = [slot for slot in range(self._num_slots) if slot not in held]
        os.ftruncate(self._index, _HEADER_BYTES + self._num_slots * _ENTRY_BYTES)
        os.ftruncate(self._data, self._num_slots * self.record_bytes)
        if num_bad:
            _log.warning("ignoring %d damaged records of %s", num_bad, self._folder)

    def _take_slot(self) -> int:
        """A slot whose entry is cleared: a free one, a new one, or that of the least recently used record."""
        if not self._free and self._num_slots < self.capacity:
            step = self.record_bytes + _ENTRY_BYTES
            while self._others and self._total_bytes + step > self._size:
                self._drop_other()
            self._num_slots += 1
            return self._num_slots - 1
        slot = self._free.pop() if self._free else self._records.popitem(last=False)[1].slot
        self._clear(slot)
        return slot

    def _forget(self, digest: bytes) -> None:
        record = self._records.pop(digest)
        self._free.append(record.slot)

    def _clear(self, slot: int) -> None:
        _write_all(self._index, memoryview(_CLEARED), _HEADER_BYTES + slot * _ENTRY_BYTES)

    def _write_entry(self, digest: bytes, record: _Record) -> None:
        entry = _ENTRY.pack(digest, record.checksum, self._tick)
        _write_all(self._index, memoryview(entry + _check(entry)), _HEADER_BYTES + record.slot * _ENTRY_BYTES)

    def _other_models(self) -> list[tuple[Path, int]]:
        """Folders of other models with their bytes, the one that was used last first."""
        found = []
        for folder in self._directory.iterdir():
            with suppress(OSError):
                if folder != self._folder and (index := (folder / "index").stat()):
                    num_bytes = index.st_size + (folder / "records").stat().st_size
                    found.append((index.st_mtime, folder, num_bytes))
        return [(folder, num_bytes) for _, folder, num_bytes in sorted(found, reverse=True)]

    def _drop_other(self) -> None:
        folder, _ = self._others.pop()
        _log.info("removing the cached KV of another model to make room: %s", folder)
        shutil.rmtree(folder, ignore_errors=True)

    def _complain(self, message: str, *args: object) -> None:
        """Log the first problem alone."""
        if not self._complained:
            _log.warning(message, *args)
        self._complained = True


def _locked(directory: Path) -> int:
    """The open lock of a directory, which is made where it is missing. Raises ConfigError."""
    try:
        make_private_folder(directory)
        found = _open(directory / "lock")
        try:
            fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(found, 32, 0).decode("ascii", "replace").strip()
            os.close(found)
            raise ConfigError(
                f"kv_cache_dir is {directory}; another server uses it (process {holder}). "
                "Give each server a directory of its own."
            ) from None
        os.ftruncate(found, 0)
        os.pwrite(found, str(os.getpid()).encode(), 0)
    except OSError as error:
        raise ConfigError(f"kv_cache_dir is {directory}; it cannot be used: {error}") from None
    return found


def _open(path: Path) -> int:
    found = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return found


def _read_all(file: int) -> bytes:
    with open(os.dup(file), "rb") as found:
        return found.read()


def _write_all(file: int, content: memoryview, at: int) -> None:
    while content:
        count = os.pwrite(file, content, at)
        content, at = content[count:], at + count


def _check(content: bytes | memoryview) -> bytes:
    return blake2b(content, digest_size=_CHECK_BYTES).digest()


def _checksum(digest: bytes, content: memoryview) -> bytes:
    """Return the checksum of a record. It covers the digest, so that no record is taken for another one."""
    found = blake2b(digest, digest_size=_CHECK_BYTES)
    found.update(content)
    return found.digest()


def state_digests(digest: bytes, count: int) -> Iterable[bytes]:
    """The names of the records that together hold the state after the tokens that digest names."""
    for number in range(count):
        yield blake2b(b"state" + number.to_bytes(4, "little") + digest, digest_size=len(digest)).digest()
