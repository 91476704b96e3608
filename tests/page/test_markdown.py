"""What a model writes becomes elements of a few kinds and nothing else, however it arrives."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.api.server import serving
from tests.fake_engine import FakeEngine, saying

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

# Renders pieces one after the other; returns markup, and what must not be there.
RENDER = """async (pieces) => {
  const { MarkdownStream } = await import("/page/chat/markdown.js");
  const root = document.createElement("div");
  document.body.append(root);
  const stream = new MarkdownStream(root);
  for (const piece of pieces) stream.push(piece);
  const all = [...root.querySelectorAll("*")];
  const found = {
    html: root.innerHTML, text: root.textContent, tags: [...new Set(all.map((each) => each.localName))],
    attributes: [...new Set(all.flatMap((each) => each.getAttributeNames()))],
    links: all.filter((each) => each.href).map((each) => [each.href, each.rel, each.target]),
    ran: window.ran ?? null,
  };
  root.remove();
  return found;
}"""
TAGS = {
    "p",
    "span",
    "h3",
    "h4",
    "h5",
    "h6",
    "hr",
    "blockquote",
    "ul",
    "ol",
    "li",
    "pre",
    "code",
    "strong",
    "em",
    "del",
    "a",
    "div",
    "table",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
    "button",
}
ATTRIBUTES = {"class", "tabindex", "type", "aria-label", "start", "href", "target", "rel"}
HOSTILE = [
    "<script>window.ran = 1</script>",
    "<img src=x onerror='window.ran=1'>",
    "<svg onload=window.ran=1><script>window.ran=1</script></svg>",
    "<a href='javascript:window.ran=1'>x</a>",
    "[x](javascript:window.ran=1)",
    "[x](JaVaScRiPt:window.ran=1)",
    "[x](&#106;avascript:window.ran=1)",
    "[x](\tjavascript:window.ran=1)",
    "[x](data:text/html,<script>window.ran=1</script>)",
    "[x](vbscript:msgbox(1))",
    "[x](file:///etc/passwd)",
    "[x](//evil.example/x)",
    '[x](http://evil.example/" onmouseover="window.ran=1)',
    "![x](https://evil.example/pixel.png)",
    "![x](javascript:window.ran=1)",
    '![x]("onerror="window.ran=1)',
    "<javascript:window.ran=1>",
    '<https://evil.example/"onclick="window.ran=1>',
    "[**[x](javascript:window.ran=1)**](javascript:window.ran=1)",
    "**<b onclick=window.ran=1>`</b>**`<i onclick=window.ran=1>`",
    '```html"onclick="window.ran=1\n</code></pre><script>window.ran=1</script>\n```',
    "```\n</code></pre><img src=x onerror=window.ran=1>",
    "| a | b |\n|---|---|\n| <script>window.ran=1</script> | [x](javascript:window.ran=1) |",
    "> - > - <iframe srcdoc='<script>parent.ran=1</script>'></iframe>",
    "<style>*{display:none}</style><base href='//evil.example'><meta http-equiv=refresh content='0;//x.example'>",
    "<form action=//evil.example><input name=q></form><object data=x></object><embed src=x>",
    "]]>--><!--<script>window.ran=1</script>-->",
    "\u202e[x](https://example.org)\u0000<script\u0000>window.ran=1</script>",
    "{{constructor.constructor('window.ran=1')()}} ${window.ran=1}",
    "# <u>x</u>\n\n1. <li onclick=window.ran=1>\n\n---\n<hr onclick=window.ran=1>",
]
SAMPLES = [
    "# One\n\nText with **bold**, *em*, `code`, ~~gone~~ and [a link](https://example.org/a_b)."
    "\n\n- x\n- y\n  - z\n\n1. a\n2. b",
    "```python\ndef f(x):\n    return x\n\n\nf(1)\n```\nafter\n\n"
    "> quoted\n> more\n\n| a | b |\n|:--|--:|\n| 1 | 2 |\n\nend",
    "~~~\nopen for ever\n```\nstill open\n",
    "snake_case_name and 2*3*4 and ** not bold ** and \\*escaped\\* https://example.org/x).",
    *HOSTILE,
]


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def page(browser: Browser, engine: FakeEngine) -> Iterator[Page]:
    from tests.page.browser import visiting

    with serving(engine) as url, visiting(browser, url) as visit:
        yield visit.page


def check(found: dict[str, Any]) -> None:
    assert set(found["tags"]) <= TAGS
    assert set(found["attributes"]) <= ATTRIBUTES
    assert found["ran"] is None
    for href, rel, target in found["links"]:
        assert href.startswith(("http://", "https://"))
        assert "noopener" in rel
        assert target == "_blank"


def test_a_text_of_every_kind_has_its_elements(page: Page) -> None:
    found = page.evaluate(RENDER, [SAMPLES[0]])
    assert found["html"] == (
        "<h3>One</h3><p>Text with <strong>bold</strong>, <em>em</em>, <code>code</code>, <del>gone</del> and "
        '<a href="https://example.org/a_b" target="_blank" rel="noopener noreferrer nofollow">a link</a>.</p>'
        '<ul><li>x</li><li>y<ul><li>z</li></ul></li></ul><ol start="1"><li>a</li><li>b</li></ol>'
    )
    assert page.evaluate(RENDER, [SAMPLES[3]])["text"] == SAMPLES[3].replace("\\*", "*")


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_becomes_anything_but_harmless_elements(page: Page, text: str) -> None:
    check(page.evaluate(RENDER, [text]))
    check(page.evaluate(RENDER, list(text)))
    check(page.evaluate(RENDER, [f"- {text}\n\n> {text}\n\n**{text}** [{text}]({text})"]))


@pytest.mark.parametrize("at", range(len(SAMPLES)))
def test_a_text_looks_the_same_however_it_is_cut(page: Page, at: int) -> None:
    """Oracle: the whole text in one piece."""
    text, rng = SAMPLES[at] + "\n\n" + SAMPLES[at % 4], random.Random(at)
    whole = page.evaluate(RENDER, [text])["html"]
    for _ in range(6):
        cuts = sorted(rng.sample(range(1, len(text)), min(rng.randrange(1, 40), len(text) - 1)))
        pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert page.evaluate(RENDER, pieces)["html"] == whole
    assert page.evaluate(RENDER, list(text))["html"] == whole


CODE = {
    "python": "def f(x):  # \"no string\"\n    return g(\"a # b\", 0x1F, '''x\ny''')",
    "js": "const a = `x ${b}`; // <b>\n/* if */ if (a) call(1.5);",
    "sql": "SELECT name FROM t -- all\nWHERE id = 7 and x = 'it';",
    "html": '<!-- <i> --><p class="a">it isn\'t</p>',
    "rust": "fn f<'a>(x: &'a str) -> char { '\\n' }",
}
COLOURED = {
    "python": [
        ("keyword", "def"),
        ("call", "f"),
        ("comment", '# "no string"'),
        ("keyword", "return"),
        ("call", "g"),
        ("string", '"a # b"'),
        ("number", "0x1F"),
        ("string", "'''x\ny'''"),
    ],
    "js": [
        ("keyword", "const"),
        ("string", "`x ${b}`"),
        ("comment", "// <b>"),
        ("comment", "/* if */"),
        ("keyword", "if"),
        ("call", "call"),
        ("number", "1.5"),
    ],
    "sql": [
        ("keyword", "SELECT"),
        ("keyword", "FROM"),
        ("comment", "-- all"),
        ("keyword", "WHERE"),
        ("number", "7"),
        ("keyword", "and"),
        ("string", "'it'"),
    ],
    "html": [
        ("comment", "<!-- <i> -->"),
        ("keyword", "<p"),
        ("string", '"a"'),
        ("keyword", ">"),
        ("keyword", "</p"),
        ("keyword", ">"),
    ],
    "rust": [("keyword", "fn"), ("keyword", "char"), ("string", "'\\n'")],
}
HIGHLIGHT = """async ([code, language]) => {
  const { highlighted } = await import("/page/chat/highlight.js");
  const root = document.createElement("code");
  const began = performance.now();
  root.append(...highlighted(code, language));
  return { ms: performance.now() - began, text: root.textContent,
    tags: [...new Set([...root.children].map((each) => each.localName))],
    spans: [...root.children].map((each) => [each.className.replace("code-", ""), each.textContent]) };
}"""


@pytest.mark.parametrize("language", CODE)
def test_code_is_coloured_by_kind(page: Page, language: str) -> None:
    found = page.evaluate(HIGHLIGHT, [CODE[language], language])
    assert found["text"] == CODE[language]
    assert [tuple(each) for each in found["spans"]] == COLOURED[language]


def test_colouring_changes_no_text_and_takes_time_in_proportion_to_its_length(page: Page) -> None:
    languages = ("python", "js", "c", "sql", "bash", "yaml", "json", "html", "css", "ruby", "no such", None)
    hostile = [each * 1500 for each in ('"', "'", "`", "\\", "/*", "<!--", "'''", '"\\', "a(", '="', "#", "1.")]
    for language in languages:
        for code in (*HOSTILE, *CODE.values(), *hostile):
            found = page.evaluate(HIGHLIGHT, [code, language])
            assert found["text"] == code
            assert set(found["tags"]) <= {"span"}
            assert found["ms"] < 1000  # a pattern that tries every place again takes minutes


def test_code_that_ends_without_its_fence_is_coloured_too(page: Page) -> None:
    render = RENDER.replace("const all =", "stream.end(); const all =")
    open_fence, closed = (page.evaluate(render, [f"```python\nimport os{end}"]) for end in ("", "\n```"))
    assert '<span class="code-keyword">import</span>' in closed["html"]
    assert open_fence["html"] == closed["html"]
    pieces = page.evaluate(render, list("a\n```python\nimport os"))
    assert pieces["html"] == "<p>a</p>" + closed["html"]


def test_a_long_paragraph_stays_one_and_loses_nothing(page: Page) -> None:
    text = "word **bold** `code` " * 800
    found = page.evaluate(RENDER, [text[at : at + 7] for at in range(0, len(text), 7)])
    assert found["html"].count("<p>") == 1
    assert found["text"].split() == text.replace("*", "").replace("`", "").split()


def test_hostile_answers_of_a_model_do_nothing(browser: Browser, page: Page, engine: FakeEngine) -> None:
    del browser
    for text in HOSTILE:
        engine.reset(saying(text, tokens_per_step=5))
        page.get_by_label("Message", exact=True).fill(text)
        page.keyboard.press("Enter")
        page.locator(".turn.assistant[aria-busy=false]").wait_for()
        shown = page.evaluate(
            """() => document.querySelectorAll(`.turns :is(script, img, iframe, object, embed, style, base, meta,
            form, input, [onclick], [onerror], [onload])`).length"""
        )
        assert shown == 0
        page.get_by_role("button", name="New chat").click()
    assert page.evaluate("window.ran ?? null") is None
