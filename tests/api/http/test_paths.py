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
