"""Objects shared by all routes: the engine, the operator's settings, and the Service that holds both.

AsyncEngine is the EngineClient; tests use a fake.
"""

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol, Self, TypeVar

from fastapi import Request as HttpRequest
from pydantic import BaseModel

from faser.api.bodies.body import read_body
from faser.api.bodies.fields import FieldChecker
from faser.api.middleware.key_limits import KeyLimits
from faser.api.middleware.keys import CacheNamespaces
from faser.api.parsing.registry import choose_parsers
from faser.api.requests.adapters import AdapterLoader, Adapters
from faser.api.requests.chat_renderer import ChatRenderer
from faser.api.requests.prompts import TextWorker
from faser.config.speculation import SpeculationConfig
from faser.engine.client.output_stream import Timing
from faser.engine.text.tokenizer import Tokenizer
from faser.errors import NotReadyError, OverloadError, RequestError, TargetError, UnknownModelError
from faser.metrics.replicas import ServerMetrics
from faser.metrics.server import QUEUE_FULL, TARGET
from faser.types.adapter import Adapter
from faser.types.answer import RequestOutput
from faser.types.engine import EngineState, ModelInfo
from faser.types.request import Request
from faser.types.sampling import MAX_LOGPROBS
from faser.types.statistics import EngineStats

_Body = TypeVar("_Body", bound=BaseModel)

DEFAULT_MAX_REQUEST_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CorsSettings:
    """Origins: no page of another origin is let in while there are none. "*" stands for all."""

    origins: tuple[str, ...] = ()
    methods: tuple[str, ...] = ("*",)
    headers: tuple[str, ...] = ("*",)
    credentials: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """Settings of one front-end.

    served_model_names: at least one; a request without a model name gets the first.
    model: the model as the operator names it, a path or hub id, from which load generators load the tokenizer;
        None: the first served name.
    api_keys: empty: no key is required. enable_metrics_auth: /metrics requires a key too.
    share_cache_across_keys: requests with different keys reuse each other's KV blocks and past answers.
    chat_template: Jinja text that replaces the model's; None keeps the model's.
    tool_call_parser, reasoning_parser: names, or auto: as the template suggests.
    enable_auto_tool_choice: requests may leave it to the model whether it calls functions.
    generation_defaults: values for fields that a request leaves out, by the names of SamplingParams.
    allowed_hosts: further names to which a server without keys answers; *: all.
    key_limits: of each API key. request_timeout_s: longest time a request may take; None: no limit.
    speculation: the limits of what a request may ask for. spec_decode_metrics: none, summary or detailed.
    per_request_metrics: answers tell their times. responses_store_bytes: most that responses kept for later
    requests take; 0: none are kept. shorten_max_tokens: max_tokens beyond the context is lowered on every route,
    not on /v1/messages alone. page: / shows the page. most_viewers: of its live view, at once.
    has_one_user: only programs of this machine reach the server, so answers report cached tokens to all requests.
    runtime_adapters: clients may load and unload adapters.
    namespace_secret: of the caches' namespaces; None: a new one, so no namespace is that of an earlier process.
    """

    served_model_names: tuple[str, ...]
    model: str | None = None
    api_keys: tuple[str, ...] = ()
    share_cache_across_keys: bool = False
    max_request_bytes: int = DEFAULT_MAX_REQUEST_BYTES
    strict_request_fields: bool = False
    chat_template: str | None = None
    tool_call_parser: str = "auto"
    enable_auto_tool_choice: bool = True
    reasoning_parser: str = "auto"
    generation_defaults: Mapping[str, float] = field(default_factory=dict)
    version: str = "0"
    force_include_usage: bool = False
    per_request_metrics: bool = False
    shorten_max_tokens: bool = False
    max_logprobs: int = MAX_LOGPROBS
    enable_metrics_auth: bool = False
    key_limits: KeyLimits = field(default_factory=KeyLimits)
    cors: CorsSettings = field(default_factory=CorsSettings)
    allowed_hosts: tuple[str, ...] = ()
    request_timeout_s: float | None = None
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    spec_decode_metrics: str = "none"
    responses_store_bytes: int = 0
    page: bool = True
    most_viewers: int = 32
    has_one_user: bool = False
    runtime_adapters: bool = False
    namespace_secret: bytes | None = None


