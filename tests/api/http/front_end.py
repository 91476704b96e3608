"""The front-end over a fake engine, run as a program so that its descriptors can be limited and counted.

Usage: python -m tests.api.http.front_end NUM_DESCRIPTORS. Prints its port, and serves until it is killed.
"""

import resource
import sys

from faser.api.app import create_app
from faser.cli.preparation import listen
from faser.cli.server import http_server
from faser.config.server import ServerConfig
from faser.metrics.server import Metrics
from tests.api.server import MODEL, settings
from tests.fake_engine import FakeEngine


def main() -> None:
    limit = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    app = create_app(FakeEngine(), settings=settings(), metrics=Metrics(model_name=MODEL, max_model_len=4096))
    listener = listen("127.0.0.1", 0)
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    http_server(app, ServerConfig(disable_uvicorn_access_log=True)).run(sockets=[listener])


if __name__ == "__main__":
    main()
