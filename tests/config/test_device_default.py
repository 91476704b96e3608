"""Defaults by device: what a GPU gets unless it was given."""

import msgspec
import pytest

from faser.config.engine import EngineConfig, gpu_defaults
from faser.errors import ConfigError

LARGE, SMALL = 80 << 30, 24 << 30


@pytest.mark.parametrize(
    "memory_bytes, given, wanted",
    [
        (LARGE, {}, (256, 8192)),
        (SMALL, {}, (256, 2048)),
        (0, {}, (256, 2048)),
        (LARGE, {"max_num_seqs": 64}, (64, 8192)),
        (LARGE, {"max_num_seqs": 64, "max_num_batched_tokens": 256}, (64, 256)),
        (LARGE, {"max_num_batched_tokens": 100}, (100, 100)),
        (SMALL, {"max_num_seqs": 4096}, (4096, 4096)),
    ],
)
def test_what_is_given_stays_and_bounds_the_rest(
    memory_bytes: int, given: dict[str, int], wanted: tuple[int, int]
) -> None:
    values = EngineConfig(device="cuda", **given)  # type: ignore[arg-type]
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(values), type=EngineConfig)
    assert sent == values
    numbers = {name: getattr(sent, name) for name in ("max_num_seqs", "max_num_batched_tokens")}
    found = {**numbers, **gpu_defaults(numbers, sent.by_device, memory_bytes)}
    assert (found["max_num_seqs"], found["max_num_batched_tokens"]) == wanted


def test_a_cpus_defaults_are_checked_against_what_is_given() -> None:
    assert EngineConfig(device="auto", max_num_seqs=512).by_device == ("max_num_batched_tokens",)
    with pytest.raises(ConfigError, match="max_num_batched_tokens is 256; it must be at least max_num_seqs"):
        EngineConfig(device="cpu", max_num_seqs=512)
