"""Every error that FASER raises on purpose. Each class says who is at fault: operator, caller, load or FASER.

    FaserError
    ├── ConfigError            the operator's: a flag, a file, a checkpoint      → exit status 2
    │   └── ModelError         the checkpoint or tokenizer cannot be used
    ├── RequestError           the caller's: names the field and the limit       → 400
    │   ├── GrammarCostError   the caller's: a grammar that costs too much       → 400
    │   └── UnknownModelError  the caller's: no such model                       → 404
    ├── OverloadError          the load's: the queue is full                     → 503 + Retry-After
    │   └── TargetError        the load's: a latency target cannot be met        → 429 + Retry-After
    ├── NotReadyError          ours or the load's: loading, restarting, draining → 503 + Retry-After
    ├── DeadlineError          the load's: not finished by the deadline          → 504
    └── EngineError            ours: a bug struck a request                      → 500
        └── EngineDiedError    ours: the engine died or hung                     → 503 + Retry-After

Exceptions of libraries are translated into these once, where the library is called.
"""


class FaserError(Exception):
    """Root of the tree. str() of every member is one line for the person at fault."""


class ConfigError(FaserError):
    """A flag, a file or a combination of them that cannot work."""


class ModelError(ConfigError):
    """A checkpoint, tokenizer or chat template that cannot be used as it is."""


class RequestError(FaserError):
    """A request that cannot be served. param: dotted path of the field, or None for the whole body."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class GrammarCostError(RequestError):
    """A grammar that takes more time, memory or stack to compile than one may."""


class UnknownModelError(RequestError):
    """The request names a model that is not served here."""


class OverloadError(FaserError):
    """The queue is full. retry_after_s: seconds until a retry has a chance."""

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TargetError(OverloadError):
    """A latency target of the request cannot be met now, and its class refuses such requests."""


class NotReadyError(FaserError):
    """The engine cannot take requests now: loading, warming, restarting, draining or dead."""

    def __init__(self, message: str, *, retry_after_s: int = 5) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineError(FaserError):
    """The request was not finished by its deadline, and has been aborted."""


class EngineError(FaserError):
    """The engine had a bug while it served an accepted request."""


class EngineDiedError(EngineError):
    """The engine ended, or hung and was killed. One death fails many requests; the log has it once.

    retry_after_s: seconds until a retry has a chance.
    """

    def __init__(self, message: str, *, retry_after_s: int = 5) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
