"""A proxy on 127.0.0.1 that fixes what the model says, and records what a client sends and gets.

It adds a grammar with one possible answer to each request, so a model of random weights goes through a client's
tool loop: protocol, stream and parsers are tried, not the model. Which answer is due follows from the results of
tools that the request carries, so clients may repeat requests, and send others in between.
"""

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

from tests.checkpoints import (
    llama_shapes,
    random_weights,
    tiny_llama_config,
    write_checkpoint,
    write_json,
    write_tokenizer,
)

Json = dict[str, Any]

CONTEXT = 131072  # tokens; agents' prompts have tens of thousands, and twice that in the tiny tokenizer's
_WITHOUT_TOOLS = "A short title"
_HOP_HEADERS = {"connection", "content-length", "host", "accept-encoding", "transfer-encoding", "keep-alive"}


def write_long_checkpoint(directory: Path) -> Path:
    """A tiny checkpoint with room for the prompt of an agent."""
    config = tiny_llama_config() | {"max_position_embeddings": CONTEXT}
    write_checkpoint(directory, config, random_weights(llama_shapes(config)))
    write_json(directory / "generation_config.json", {"bos_token_id": 0, "eos_token_id": [2]})
    write_tokenizer(directory)
    return directory


@dataclass(frozen=True, slots=True)
class Call:
    """A call that the model is to make."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(slots=True)
class Exchange:
    """One request and its answer. body: as the client sent it; None: it had none. answer: as it was passed on."""

    method: str
    path: str
    body: Json | None
    status: int = 0
    answer: bytes = b""


@dataclass(frozen=True, slots=True)
class Script:
    """calls: one for each answer, in this order. text: the answer after the result of the last call.

    A request without tools, of a client that has calls to make, is for a title or the like and gets a short text.
    """

    calls: Sequence[Call]
    text: str

    def fixed(self, path: str, body: Json) -> Json:
        """The request with a grammar of one possible answer. path: of one of the three dialects of chats."""
        if not body.get("tools"):
            text = _WITHOUT_TOOLS if self.calls else self.text
            return body | {"structured_outputs": {"choice": [text]}}
        dialect = _DIALECTS[path.partition("?")[0].rstrip("/").rpartition("/")[2]]
        results = dialect.count_results(body)
        if results >= len(self.calls):
            return body | {"tool_choice": dialect.choice(None), "structured_outputs": {"choice": [self.text]}}
        call = self.calls[results]
        tools = [dialect.narrowed(tool, call) for tool in body["tools"]]
        if tools == body["tools"]:
            raise LookupError(f"{path} declares no function {call.name}")
        return body | {"tools": tools, "tool_choice": dialect.choice(call.name)}


class _Chat:
    def count_results(self, body: Json) -> int:
        return sum(message["role"] == "tool" for message in body["messages"])

    def narrowed(self, tool: Json, call: Call) -> Json:
        """The tool, or the one that is called with the arguments of the call as the only ones possible."""
        function = tool.get("function", {})
        if function.get("name") != call.name:
            return tool
        return {**tool, "function": {**function, "parameters": _constant(call.arguments)}}

    def choice(self, name: str | None) -> Any:
        """name: of the function to call; None: no call."""
        return {"type": "function", "function": {"name": name}} if name else "none"


class _Responses:
    def count_results(self, body: Json) -> int:
        items = body["input"] if isinstance(body["input"], list) else []
        return sum(str(item.get("type", "")).endswith("call_output") for item in items)

    def narrowed(self, tool: Json, call: Call) -> Json:
        if tool.get("type") != "function" or tool["name"] != call.name:
            return tool
        return {**tool, "parameters": _constant(call.arguments)}

    def choice(self, name: str | None) -> Any:
        return {"type": "function", "name": name} if name else "none"


class _Messages:
    def count_results(self, body: Json) -> int:
        contents = [message["content"] for message in body["messages"] if isinstance(message["content"], list)]
        return sum(block["type"] == "tool_result" for content in contents for block in content)

    def narrowed(self, tool: Json, call: Call) -> Json:
        return {**tool, "input_schema": _constant(call.arguments)} if tool.get("name") == call.name else tool

    def choice(self, name: str | None) -> Any:
        return {"type": "tool", "name": name} if name else {"type": "none"}


_DIALECTS: dict[str, _Chat | _Responses | _Messages] = {
    "completions": _Chat(),
    "responses": _Responses(),
    "messages": _Messages(),
}


def _constant(arguments: Mapping[str, Any]) -> Json:
    """A schema that these arguments alone match."""
    return {
        "type": "object",
        "properties": {name: {"const": value} for name, value in arguments.items()},
        "required": list(arguments),
        "additionalProperties": False,
    }


@dataclass(slots=True)
class Proxy:
    """url: what the client is given, without /v1. exchanges: so far, in the order in which they began."""

    url: str
    exchanges: list[Exchange] = field(default_factory=list)

    def generations(self) -> list[Exchange]:
        """Those that asked for answers of the model."""
        return [each for each in self.exchanges if _is_generation(each.path)]


@contextmanager
def scripted(server_url: str, script: Script) -> Iterator[Proxy]:
    """A proxy in front of the server at server_url. What is no request for an answer passes as it is."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass_on(self) -> None:
            raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            exchange = Exchange(self.command, self.path, json.loads(raw) if raw else None)
            proxy.exchanges.append(exchange)
            if exchange.body is not None and _is_generation(self.path):
                raw = json.dumps(script.fixed(self.path, exchange.body)).encode()
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP_HEADERS}
            with client.stream(self.command, server_url + self.path, content=raw, headers=headers) as answer:
                exchange.status = answer.status_code
                self.send_response(answer.status_code)
                for name, value in answer.headers.items():
                    if name.lower() not in _HOP_HEADERS | {"date", "server"}:
                        self.send_header(name, value)
                self.send_header("Connection", "close")
                self.end_headers()
                for piece in answer.iter_raw():
                    exchange.answer += piece
                    self.wfile.write(piece)

        do_GET = do_POST = do_HEAD = _pass_on

        def log_message(self, format: str, *args: Any) -> None:
            del format, args

    with httpx.Client(timeout=300, trust_env=False) as client:
        listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        proxy = Proxy(f"http://127.0.0.1:{listener.server_port}")
        thread = threading.Thread(target=listener.serve_forever, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            listener.shutdown()
            listener.server_close()
            thread.join()


def _is_generation(path: str) -> bool:
    return path.partition("?")[0].rstrip("/").rpartition("/")[2] in _DIALECTS
