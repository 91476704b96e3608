"""What the log never has: the text of prompts and answers, and API keys. At the level that logs most."""

import signal
from pathlib import Path
from typing import Any

from tests.end_to_end.server import serving

WORD = "zyzzyva"  # in every prompt, and in nothing else
KEY = "sk-never-logged"

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
REQUESTS: list[tuple[str, Any]] = [
    (TEXT, {"prompt": f"{WORD} and more", "max_tokens": 4, "echo": True}),
    (TEXT, {"prompt": [WORD, WORD], "max_tokens": 4, "stream": True}),
    (CHAT, {"messages": [{"role": "user", "content": WORD}], "max_tokens": 4}),
    (CHAT, {"messages": [{"role": WORD, "content": WORD}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": WORD, "text": WORD}]}]}),
    (
        CHAT,
        {"messages": [{"role": "user", "content": WORD}], "chat_template_kwargs": {"x": WORD}, "max_tokens": 1},
    ),
    (TEXT, {"prompt": WORD * 2000}),
    (TEXT, {"prompt": WORD, "temperature": WORD}),
    (TEXT, {"prompt": WORD, "stop": [WORD], "user": WORD, "cache_salt": WORD, "max_tokens": 4}),
    (TEXT, {"prompt": WORD, "unknown_field": WORD, "max_tokens": 1}),
    (TEXT, {"prompt": WORD, "suffix": WORD}),
    (TEXT, {"prompt": WORD, "model": WORD}),
    (TEXT, {"prompt": WORD, "prediction": {"type": "content", "content": WORD}, "max_tokens": 2}),
    ("/tokenize", {"prompt": WORD}),
    ("/tokenize", {"messages": [{"role": "user", "content": WORD}]}),
]
QUERIED = ("/health", "/v1/models", "/metrics", "/", "/nowhere", "/v1/completions")  # 200, 404 and 405


def test_neither_prompts_nor_keys_are_logged(tiny_checkpoint: Path, folder: Path) -> None:
    flags = ("--log-level", "debug", "--api-key", KEY)
    with serving(tiny_checkpoint, folder, *flags, key=KEY) as server:
        with server.http() as http:
            statuses = [http.post(path, json=body).status_code for path, body in REQUESTS]
            http.post(TEXT, content=f'{{"prompt": "{WORD}'.encode(), headers={"Content-Type": "application/json"})
            http.get("/v1/models", headers={"Authorization": f"Bearer wrong-{WORD}"})
            for path in QUERIED:
                http.get(f"{path}?api_key={KEY}&{WORD}", headers={"Referer": f"http://page/?key={KEY}"})
            http.post(f"{TEXT}?key={KEY}", json={"prompt": "hello", "max_tokens": 2, "stream": True})
        server.process.send_signal(signal.SIGTERM)
        server.wait_end()
        assert {200, 400, 404} <= set(statuses)
        assert "unknown_field" in server.log  # names of fields are; so it is this server's log
        assert "POST /v1/completions" in server.log
        assert all(f'"GET {path} HTTP/1.1"' in server.log for path in QUERIED)
        assert WORD not in server.log.lower()
        assert KEY not in server.log
