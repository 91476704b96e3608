"""HTTP by hand, over sockets, for clients that no library would be."""

import json
import socket
import time
from typing import Any

import httpx

from tests.waiting import PATIENCE_S


def connect(url: str) -> socket.socket:
    address = httpx.URL(url)
    return socket.create_connection((address.host, address.port or 80), timeout=PATIENCE_S)


def head(path: str = "/v1/completions", *, method: str = "POST", version: str = "1.1", **headers: Any) -> bytes:
    """A request line with its headers. headers: by name, with underscores."""
    fields: dict[str, Any] = {"Host": "localhost", "Content-Type": "application/json"}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{method} {path} HTTP/{version}", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    return "\r\n".join(lines).encode()


def request(body: dict[str, Any], *, version: str = "1.1", **headers: Any) -> bytes:
    """A whole request for a text completion."""
    content = json.dumps(body).encode()
    return head(version=version, Content_Length=len(content), **headers) + content


def read_all(connection: socket.socket) -> bytes:
    """What the server sends until it closes or resets the connection. Raises TimeoutError if it does neither."""
    answer = b""
    try:
        while piece := connection.recv(1 << 16):
            answer += piece
    except ConnectionError:
        pass
    return answer


def send_endlessly(connection: socket.socket, piece: bytes, *, most: int) -> int:
    """Send piece again and again until the server closes the connection; returns how many bytes it let in."""
    sent = 0
    try:
        while sent < most:
            connection.sendall(piece)
            sent += len(piece)
    except ConnectionError:
        pass
    return sent


def send_slowly(connection: socket.socket, piece: bytes, *, every_s: float, for_s: float) -> None:
    """Send piece again and again, slowly, until the server closes the connection or the time is over."""
    end_s = time.monotonic() + for_s
    try:
        while time.monotonic() < end_s:
            connection.sendall(piece)
            time.sleep(every_s)
    except ConnectionError:
        pass


def error_of(answer: bytes) -> tuple[int, str]:
    """Status and message of an error answer, which must say that the connection closes."""
    header, _, body = answer.partition(b"\r\n\r\n")
    lines = header.decode().split("\r\n")
    assert "connection: close" in [line.lower() for line in lines], lines
    status = int(lines[0].split(" ")[1])
    error = json.loads(body)["error"]
    assert error["code"] == status
    message: str = error["message"]
    return status, message
