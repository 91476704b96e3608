"""Rates on disk: a second start reads what the first one measured, and nothing that is wrong is believed."""

import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from faser.engine.execution.overlap.kept_rates import from_json, kept_rates, rates_name, rates_on, to_json
from faser.errors import ConfigError
from faser.kernels.cuda.device_rates import DeviceRates
from faser.kernels.cuda.green_contexts import GreenContextError, open_green_driver
from faser.kernels.cuda.memory import CudaMemory
from faser.kernels.cuda.streams import CudaLaneDevice
from tests.kernels.cuda.fake_rates import A100, H200, L4, Curve


def unwanted() -> DeviceRates:
    raise AssertionError("they are kept already")


@pytest.mark.parametrize("curve", [H200, A100, L4])
def test_what_was_measured_once_is_read_to_the_last_digit(tmp_path: Path, curve: Curve) -> None:
    rates = curve.rates()
    path = tmp_path / "cost" / "rates-1.json"
    assert kept_rates(path, lambda: rates) == rates
    assert kept_rates(path, unwanted) == rates
    assert [each.name for each in path.parent.iterdir()] == ["rates-1.json"]


def changed(change: Callable[[dict[str, object]], object]) -> str:
    content = json.loads(to_json(H200.rates()))
    change(content)
    return json.dumps(content)


BROKEN = {
    "not JSON": "{",
    "not an object": "[1]",
    "another format": changed(lambda content: content.update(format=2)),
    "no format": changed(lambda content: content.pop("format")),
    "a field that is not there": changed(lambda content: content.pop("bytes_per_s")),
    "a field that nobody knows": changed(lambda content: content.update(watts=700)),
    "a word for a number": changed(lambda content: content.update(bytes_per_s="fast")),
    "no splits": changed(lambda content: content.update(splits=[])),
    "a split without rates": changed(lambda content: content.update(splits=[{"verify": 120, "draft": 12}])),
    "a rate of nothing": changed(lambda content: content.update(operations_per_s=0)),
    "more processors than there are": changed(lambda content: content.update(num_processors=100)),
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN.keys())
def test_what_cannot_be_read_is_named_and_measured_again(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, rates = tmp_path / "rates.json", L4.rates()
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"rates\.json"):
        from_json(text, source=str(path))
    with caplog.at_level(logging.WARNING, logger="faser.engine"):
        assert kept_rates(path, lambda: rates) == rates
    assert str(path) in caplog.text
    assert kept_rates(path, unwanted) == rates


def test_bytes_that_are_no_text_are_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    path.write_bytes(b"\xff\xfe\x00")
    assert kept_rates(path, H200.rates) == H200.rates()


def test_a_folder_that_cannot_be_written_is_told_and_rates_are_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cost").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING, logger="faser.engine"):
        assert kept_rates(tmp_path / "cost" / "rates.json", H200.rates) == H200.rates()
    assert "measured at every start" in caplog.text


def test_a_refusal_is_not_kept(tmp_path: Path) -> None:
    def refused() -> DeviceRates:
        raise GreenContextError("cuGreenCtxCreate: not permitted")

    path = tmp_path / "rates.json"
    with pytest.raises(GreenContextError, match="not permitted"):
        kept_rates(path, refused)
    assert not path.exists()
    assert kept_rates(path, H200.rates) == H200.rates()


def test_a_file_is_plain_to_read() -> None:
    content = json.loads(to_json(H200.rates()))
    assert content.pop("format") == 1
    assert content == json.loads(json.dumps(asdict(H200.rates())))


def test_what_rates_depend_on_names_the_file() -> None:
    """Caught: rates of another GPU, or of a part of one, in a cache folder that several machines share."""
    base: tuple[str, int, str, str] = ("NVIDIA H200", 132, "580.95.05", "2.11.0+cu130")
    others: list[tuple[str, int, str, str]] = [
        ("NVIDIA L4", 132, "580.95.05", "2.11.0+cu130"),
        ("NVIDIA H200", 66, "580.95.05", "2.11.0+cu130"),
        ("NVIDIA H200", 132, "590.48.01", "2.11.0+cu130"),
        ("NVIDIA H200", 132, "580.95.05", "2.12.0+cu130"),
    ]
    assert rates_name(*base) == rates_name(*base)
    assert len({rates_name(*each) for each in (base, *others)}) == 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_parts_do_less_than_everything_and_are_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within seconds, and no memory is kept by torch afterwards."""
    monkeypatch.setenv("FASER_CACHE_DIR", str(tmp_path))
    gpu = torch.device("cuda", torch.cuda.current_device())
    device, driver, memory = CudaLaneDevice(gpu), open_green_driver(gpu), CudaMemory(gpu)
    memory.release()
    held = memory.held_bytes()
    told: list[tuple[str, int, int]] = []
    began_s = time.perf_counter()
    rates = rates_on(gpu, lambda *each: told.append(each))(driver, device)
    assert time.perf_counter() - began_s < 5
    assert memory.held_bytes() == held
    assert told[-1][1] == told[-1][2] == len(rates.splits) + 1
    for each in rates.splits:
        assert each.bytes_per_s < 1.1 * rates.bytes_per_s
        assert each.operations_per_s < 1.1 * rates.operations_per_s
    small, large = rates.splits[0], rates.splits[-1]
    assert small.bytes_per_s < 0.5 * large.bytes_per_s  # a kernel that stays on its part, or it would be as fast
    assert large.operations_per_s < 0.5 * small.operations_per_s
    told.clear()
    assert rates_on(gpu, lambda *each: told.append(each))(driver, device) == rates
    assert told == []
