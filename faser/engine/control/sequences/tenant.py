"""Tenant: the service that one of those who share the engine has had. What a tenant is, the front-end decides."""

# How much more a generated token counts than a computed prompt token; as in the evaluation of the VTC paper.
_GENERATED_WEIGHT = 2


class Tenant:
    """service: weighted tokens; only grows. num_sequences: its unfinished ones."""

    __slots__ = ("name", "num_sequences", "service")

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_sequences = 0
        self.service = 0

    def prefilled(self, num_tokens: int) -> None:
        """A sequence of its own is admitted. num_tokens: known tokens that are not in the cache."""
        self.service += num_tokens

    def generated(self, num_tokens: int) -> None:
        self.service += _GENERATED_WEIGHT * num_tokens
