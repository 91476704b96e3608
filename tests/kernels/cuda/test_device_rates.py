"""Rates of a GPU's parts: what is found on a device whose rates are known, and what is left of it afterwards.

Without a GPU: the device is a clock that computes nothing (fake_rates), the driver counts its handles.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from faser.kernels.cuda.device_rates import STAGE, DeviceRates, RateLoads, SplitRates, measure_rates, splits_of
from faser.kernels.cuda.green_contexts import GreenContextError, Group
from tests.kernels.cuda.fake_green_driver import FakeGreenDriver
from tests.kernels.cuda.fake_rates import A100, H200, L4, Curve, RatedDevice, linear


def device_of(curve: Curve, refuses: int | None = None) -> RatedDevice:
    return RatedDevice(curve, FakeGreenDriver(num_processors=curve.num_processors, refuses=refuses))


class Patient(FakeGreenDriver):
    """Destroys only what nobody works on."""

    device: RatedDevice

    def destroy_stream(self, stream: int) -> None:
        assert self.device.is_idle, "the device still works there"
        super().destroy_stream(stream)


def patient_device_of(curve: Curve) -> RatedDevice:
    driver = Patient(num_processors=curve.num_processors)
    driver.device = RatedDevice(curve, driver)
    return driver.device


def measured(device: RatedDevice) -> DeviceRates:
    return measure_rates(device.driver, device, device.opened(), lambda *_: None)


def assert_close(found: DeviceRates, wanted: DeviceRates) -> None:
    assert found.num_processors == wanted.num_processors
    assert found.bytes_per_s == pytest.approx(wanted.bytes_per_s)
    assert found.operations_per_s == pytest.approx(wanted.operations_per_s)
    assert [(each.verify, each.draft) for each in found.splits] == [
        (each.verify, each.draft) for each in wanted.splits
    ]
    for one, other in zip(found.splits, wanted.splits, strict=True):
        assert one.bytes_per_s == pytest.approx(other.bytes_per_s)
        assert one.operations_per_s == pytest.approx(other.operations_per_s)


@pytest.mark.parametrize("curve", [H200, A100, L4, linear(9), linear(148)])
def test_every_part_is_found_to_do_what_it_does(curve: Curve) -> None:
    """First runs that load kernels, a clock that is slow at first and the host's launches are not in the rates.

    Caught: group and remainder swapped, a first run that counts, everything measured on a cold device, kernels
    chosen for the whole device, tensors used before they are filled, two parts at the same time.
    """
    assert_close(measured(device_of(curve)), curve.rates())


def test_three_runs_in_a_row_that_are_disturbed_change_nothing() -> None:
    """Caught: the mean of the runs, one more slow run because it is the first."""
    device = device_of(H200)
    device.slower = lambda number: 9.0 if number % 7 in (1, 2, 3) else 1.0
    found = measured(device).splits
    assert [each.bytes_per_s for each in found] == pytest.approx(
        [each.bytes_per_s for each in H200.rates().splits]
    )


def test_an_h200_is_measured_within_a_second_of_its_time() -> None:
    device = device_of(H200)
    measured(device)
    assert device.now_s - 33 * device.first_s < 0.5
    assert len(device.given) < 400


def test_parts_are_made_one_at_a_time_and_nothing_is_left() -> None:
    """Caught: contexts that stay, one workspace of cuBLAS for each stream, tensors that stay."""

    class OneAtATime(FakeGreenDriver):
        def context(self, group: Group) -> object:
            assert not self.contexts
            assert device.is_idle
            return super().context(group)

    device = RatedDevice(H200, OneAtATime())
    measured(device)
    assert device.driver.log.count("context") == 32
    assert device.driver.contexts == device.driver.streams == {}
    assert (device.most_workspaces, device.workspaces, device.is_open) == (1, set(), False)
    assert device.current is device.default


def test_progress_counts_everything_and_the_splits() -> None:
    told: list[tuple[str, int, int]] = []
    device = device_of(L4)
    measure_rates(device.driver, device, device.opened(), lambda *each: told.append(each))
    assert told == [(STAGE, done, 8) for done in range(9)]


@pytest.mark.parametrize("call", range(3 + 2 * 4 - 1))
def test_a_refusal_at_any_call_of_the_driver_leaves_nothing(call: int) -> None:
    """Of 20 processors: two splits, and two contexts and streams for each."""
    device = device_of(linear(20), refuses=call)
    with pytest.raises(GreenContextError, match="CUDA_ERROR_NOT_SUPPORTED, operation not supported"):
        measured(device)
    assert device.driver.contexts == device.driver.streams == {}
    assert not device.is_open


@pytest.mark.parametrize("run", [0, 32, 33, 40, 47, 48, 50, 60, 70])
def test_work_that_fails_is_a_refusal_in_one_line_and_leaves_nothing(run: int) -> None:
    """Caught: cuBLAS's error that goes past the partition, which would have had streams instead; contexts that are
    destroyed, or tensors given up, while the device still works.
    """
    device = patient_device_of(linear(20))
    device.fails = run
    with pytest.raises(GreenContextError) as caught:
        measured(device)
    assert str(caught.value) == f"{STAGE}: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"
    assert device.driver.contexts == device.driver.streams == {}
    assert not device.is_open


@pytest.mark.parametrize(
    "error, words",
    [
        (
            GreenContextError("takes 448 MiB of free memory; there are 12"),
            "takes 448 MiB of free memory; there are 12",
        ),
        (torch.OutOfMemoryError("CUDA out of memory. Tried\nto"), f"{STAGE}: CUDA out of memory. Tried"),
    ],
)
def test_loads_that_do_not_fit_are_a_refusal(error: Exception, words: str) -> None:
    @contextmanager
    def full() -> Iterator[RateLoads]:
        raise error
        yield device

    device = device_of(H200)
    with pytest.raises(GreenContextError) as caught:
        measure_rates(device.driver, device, full(), lambda *_: None)
    assert str(caught.value) == words
    assert device.driver.contexts == {}


def test_a_clock_that_stands_still_is_a_refusal() -> None:
    device = device_of(H200)
    device.slower = lambda _number: 0.0
    device.launch_s = device.first_s = 0.0
    with pytest.raises(GreenContextError, match=r"a run took 0\.0 s"):
        measured(device)


@pytest.mark.parametrize("num_processors", range(1, 200))
def test_every_device_has_splits_into_groups_of_eight_or_is_refused(num_processors: int) -> None:
    driver = FakeGreenDriver(num_processors=num_processors)
    if num_processors <= 8:
        with pytest.raises(GreenContextError, match=f"{num_processors} processors cannot be divided"):
            splits_of(driver)
        return
    found = [(group.count, rest.count) for group, rest in splits_of(driver)]
    wanted = [(count, num_processors - count) for count in range(8, num_processors, 8)]
    assert found == wanted[::-1]


def test_what_a_driver_makes_of_wishes_is_what_counts() -> None:
    """Groups of 64 here. Caught: counts that were asked for, a remainder of nothing, one split several times."""

    class Coarse(FakeGreenDriver):
        def split(self, count: int):  # type: ignore[no-untyped-def]
            return super().split(-(-count // 64) * 64)

    assert [(one.count, other.count) for one, other in splits_of(Coarse())] == [(128, 4), (64, 68)]
    with pytest.raises(GreenContextError, match="64 processors cannot be divided"):
        splits_of(Coarse(num_processors=64))


@pytest.mark.parametrize(
    "wrong",
    [
        {"bytes_per_s": 0.0},
        {"operations_per_s": math.nan},
        {"operations_per_s": math.inf},
        {"splits": ()},
        {"num_processors": 131},
    ],
)
def test_rates_that_nobody_measured_are_none(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"rates are|remainders are|no split of 131"):
        replace(H200.rates(), **wrong)  # type: ignore[arg-type]


def test_splits_are_in_order_and_have_processors() -> None:
    rates = H200.rates()
    with pytest.raises(ValueError, match="ascending"):
        replace(rates, splits=rates.splits[::-1])
    with pytest.raises(ValueError, match="ascending"):
        replace(rates, splits=rates.splits[:1] * 2)
    nobody = SplitRates(verify=0, draft=12, operations_per_s=1.0, bytes_per_s=1.0)
    with pytest.raises(ValueError, match="0 and 12 processors are no split"):
        replace(rates, splits=(nobody,))
