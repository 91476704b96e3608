"""Before there is an application every request gets 503, and says what the server waits for."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import uvicorn
from starlette.responses import PlainTextResponse

from faser.api.loading import LoadingApp
from faser.api.page.files import PageFiles
from faser.metrics.server import Metrics
from tests.waiting import PATIENCE_S, until


@contextmanager
def serving(app: LoadingApp, root_path: str = "") -> Iterator[str]:
    """The URL of a real server, with a lifespan, as `faser serve` has it."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="on", root_path=root_path)
    server = uvicorn.Server(config)
    listener = config.bind_socket()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        until(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        listener.close()


def test_probes_and_routes_answer_503_until_the_application_is_there() -> None:
    metrics = Metrics(model_name="tiny", max_model_len=64)
    app = LoadingApp("the model is being fetched", metrics, shows_metrics=True)
    with serving(app) as url, httpx.Client(base_url=url, timeout=PATIENCE_S) as http:
        assert [http.get(path).status_code for path in ("/health", "/ping")] == [503, 503]
        app.reason = "fetching tiny: 12 %"
        ready = http.get("/ready")
        assert ready.status_code == 503
        assert ready.json() == {"ready": False, "reason": "loading", "message": "fetching tiny: 12 %"}
        refused = http.post("/v1/chat/completions", json={"messages": []})
        assert refused.status_code == 503
        assert int(refused.headers["Retry-After"]) >= 1
        assert refused.json()["error"]["message"] == "the engine is loading: fetching tiny: 12 %"
        assert http.get("/v1/models").status_code == 503
        assert 'vllm:admission_rejections_total{engine="0",model_name="tiny",reason="loading"} 1.0' in [
            *http.get("/metrics").text.splitlines()
        ]
        app.application = PlainTextResponse("here")
        assert [http.get(path).text for path in ("/ready", "/v1/models")] == ["here", "here"]


def test_a_proxy_in_front_changes_no_answer() -> None:
    """A server that is informed of its proxy's path puts that before every path."""
    app = LoadingApp("loading", Metrics(model_name="tiny", max_model_len=64), shows_metrics=False)
    with serving(app, root_path="/under") as url:
        assert httpx.get(f"{url}/metrics", timeout=PATIENCE_S).status_code == 503
        assert httpx.get(f"{url}/ready", timeout=PATIENCE_S).json()["reason"] == "loading"
        assert httpx.get(f"{url}/health", timeout=PATIENCE_S).json() == {"state": "loading", "message": "loading"}


def test_the_page_is_shown_while_the_model_is_fetched() -> None:
    metrics = Metrics(model_name="tiny", max_model_len=64)
    with (
        serving(LoadingApp("loading", metrics, page=PageFiles())) as url,
        httpx.Client(base_url=url, timeout=PATIENCE_S) as http,
    ):
        assert http.get("/").headers["content-type"].startswith("text/html")
        assert http.get("/page/app.js").status_code == 200
        assert http.get("/", headers={"Accept": "application/json"}).status_code == 503
        assert http.post("/").status_code == http.get("/page/none").status_code == 503
    with serving(LoadingApp("loading", metrics)) as url:
        assert httpx.get(url, timeout=PATIENCE_S).status_code == 503
