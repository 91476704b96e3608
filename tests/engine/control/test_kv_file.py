"""KvFile: a map from digests to records that is bounded, outlives its process, and never returns a wrong byte."""

import os
import resource
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import pytest

from faser.engine.control.kv_file import KvFile
from faser.errors import ConfigError

RECORD = 4096
ROOM = 1 << 20
KEY, OTHER_KEY = bytes(32), b"\1" * 32

_KILLED = """
import sys
from pathlib import Path
from faser.engine.control.kv_file import KvFile
from tests.engine.control.test_kv_file import KEY, content, name

file = KvFile(Path(sys.argv[1]), 1 << 23, key=KEY, record_bytes=1 << 20)
for number in range(10**6):
    file.write(name(number), memoryview(content(number, 1 << 20)))
    print(number, flush=True)
"""


def name(number: int) -> bytes:
    return blake2b(str(number).encode(), digest_size=32).digest()


def content(number: int, size: int = RECORD) -> bytearray:
    return bytearray((name(number) * (size // 32 + 1))[:size])


def opened(folder: Path, *, num_records: int = ROOM // RECORD, key: bytes = KEY, size: int = RECORD) -> KvFile:
    return KvFile(folder, num_records * (size + 72), key=key, record_bytes=size)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[KvFile]:
    found = opened(tmp_path / "kv", num_records=4)
    yield found
    found.close()


def write(file: KvFile, *numbers: int) -> None:
    for number in numbers:
        file.write(name(number), memoryview(content(number, file.record_bytes)))


def there(file: KvFile, numbers: range) -> list[int]:
    """The numbers whose records are there; they must be right."""
    buffer, found = bytearray(file.record_bytes), []
    for number in numbers:
        if file.read(name(number), memoryview(buffer)):
            assert buffer == content(number, file.record_bytes)
            found.append(number)
    return found


def test_records_outlive_the_process(tmp_path: Path) -> None:
    first = opened(tmp_path)
    write(first, 1, 2, 3)
    assert there(first, range(5)) == [1, 2, 3]
    first.close()
    second = opened(tmp_path)
    assert there(second, range(5)) == [1, 2, 3]
    assert second.num_read_bytes == 3 * RECORD
    second.close()


def test_the_least_recently_used_record_makes_room_also_after_a_restart(tmp_path: Path) -> None:
    first = opened(tmp_path, num_records=4)
    write(first, 1, 2, 3, 4)
    first.use([name(1), name(2)])  # 1 last, as the beginning of a sequence
    write(first, 5)
    assert there(first, range(9)) == [1, 2, 4, 5]
    first.close()
    second = opened(tmp_path, num_records=4)
    write(second, 6, 7)
    assert there(second, range(9)) == [1, 5, 6, 7]
    second.close()


def test_no_file_grows_beyond_the_size(tmp_path: Path) -> None:
    file = opened(tmp_path, num_records=4)
    write(file, *range(20))
    file.close()
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*")) <= 4 * (RECORD + 72) + 64
    smaller = opened(tmp_path, num_records=2)
    assert len(there(smaller, range(20))) <= 2
    write(smaller, 30, 31, 32)
    assert there(smaller, range(40)) == [31, 32]
    smaller.close()
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*")) <= 2 * (RECORD + 72) + 64


def test_another_models_records_stay_until_there_is_no_room_for_both(tmp_path: Path) -> None:
    first = opened(tmp_path, num_records=6)
    write(first, 1, 2, 3)
    first.close()
    other = opened(tmp_path, num_records=6, key=OTHER_KEY)
    assert there(other, range(9)) == []
    write(other, 1, 2)
    other.close()
    first = opened(tmp_path, num_records=6)
    assert there(first, range(9)) == [1, 2, 3]
    first.close()
    other = opened(tmp_path, num_records=6, key=OTHER_KEY)
    write(other, 3, 4, 5, 6)
    assert there(other, range(9)) == [1, 2, 3, 4, 5, 6]
    other.close()
    first = opened(tmp_path, num_records=6)
    assert there(first, range(9)) == []
    first.close()


def test_a_process_that_is_killed_while_it_writes_leaves_no_wrong_record(tmp_path: Path) -> None:
    """It writes in a circle, so most records are written over older ones."""
    command = [sys.executable, "-c", _KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while int(process.stdout.readline()) < 30:
            pass
        time.sleep(0.003)
        process.send_signal(signal.SIGKILL)
    file = KvFile(tmp_path, 1 << 23, key=KEY, record_bytes=1 << 20)
    assert len(there(file, range(500))) >= 5
    file.close()


def test_a_record_without_its_entry_is_not_there(tmp_path: Path) -> None:
    """As a killed process leaves it: the entry was cleared, and half of the new record written."""
    first = opened(tmp_path, num_records=4)
    write(first, 1, 2)
    first.close()
    (index,) = tmp_path.glob("*/index")
    whole = index.read_bytes()
    index.write_bytes(whole[:64] + bytes(72) + whole[136:])
    second = opened(tmp_path, num_records=4)
    assert there(second, range(5)) == [2]
    write(second, 3, 4, 5)
    assert there(second, range(9)) == [2, 3, 4, 5]
    second.close()


def test_a_record_that_is_damaged_while_it_is_open_is_forgotten_and_logged_once(
    file: KvFile, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(file, 1, 2, 3)
    (records,) = tmp_path.glob("kv/*/records")
    os.truncate(records, RECORD + 7)
    assert there(file, range(5)) == [1]
    assert there(file, range(5)) == [1]
    assert len(caplog.records) == 1
    assert "damaged" in caplog.text
    write(file, 2, 3)
    assert there(file, range(5)) == [1, 2, 3]


def test_a_disk_that_takes_no_more_ends_writing_and_not_reading(
    file: KvFile, caplog: pytest.LogCaptureFixture
) -> None:
    write(file, 1, 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * RECORD + 100, hard))
    try:
        write(file, 3, 4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not file.accepts
    assert len(caplog.records) == 1
    assert "no more KV is kept" in caplog.text
    write(file, 5)
    assert there(file, range(9)) == [1, 2]


def test_files_are_their_owners_alone(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        file = opened(tmp_path / "new" / "kv")
    finally:
        os.umask(umask)
    write(file, 1)
    file.close()
    for path in (tmp_path / "new" / "kv").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert stat.S_IMODE((tmp_path / "new" / "kv").stat().st_mode) == 0o700


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="other users may write to it"):
        opened(tmp_path)


def test_a_link_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    opened(tmp_path).close()
    (records,) = tmp_path.glob("*/records")
    records.unlink()
    records.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="cannot be used"):
        opened(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_a_folder_has_one_user_at_a_time(file: KvFile, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"another server uses it \(process {os.getpid()}\)"):
        opened(tmp_path / "kv")
    assert len(file) == 0


def test_a_size_below_one_record_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dir_size is 4095 bytes; one block of this model takes 4096"):
        KvFile(tmp_path, 4095, key=KEY, record_bytes=RECORD)
