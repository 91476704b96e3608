"""What all routes share: the engine, the settings, the metrics and the chat template."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from faser.api.protocol.fields import FieldCheck
from faser.api.serving.engine_client import EngineClient, OutputStream
from faser.api.serving.settings import ApiSettings
from faser.api.templates.conversation import Conversation
from faser.errors import NotReadyError, OverloadError, RequestError, UnknownModelError
from faser.metrics.server import QUEUE_FULL, Metrics
from faser.types import EngineState, ModelInfo, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One front-end. created_s: when it started, in Unix seconds."""

    engine: EngineClient
    settings: ApiSettings
    metrics: Metrics
    conversation: Conversation
    fields: FieldCheck
    created_s: int

    @classmethod
    def build(cls, engine: EngineClient, settings: ApiSettings, metrics: Metrics) -> "Service":
        """Raises ModelError if the chat template does not compile."""
        return cls(
            engine=engine,
            settings=settings,
            metrics=metrics,
            conversation=Conversation(engine.tokenizer, settings.chat_template),
            fields=FieldCheck(strict=settings.strict_request_fields),
            created_s=int(time.time()),
        )

    def model_name(self, asked: str | None) -> str:
        """The name an answer carries. Raises UnknownModelError."""
        served = self.settings.served_model_names
        if asked is None:
            return served[0]
        if asked not in served:
            raise UnknownModelError(
                f"the model {asked[:200]!r} does not exist here; served: {', '.join(served)}", param="model"
            )
        return asked

    def ready_info(self) -> ModelInfo:
        """What is known of the model, if requests are taken now. Raises NotReadyError, and counts it."""
        engine = self.engine
        if engine.state is not EngineState.READY:
            self.metrics.rejected(engine.state.value)
            because = f": {engine.state_reason}" if engine.state_reason else ""
            raise NotReadyError(f"the engine is {engine.state}{because}")
        return engine.info

    @asynccontextmanager
    async def submitted(self, requests: Sequence[Request], *, field: str) -> AsyncIterator[list[OutputStream]]:
        """The outputs of all requests; leaving aborts what has not finished. field: what their prompts came from.

        If one is refused, those before it are aborted: all or none. Raises what EngineClient.submit raises.
        """
        async with AsyncExitStack() as stack:
            yield [await stack.enter_async_context(self._submit(request, field)) for request in requests]

    def _submit(self, request: Request, field: str) -> OutputStream:
        try:
            return self.engine.submit(request)
        except RequestError as error:
            if error.param != "prompt":
                raise
            raise RequestError(str(error), param=field) from None
        except OverloadError:
            self.metrics.rejected(QUEUE_FULL)
            raise
        except NotReadyError:
            self.metrics.rejected(self.engine.state.value)
            raise
