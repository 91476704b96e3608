"""Which web pages a browser lets in: none, unless the operator names them."""

import httpx
import pytest

from faser.api.requests.service import CorsSettings
from tests.api.server import http_client, serving, settings
from tests.fake_engine import FakeEngine

PAGE = "https://app.example"
TEXT = "/v1/completions"


def preflight(
    http: httpx.Client, origin: str, *, method: str = "POST", headers: str = "authorization"
) -> httpx.Response:
    asked = {"Access-Control-Request-Method": method, "Access-Control-Request-Headers": headers}
    return http.options(TEXT, headers={"Origin": origin, **asked})


def test_by_default_no_answer_has_a_cors_header() -> None:
    with serving(FakeEngine()) as url, http_client(url) as http:
        for answer in (preflight(http, PAGE), http.post(TEXT, json={"prompt": "x"}, headers={"Origin": PAGE})):
            assert not [name for name in answer.headers if name.startswith("access-control")]


def test_a_named_origin_is_let_in_with_and_without_a_key() -> None:
    """The preflight has no key; a 401 can be read by the page, so that it can tell its user."""
    chosen = settings(api_keys=("k",), cors=CorsSettings(origins=(PAGE,)))
    with serving(FakeEngine(), chosen) as url, http_client(url) as http:
        asked = preflight(http, PAGE)
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == PAGE
        assert "authorization" in asked.headers["access-control-allow-headers"]
        for key, status in (("k", 200), ("wrong", 401)):
            headers = {"Origin": PAGE, "Authorization": f"Bearer {key}"}
            answer = http.post(TEXT, json={"prompt": "x"}, headers=headers)
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == PAGE
            for name in ("X-Request-Id", "x-faser-ignored"):
                assert name in answer.headers["access-control-expose-headers"]
            assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "http://app.example", "https://app.example.evil", "null"]
)
def test_every_other_origin_is_kept_out(origin: str) -> None:
    with serving(FakeEngine(), settings(cors=CorsSettings(origins=(PAGE,)))) as url, http_client(url) as http:
        asked = preflight(http, origin)
        assert asked.status_code == 400
        assert "access-control-allow-origin" not in asked.headers
        answer = http.post(TEXT, json={"prompt": "x"}, headers={"Origin": origin})
        assert "access-control-allow-origin" not in answer.headers


def test_methods_and_headers_are_limited_to_the_named_ones() -> None:
    cors = CorsSettings(origins=(PAGE,), methods=("POST",), headers=("Authorization",))
    with serving(FakeEngine(), settings(cors=cors)) as url, http_client(url) as http:
        assert preflight(http, PAGE).status_code == 200
        assert preflight(http, PAGE, method="DELETE").status_code == 400
        assert preflight(http, PAGE, headers="x-other").status_code == 400


def test_all_origins_means_all_but_without_credentials() -> None:
    with serving(FakeEngine(), settings(cors=CorsSettings(origins=("*",)))) as url, http_client(url) as http:
        answer = http.post(TEXT, json={"prompt": "x"}, headers={"Origin": "https://any.example"})
        assert answer.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in answer.headers
