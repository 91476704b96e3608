"""Clocks, power and temperature of the device, read by NVML beside each turn: a ratio of turns at different clocks
compares clocks."""

from typing import Any

from benchmarks.gpu.record import Json


def nvml() -> Any:
    """NVML's Python bindings, initialised; None where they or a driver are missing."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


class Clocks:
    """Readings of device 0. bindings: None: there is nothing to read, as on a CPU."""

    def __init__(self, bindings: Any) -> None:
        self._nvml = bindings
        self._device = None if bindings is None else bindings.nvmlDeviceGetHandleByIndex(0)

    def read(self) -> Json:
        """Return sm_mhz, memory_mhz, watts and celsius now; nothing where there is no device. Takes about 1 ms."""
        if self._nvml is None:
            return {}
        read = self._nvml
        return {
            "sm_mhz": read.nvmlDeviceGetClockInfo(self._device, read.NVML_CLOCK_SM),
            "memory_mhz": read.nvmlDeviceGetClockInfo(self._device, read.NVML_CLOCK_MEM),
            "watts": round(read.nvmlDeviceGetPowerUsage(self._device) / 1000),
            "celsius": read.nvmlDeviceGetTemperature(self._device, read.NVML_TEMPERATURE_GPU),
        }
