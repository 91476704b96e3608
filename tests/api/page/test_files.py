"""The page's files: strict headers, no request to another host, no way for text to become markup."""

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from faser.api.page.files import PageFiles
from faser.config.server import ServerConfig
from faser.config.speculation import DRAFT_METHODS
from tests.api.server import http_client, serving, settings
from tests.fake_engine import FakeEngine

ROUTES = sorted(PageFiles().routes)
STATIC = Path(__file__).parents[3] / "faser/api/page/static"


@pytest.fixture(scope="module")
def guarded() -> Iterator[httpx.Client]:
    with serving(FakeEngine(), settings(api_keys=("k",))) as url, http_client(url) as client:
        yield client


@pytest.mark.parametrize("route", ROUTES)
def test_every_file_has_strict_headers_and_needs_no_key(guarded: httpx.Client, route: str) -> None:
    answer = guarded.get(route)
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert "set-cookie" not in answer.headers
    assert answer.headers["content-type"].startswith(("text/", "image/svg"))


@pytest.mark.parametrize("route", ROUTES)
def test_a_browser_that_has_a_file_does_not_get_it_again(guarded: httpx.Client, route: str) -> None:
    tag = guarded.get(route).headers["etag"]
    for sent in (tag, f'"other", W/{tag}'):
        again = guarded.get(route, headers={"If-None-Match": sent})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        assert "content-security-policy" in again.headers
    assert guarded.get(route, headers={"If-None-Match": '"other"'}).status_code == 200


def test_head_has_the_headers_only(guarded: httpx.Client) -> None:
    answer = guarded.head("/")
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-length"] == str((STATIC / "index.html").stat().st_size)


def test_what_the_page_asks_for_needs_the_key(guarded: httpx.Client) -> None:
    assert guarded.get("/v1/models").status_code == 401
    assert guarded.post("/").status_code == 405
    for path in (
        "/page",
        "/page/",
        "/page/files.py",
        "/page/../files.py",
        "/page/%2e%2e/files.py",
        "/page/style.css/x",
    ):
        assert guarded.get(path).status_code == 401, path
        assert guarded.get(path, headers={"Authorization": "Bearer k"}).status_code == 404, path


def test_a_program_that_asks_for_json_gets_the_list_of_routes(http: httpx.Client) -> None:
    answer = http.get("/", headers={"Accept": "application/json"})
    assert answer.status_code == 404
    assert "POST /v1/chat/completions" in answer.json()["error"]["message"]
    assert "/page/" not in answer.text
    for accepted in ("*/*", "text/html,application/json", "text/html,application/xhtml+xml,*/*;q=0.8"):
        shown = http.get("/", headers={"Accept": accepted})
        assert shown.headers["content-type"].startswith("text/html"), accepted


def test_the_page_is_no_part_of_the_api_document(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    assert not set(ROUTES) & set(paths)


def test_without_the_page_there_is_nothing_at_its_routes() -> None:
    closed = settings(page=False)
    with serving(FakeEngine(), closed) as url, http_client(url) as client:
        assert {client.get(route).status_code for route in ROUTES} == {404}


def test_below_a_proxys_path_the_page_is_found_with_the_slash_at_its_end() -> None:
    config = ServerConfig(root_path="/llm", disable_uvicorn_access_log=True)
    with serving(FakeEngine(), config=config) as url:
        moved = httpx.get(f"{url}/llm")
        assert (moved.status_code, moved.headers["location"]) == (308, "llm/")
        shown = httpx.get(f"{url}/llm", follow_redirects=True)
        assert str(shown.url) == f"{url}/llm/"
        for path in ("/llm/", "/", "/llm/page/style.css", "/page/style.css"):
            assert httpx.get(url + path).status_code == 200, path


def test_every_address_in_the_files_is_relative() -> None:
    document = (STATIC / "index.html").read_text(encoding="utf-8")
    named = re.findall(r'(?:src|href)="([^"#]+)"', document)
    assert named
    assert all(f"/{each}" in ROUTES for each in named)
    for path in STATIC.rglob("*.js"):
        for imported in re.findall(r'from "([^"]+)"', path.read_text(encoding="utf-8")):
            assert (path.parent / imported).exists(), f"{path.name} imports {imported}"


FILES = sorted(each for each in STATIC.rglob("*") if each.is_file())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_file_turns_text_into_markup_or_code_or_asks_another_host(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|srcdoc"
        r"|\beval\(|new Function|set(?:Timeout|Interval)\(\s*[\"'`]|javascript:"
        r"|<style|\sstyle=\"|\son\w+=\"|@import|url\("
    )
    assert re.findall(forbidden, _without_comments(text)) == []
    hosts = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+", _without_comments(text)))
    assert hosts <= {"http://www.w3.org"}  # the name of SVG, which is no address


def _without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/|(?m:^\s*//.*$|\s{2}//.*$)", "", text, flags=re.DOTALL)


def test_every_drafter_has_a_name_a_letter_and_a_colour() -> None:
    xray, live = ((STATIC / name).read_text("utf-8") for name in ("chat/xray.js", "live/speculation.js"))
    chat_css, live_css = ((STATIC / name).read_text("utf-8") for name in ("chat/chat.css", "live/live.css"))
    letters = re.findall(r'^  (\w+): \["(.)", "', xray, re.MULTILINE)
    assert {name for name, _ in letters} == {*DRAFT_METHODS}
    assert len({letter for _, letter in letters}) == len(DRAFT_METHODS)
    for method in DRAFT_METHODS:
        assert f'"{method}"' in live
        assert re.search(rf"\.by-{method}[ ,]", chat_css)
        assert re.search(rf"\.by-{method.replace('_', '-')}[ ,]", live_css)
