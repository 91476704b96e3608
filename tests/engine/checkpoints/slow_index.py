"""A package index on loopback with one wheel, of which half arrives and no more."""

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_PIECE_BYTES = 1 << 16


@contextmanager
def slow_index(wheel: str, num_bytes: int) -> Iterator[str]:
    """The index's URL. num_bytes: of the wheel, all zero; the rest after the first half never comes."""
    over = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.endswith(".whl"):
                self._begin("application/zip", num_bytes)
                for _ in range(num_bytes // 2 // _PIECE_BYTES):
                    self.wfile.write(bytes(_PIECE_BYTES))
                over.wait(60)
                return
            page = f'<a href="/files/{wheel}">{wheel}</a>'.encode()
            self._begin("text/html", len(page))
            self.wfile.write(page)

        def _begin(self, kind: str, length: int) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(length))
            self.end_headers()

        def handle(self) -> None:
            try:
                super().handle()
            except ConnectionError:  # pip was killed
                return

        def log_message(self, *_: object) -> None:
            """Silent."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/simple"
        finally:
            over.set()
            server.shutdown()