class OutputReader(Protocol):
    """The outputs of one accepted request. Exiting the context before the end aborts the request."""

    @property
    def timing(self) -> Timing:
        """When its outputs came, so far."""
        ...

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> RequestOutput:
        """Return what the next engine step added to the request. Raises the FaserError that ends the request."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...


class EngineClient(AdapterLoader, Protocol):
    """One engine; all calls come from one event loop."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def state(self) -> EngineState: ...

    @property
    def state_reason(self) -> str:
        """The reason for the state, in words; may be empty."""
        ...

    @property
    def info(self) -> ModelInfo:
        """Raises NotReadyError before the model is loaded."""
        ...

    @property
    def max_samples(self) -> int:
        """Return the maximum number of samples that the engine holds, running and waiting."""
        ...

    @property
    def stats(self) -> EngineStats: ...

    def submit(self, request: Request, *, num_following: int = 0) -> OutputReader:
        """Accept a request and start it.

        num_following: samples of requests that the same client submits together with it; there must be room for
        all of them.
        Raises RequestError (the request can never be served), OverloadError (the queue is full), NotReadyError.
        """
        ...


class Service:
    """One front-end. created_s: its start, in Unix seconds. num_in_progress: HTTP requests that generate now.

    Raises ModelError if the chat template does not compile.
    """

    def __init__(
        self, engine: EngineClient, settings: ApiSettings, metrics: ServerMetrics, adapters: Adapters
    ) -> None:
        self.engine = engine
        self.adapters = adapters
        self.settings = settings
        self.metrics = metrics
        self.chat_renderer = ChatRenderer(engine.tokenizer, settings.chat_template)
        self.parsers = choose_parsers(
            tool_call_parser=settings.tool_call_parser,
            auto=settings.enable_auto_tool_choice,
            reasoning_parser=settings.reasoning_parser,
            template=self.chat_renderer.tool_template,
        )
        self.fields = FieldChecker(strict=settings.strict_request_fields)
        self.namespaces = CacheNamespaces(
            across_keys=settings.share_cache_across_keys, secret=settings.namespace_secret
        )
        self.text_worker = TextWorker()
        self.created_s = int(time.time())
        self.num_in_progress = 0

    async def read(self, http: HttpRequest, schema: type[_Body]) -> _Body:
        """The body of a request. Raises as read_body."""
        return await read_body(http, schema, max_bytes=self.settings.max_request_bytes)

    def model_name(self, asked: str | None) -> str:
        """The model name of the answer, an adapter's too. asked: of the request. Raises UnknownModelError."""
        served = self.settings.served_model_names
        if asked is None:
            return served[0]
        if asked not in served and self.adapters.get(asked) is None:
            names = (*served, *(each.adapter.name for each in self.adapters))
            raise UnknownModelError(
                f"model {asked[:200]!r} not found; available models: {', '.join(names)}", param="model"
            )
        return asked

    def adapter(self, asked: str | None) -> Adapter | None:
        """The adapter that a request names as its model; None: it names the model itself.

        Raises UnknownModelError, also for one that has been unloaded while the request was read.
        """
        found = self.adapters.get(self.model_name(asked))
        return None if found is None else found.adapter

    def ready_info(self) -> ModelInfo:
        """The model's properties. Raises NotReadyError, and counts it, unless the engine accepts requests."""
        engine = self.engine
        if engine.state is not EngineState.READY:
            self.metrics.rejected(engine.state.value)
            because = f": {engine.state_reason}" if engine.state_reason else ""
            raise NotReadyError(f"the engine is {engine.state}{because}")
        return engine.info

    @asynccontextmanager
    async def submitted(self, requests: Sequence[Request], *, field: str) -> AsyncIterator[list[OutputReader]]:
        """One reader per request; exiting the context aborts unfinished requests.

        field: the field of the body with the prompts; errors of the engine, which knows every prompt as `prompt`,
        name it instead. If the engine refuses a request, those submitted before are aborted: all requests run, or
        none. Raises what EngineClient.submit raises.
        """
        self.num_in_progress += 1
        try:
            async with AsyncExitStack() as stack:
                num_following = sum(request.sampling.n for request in requests)
                readers = []
                for request in requests:
                    num_following -= request.sampling.n
                    readers.append(await stack.enter_async_context(self._submit(request, num_following)))
                yield readers
        except RequestError as error:  # of an engine in this process at once, of one in another process later
            if error.param != "prompt":
                raise
            raise RequestError(str(error), param=field) from None
        finally:
            self.num_in_progress -= 1

    def _submit(self, request: Request, num_following: int) -> OutputReader:
        try:
            return self.engine.submit(request, num_following=num_following)
        except OverloadError as error:
            self.metrics.rejected(TARGET if isinstance(error, TargetError) else QUEUE_FULL)
            raise
        except NotReadyError:
            self.metrics.rejected(self.engine.state.value)
            raise
