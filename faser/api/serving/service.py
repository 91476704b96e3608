"""Service: what all routes share: the engine, the settings, the metrics and the chat template."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from faser.api.parsing.formats.registry import ServerParsers, choose_parsers
from faser.api.protocol.unsupported_fields import FieldChecker
from faser.api.serving.engine_client import EngineClient, OutputReader
from faser.api.serving.requests.cache_namespaces import CacheNamespaces
from faser.api.serving.requests.settings import ApiSettings
from faser.api.serving.requests.text_worker import TextWorker
from faser.api.templates.chat_renderer import ChatRenderer
from faser.errors import NotReadyError, OverloadError, RequestError, UnknownModelError
from faser.metrics.server import QUEUE_FULL, Metrics
from faser.types import EngineState, ModelInfo, Request


class InProgress:
    """How many HTTP requests generate now; each enters this context."""

    def __init__(self) -> None:
        self.count = 0

    async def __aenter__(self) -> None:
        self.count += 1

    async def __aexit__(self, *_: object) -> None:
        self.count -= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One front-end. created_s: its start, in Unix seconds. in_progress: HTTP requests that generate now."""

    engine: EngineClient
    settings: ApiSettings
    metrics: Metrics
    chat_renderer: ChatRenderer
    parsers: ServerParsers
    fields: FieldChecker
    namespaces: CacheNamespaces
    text_worker: TextWorker
    in_progress: InProgress
    created_s: int

    @classmethod
    def build(cls, engine: EngineClient, settings: ApiSettings, metrics: Metrics) -> "Service":
        """Raises ModelError if the chat template does not compile."""
        renderer = ChatRenderer(engine.tokenizer, settings.chat_template)
        return cls(
            engine=engine,
            settings=settings,
            metrics=metrics,
            chat_renderer=renderer,
            parsers=choose_parsers(
                tool_call_parser=settings.tool_call_parser,
                auto=settings.enable_auto_tool_choice,
                reasoning_parser=settings.reasoning_parser,
                template=renderer.tool_template,
            ),
            fields=FieldChecker(strict=settings.strict_request_fields),
            namespaces=CacheNamespaces(across_keys=settings.share_cache_across_keys),
            text_worker=TextWorker(),
            in_progress=InProgress(),
            created_s=int(time.time()),
        )

    def model_name(self, asked: str | None) -> str:
        """The model name of the answer. asked: of the request. Raises UnknownModelError."""
        served = self.settings.served_model_names
        if asked is None:
            return served[0]
        if asked not in served:
            raise UnknownModelError(
                f"the model {asked[:200]!r} does not exist here; served: {', '.join(served)}", param="model"
            )
        return asked

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

        field: the field of the body with the prompts. If the engine refuses a request, those submitted before
        are aborted: all requests run, or none. Raises what EngineClient.submit raises.
        """
        async with AsyncExitStack() as stack, _named(field), self.in_progress:
            num_following = sum(request.sampling.n for request in requests)
            readers = []
            for request in requests:
                num_following -= request.sampling.n
                readers.append(await stack.enter_async_context(self._submit(request, num_following)))
            yield readers

    def _submit(self, request: Request, num_following: int) -> OutputReader:
        try:
            return self.engine.submit(request, num_following=num_following)
        except OverloadError:
            self.metrics.rejected(QUEUE_FULL)
            raise
        except NotReadyError:
            self.metrics.rejected(self.engine.state.value)
            raise


@asynccontextmanager
async def _named(field: str) -> AsyncIterator[None]:
    """The engine knows every prompt as `prompt`: an error that names it names the field of the body instead.

    That holds while requests are submitted, and later: an engine in another process refuses a request that way.
    """
    try:
        yield
    except RequestError as error:
        if error.param != "prompt":
            raise
        raise RequestError(str(error), param=field) from None
