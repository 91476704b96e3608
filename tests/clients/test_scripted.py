"""The proxy that fixes answers, before a stand-in for the server: what it asks for, passes on and records."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest

from tests.clients.scripted import Call, Json, Script, scripted

SCRIPT = Script([Call("read", {"path": "a.txt"}), Call("run", {"command": "ls"})], "Done.")


def asked(path: str, body: Json) -> tuple[object, Json]:
    """(tool_choice, what the functions' parameters and the answer may be) of the request that the server gets."""
    fixed = SCRIPT.fixed(path, body)
    tools = [tool.get("function", tool) for tool in fixed.get("tools", ())]
    schemas = {tool["name"]: tool.get("parameters", tool.get("input_schema")) for tool in tools}
    return fixed.get("tool_choice"), {"schemas": schemas, "text": fixed.get("structured_outputs")}


BODIES: dict[str, tuple[Json, Json]] = {
    "/v1/chat/completions": (
        {"tools": [{"type": "function", "function": {"name": name}} for name in ("read", "run")]},
        {"role": "tool", "tool_call_id": "1", "content": "x"},
    ),
    "/v1/messages?beta=true": (
        {"tools": [{"name": name} for name in ("read", "run")]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "x"}]},
    ),
    "/v1/responses": (
        {"tools": [{"type": "function", "name": name} for name in ("read", "run")]},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
    ),
}


@pytest.mark.parametrize("path", BODIES)
def test_the_next_call_follows_from_the_results_in_the_request(path: str) -> None:
    tools, result = BODIES[path]
    items = "input" if path.endswith("responses") else "messages"
    chosen, allowed = [], []
    for results in range(3):
        choice, form = asked(path, {**tools, items: [{"role": "user", "content": "hi"}, *[result] * results]})
        chosen.append(str(choice))
        allowed.append(form)
    assert "read" in chosen[0]
    assert allowed[0]["schemas"]["read"]["properties"] == {"path": {"const": "a.txt"}}
    assert "run" in chosen[1]
    assert allowed[1]["schemas"]["run"]["properties"] == {"command": {"const": "ls"}}
    assert "none" in chosen[2]
    assert allowed[2]["text"] == {"choice": ["Done."]}


def test_a_function_that_the_client_does_not_declare_is_an_error() -> None:
    with pytest.raises(LookupError, match="no function read"):
        SCRIPT.fixed("/v1/messages", {"tools": [{"name": "other"}], "messages": []})


@pytest.fixture
def echo() -> Iterator[str]:
    """The URL of a server that answers every request with its path and its body."""

    class Echo(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(207)
            self.send_header("X-Key", self.headers["X-Key"])
            self.end_headers()
            self.wfile.write(self.path.encode() + b" " + body)

        def log_message(self, format: str, *args: object) -> None:
            del format, args

    server = HTTPServer(("127.0.0.1", 0), Echo)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_requests_and_answers_pass_and_are_recorded(echo: str) -> None:
    with scripted(echo, SCRIPT) as proxy, httpx.Client(base_url=proxy.url, trust_env=False) as client:
        counted = client.post("/v1/messages/count_tokens", json={"a": 1}, headers={"X-Key": "k"})
        answered = client.post("/v1/messages", json={"messages": []}, headers={"X-Key": "k"})
    assert (counted.status_code, counted.headers["X-Key"]) == (207, "k")
    assert counted.text == '/v1/messages/count_tokens {"a":1}'
    assert "A short title" in answered.text
    assert [(each.method, each.path, each.body, each.status) for each in proxy.exchanges] == [
        ("POST", "/v1/messages/count_tokens", {"a": 1}, 207),
        ("POST", "/v1/messages", {"messages": []}, 207),
    ]
    assert [each.answer for each in proxy.generations()] == [answered.content]
