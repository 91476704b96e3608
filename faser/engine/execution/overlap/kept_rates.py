"""Rates of a GPU's processors, measured once and kept on disk: a second start, with other noise, chooses as the
first did.

Owns the file and its name. Decides nothing.
"""

import json
import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from faser.config.environment import cache_dir
from faser.engine.execution.startup.profile import fingerprint
from faser.errors import ConfigError
from faser.kernels.cuda.device_rates import DeviceRates, Report, SplitRates, measure_rates
from faser.kernels.cuda.green_contexts import GreenDriver
from faser.kernels.cuda.memory import CudaMemory
from faser.kernels.cuda.rate_loads import rate_loads
from faser.kernels.cuda.streams import LaneDevice
from faser.kernels.report import driver_version

_log = logging.getLogger("faser.engine")

_FORMAT = 1

# Rates of the device of a driver. Raises GreenContextError where they cannot be measured.
RatesOf = Callable[[GreenDriver, LaneDevice], DeviceRates]


def rates_on(gpu: torch.device, report: Report) -> RatesOf:
    """Measured on that GPU, unless the same one was measured before: by its name, its driver and torch's version.

    Nothing may be recorded yet: see RateLoads.forget.

    report: is told how far measuring is. It is expected to take about a second: .2 of the device's work, the rest
    the driver's, to make some thirty contexts; neither was measured.
    """

    def rates(driver: GreenDriver, device: LaneDevice) -> DeviceRates:
        name = rates_name(
            torch.cuda.get_device_name(gpu), driver.num_processors, driver_version(), torch.__version__
        )
        loads = rate_loads(gpu, driver.num_processors, CudaMemory(gpu))
        return kept_rates(cache_dir() / "cost" / name, lambda: measure_rates(driver, device, loads, report))

    return rates


def rates_name(gpu: str, num_processors: int, driver: str, torch_version: str) -> str:
    """Of the file: another for whatever rates depend on. num_processors: a process may have a part of a GPU."""
    described = {"gpu": gpu, "processors": num_processors, "driver": driver, "torch": torch_version}
    return f"rates-{fingerprint(described)}.json"


def kept_rates(path: Path, measure: Callable[[], DeviceRates]) -> DeviceRates:
    """Those kept at path, or new ones that are then kept there. What cannot be read is measured again."""
    if path.exists():
        try:
            return from_json(path.read_text(encoding="utf-8"), source=str(path))
        except (ConfigError, OSError, UnicodeDecodeError) as error:
            _log.warning("the GPU's processors are measured again: %s", error)
    rates = measure()
    try:
        _keep(path, to_json(rates))
    except OSError as error:
        _log.warning("the GPU's processors will be measured at every start: %s", error)
    return rates


def to_json(rates: DeviceRates) -> str:
    return json.dumps({"format": _FORMAT, **asdict(rates)}, indent=1) + "\n"


def from_json(text: str, *, source: str) -> DeviceRates:
    """Raises ConfigError that names source and what is wrong."""
    try:
        content = json.loads(text)
        version = content.pop("format")
        if version != _FORMAT:
            raise ConfigError(f"{source}: rates of format {version}; this version reads {_FORMAT}")
        splits = tuple(SplitRates(**each) for each in content.pop("splits"))
        return DeviceRates(**content, splits=splits)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{source} has no rates: {type(error).__name__}: {error}") from error


def _keep(path: Path, text: str) -> None:
    """Written beside and moved into place: a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=path.name, delete=False, encoding="utf-8"
    ) as file:
        file.write(text)
    os.replace(file.name, path)
