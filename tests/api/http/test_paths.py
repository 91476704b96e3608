"""A request's path as its route knows it, whatever a proxy leaves in front of it."""

import pytest

from faser.api.http.paths import route_of


@pytest.mark.parametrize(
    "path, root_path, route",
    [
        ("/v1/models", "", "/v1/models"),
        ("/v1/models/", "", "/v1/models"),
        ("/", "", "/"),
        ("//", "", "/"),
        ("/llm/v1/models", "/llm", "/v1/models"),
        ("/llm/llm/v1/models", "/llm", "/v1/models"),
        ("/llm/llmx/v1", "/llm", "/llmx/v1"),
        ("/llm", "/llm", "/"),
        ("/llm/llm", "/llm", "/"),
    ],
)
def test_the_proxys_path_and_a_last_slash_are_no_part_of_a_route(path: str, root_path: str, route: str) -> None:
    assert route_of(path, root_path) == route


@pytest.mark.parametrize(
    "path, root_path, route",
    [
        ("/chat/completions", "", "/v1/chat/completions"),
        ("/chat/completions/render", "", "/v1/chat/completions/render"),
        ("/completions/", "", "/v1/completions"),
        ("/responses/input_tokens", "", "/v1/responses/input_tokens"),
        ("/models", "", "/v1/models"),
        ("/models/org/name", "/llm", "/v1/models/org/name"),
        ("/llm/models", "/llm", "/v1/models"),
        ("/v1/models", "/v1", "/v1/models"),
        ("/v1/health", "", "/health"),
        ("/modelsx", "", "/modelsx"),
        ("/chats", "", "/chats"),
        ("/v1/healthy", "", "/v1/healthy"),
        ("/v1/ready", "", "/v1/ready"),
    ],
)
def test_openais_routes_are_found_without_v1_and_health_with_it(path: str, root_path: str, route: str) -> None:
    assert route_of(path, root_path) == route
