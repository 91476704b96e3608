"""RemoteAnswerer: answers from a server; each is one streamed POST to /v1/chat/completions."""

import json
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Self

import httpx

from faser.cli.chat.answerer import AnswerLimits, Message
from faser.errors import ConfigError, EngineError, RequestError

_CONNECT_TIMEOUT_S = 5.0


class RemoteAnswerer:
    """url: of the server, with or without /v1. model: None: the first that the server serves."""

    def __init__(
        self,
        url: str,
        limits: AnswerLimits,
        *,
        model: str | None = None,
        api_key: str | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._fields: dict[str, Any] = {"stream": True, "model": model}
        self._fields |= {"max_tokens": limits.max_tokens, "temperature": limits.temperature}
        if limits.json_schema is not None:
            wrapped = {"name": "answer", "schema": limits.json_schema, "strict": True}
            self._fields["response_format"] = {"type": "json_schema", "json_schema": wrapped}
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),
            transport=transport,
        )

    def answer(self, messages: Sequence[Message]) -> Generator[str, None, None]:
        """Raises RequestError for a refused request, EngineError for an incomplete answer."""
        body = {key: value for key, value in self._fields.items() if value is not None}
        body["messages"] = list(messages)
        try:
            with self._client.stream("POST", f"{self._url}/v1/chat/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    response.read()
                    raise RequestError(f"{response.status_code}: {_error_text(response.text)}")
                yield from _pieces(response.iter_lines())
        except httpx.HTTPError as error:
            raise EngineError(f"{self._url}: {error or type(error).__name__}") from None

    def __enter__(self) -> Self:
        """Raises ConfigError if no server answers at the URL."""
        try:
            self._client.get(f"{self._url}/health")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            self._client.close()
            raise ConfigError(
                f"--url is {self._url}; no server answers there: {error}. Start faser serve, or use --in-process."
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()


def _pieces(lines: Iterator[str]) -> Iterator[str]:
    """The texts in a stream of server-sent events, up to [DONE]."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise EngineError(str(event["error"].get("message", event["error"])))
        for choice in event["choices"]:
            if text := choice["delta"].get("content"):
                yield text
    raise EngineError("the answer broke off")


def _error_text(body: str) -> str:
    """The message in an error body; the body itself if it has none."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.strip()
