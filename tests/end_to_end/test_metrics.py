"""What one request does to /metrics, and what the routes for machines say of a server that is well."""

from tests.end_to_end.conftest import MODEL
from tests.end_to_end.server import Server

# By how much each series grows with one request of 12 tokens for 2 samples.
_GROWTH = {
    "generation_tokens_total": 24,
    "request_success_total": 1,
    "time_to_first_token_seconds_count": 1,
    "e2e_request_latency_seconds_count": 1,
    "request_generation_tokens_sum": 24,
    "request_params_n_sum": 2,
    "request_params_max_tokens_sum": 12,
    "num_preemptions_total": 0,
}


def test_one_request_is_counted_once(server: Server) -> None:
    names = [*_GROWTH, "prompt_tokens_total", "iteration_tokens_total_count", "iteration_tokens_total_sum"]
    before = {name: server.metric(name) for name in names}
    with server.http() as http:
        body = {"model": MODEL, "prompt": "count me", "n": 2, "max_tokens": 12, "ignore_eos": True}
        num_prompt_tokens = http.post("/v1/completions", json=body).json()["usage"]["prompt_tokens"]
    growth = {name: server.metric(name) - value for name, value in before.items()}
    assert {name: growth[name] for name in _GROWTH} == _GROWTH
    assert growth["prompt_tokens_total"] == num_prompt_tokens
    assert growth["iteration_tokens_total_count"] >= 1  # drafts make it fewer than tokens
    assert growth["iteration_tokens_total_sum"] >= num_prompt_tokens + 2 * 11


def test_machines_are_informed_that_all_is_well(server: Server) -> None:
    with server.http() as http:
        health = http.get("/health")
        assert (health.status_code, health.json()) == (200, {"state": "ready"})
        assert http.get("/ready").json() == {"ready": True}
        assert http.get("/version").json()["version"]
        assert http.get("/metrics").headers["Content-Type"].startswith("text/plain")


def test_probes_and_metrics_ask_for_no_key(small: Server) -> None:
    with small.http() as http:
        del http.headers["Authorization"]
        for path in ("/health", "/ready", "/ping", "/metrics"):
            assert http.get(path).status_code == 200
        for path in ("/v1/models", "/version"):
            assert http.get(path).status_code == 401
        assert http.post("/tokenize", json={"prompt": "x"}).status_code == 401
