"""ConfigObject: an object within a config.json, whose fields are read with the values that are supported."""

from typing import Any

from faser.errors import ModelError


class ConfigObject:
    """An object in the config, and its path. Raises ModelError that names the path of anything else."""

    def __init__(self, path: str, value: object) -> None:
        if not isinstance(value, dict):
            raise ModelError(f"{path} is {value!r}; it must be an object")
        self.path = path
        self.fields: dict[str, Any] = value

    def within(self, name: str) -> "ConfigObject":
        return ConfigObject(f"{self.path}.{name}", self.fields.get(name))

    def one_of(self, name: str, supported: tuple[object, ...], default: object = None) -> object:
        """The value of a field, which must be one of `supported`. null is absent."""
        value = self.fields.get(name)
        value = default if value is None else value
        if not any(value is each or (value == each and type(value) is type(each)) for each in supported):
            raise ModelError(
                f"{self.path}.{name} is {value!r}; only {' and '.join(map(repr, supported))} can be read"
            )
        return value

    def group_size(self, name: str = "group_size") -> None:
        """Check the values that share a scale: -1, which is a row, or a multiple of 32."""
        size = self.fields.get(name)
        if size is None or size == -1:
            return
        if not isinstance(size, int) or isinstance(size, bool) or size < 1 or size % 32:
            raise ModelError(f"{self.path}.{name} is {size!r}; only -1 and multiples of 32 can be read")
