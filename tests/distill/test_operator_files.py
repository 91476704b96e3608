"""Files of questions, in each of their forms, and with mistakes.

Recorded traffic: texts are rendered as a server renders them, tokens are taken as they are.
"""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from faser.distill.dataset import RecordedConversation
from faser.distill.operator_files import TrafficFile, read_conversations
from faser.distill.questions import ChatTurns
from faser.engine.text.tokenizer import load_tokenizer
from faser.errors import ConfigError
from tests.checkpoints import EOS_TOKEN_ID, VOCAB_SIZE


def test_each_form_gives_a_conversation(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"prompt": "one"}\n\n{"turns": ["two", "later"]}\n'
        '{"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "three"}]}\n'
    )
    assert [[(each["role"], each["content"]) for each in found] for found in read_conversations(path)] == [
        [("user", "one")],
        [("user", "two")],
        [("system", "be brief"), ("user", "three")],
    ]
    path = tmp_path / "a.txt"
    path.write_text("one\n \n{two}\n")
    assert [found[0]["content"] for found in read_conversations(path)] == ["one", "{two}"]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.txt", b" \n", "holds no question"),
        ("a.txt", b"\xff\xfe", "must be text in UTF-8"),
        ("a.jsonl", b'{"prompt": "one"}\nnot JSON\n', "its line 2 must be JSON such as"),
        ("a.jsonl", b'{"prompt": 1}', "its line 1 must be JSON such as"),
        ("a.jsonl", b'{"messages": []}', "its line 1 must be JSON such as"),
        ("a.jsonl", b'{"messages": [{"content": "a"}]}', "its line 1 must be JSON such as"),
        (
            "a.jsonl",
            b'{"messages": [{"role": "assistant", "content": "a"}]}',
            "its line 1 ends with a message of the assistant; it must end with the user's",
        ),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_conversations(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it cannot be read: No such file or directory"):
        read_conversations(tmp_path / "none")


def read(path: Path, directory: Path, *records: Any) -> list[RecordedConversation]:
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    tokenizer = load_tokenizer(directory)
    turns = ChatTurns(tokenizer, (EOS_TOKEN_ID,))
    return list(TrafficFile(path, tokenizer, turns, EOS_TOKEN_ID, vocab_size=VOCAB_SIZE))


def test_texts_become_the_tokens_that_a_server_would_have(tiny_checkpoint: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny_checkpoint)
    messages = [{"role": "user", "content": "the fox"}]
    ended, cut = read(
        tmp_path / "a.jsonl",
        tiny_checkpoint,
        {"messages": messages, "answer": "jumps over", "temperature": 0.5},
        {"prompt": "the fox", "answer": "jumps", "finish_reason": "length"},
    )
    assert tokenizer.decode(ended.prompt, False) == (
        "<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(ended.answer, False) == "jumps over<|im_end|>"
    assert (ended.ended, ended.temperature) == (True, 0.5)
    assert (cut.prompt, tokenizer.decode(cut.answer, False), cut.ended) == (ended.prompt, "jumps", False)
    assert math.isnan(cut.temperature)


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE])
def test_a_token_that_the_model_lacks_is_refused_with_both_numbers(
    tiny_checkpoint: Path, tmp_path: Path, token_id: int
) -> None:
    record = {"prompt_token_ids": [5, 6], "answer_token_ids": [7, token_id]}
    with pytest.raises(
        ConfigError, match=f"its line 1 has token id {token_id}; the model has {VOCAB_SIZE} tokens"
    ):
        read(tmp_path / "a.jsonl", tiny_checkpoint, record)


def test_tokens_are_taken_as_they_are(tiny_checkpoint: Path, tmp_path: Path) -> None:
    record = {"prompt_token_ids": [5, 6], "answer_token_ids": [7, 2]}
    (found,) = read(tmp_path / "a.jsonl", tiny_checkpoint, record)
    assert (found.prompt, found.answer) == ((5, 6), (7, 2))


def test_an_answer_that_a_stop_string_ended_gets_no_end_token(tiny_checkpoint: Path, tmp_path: Path) -> None:
    record = {
        "prompt_token_ids": [5],
        "answer_token_ids": [7],
        "finish_reason": "stop",
        "stop_reason": "x",
        "time": 1.5,
    }
    (found,) = read(tmp_path / "a.jsonl", tiny_checkpoint, record)
    assert (found.answer, found.ended) == ((7,), False)


WRONG: tuple[Any, ...] = (
    *(None, True, -1, 1 << 70, 10**400, float("nan"), "", "\ud800", [], ["x"], [[1]], [None], {}, {"a": 1}),
    *([{"role": "user"}], [{"role": None, "content": "x"}], [{"role": "user", "content": [1]}]),
)
RECORDS: tuple[dict[str, Any], ...] = (
    {"messages": [{"role": "user", "content": "hi"}], "answer": "yo", "temperature": 0.5},
    {"prompt": "hi", "answer": "yo", "finish_reason": "stop"},
    {"prompt_token_ids": [1, 2], "answer_token_ids": [3], "stop_reason": None},
)


@pytest.mark.parametrize("has_template", [True, False])
def test_no_line_of_traffic_raises_anything_else(
    tiny_checkpoint: Path, tmp_path: Path, has_template: bool
) -> None:
    """Seeded mutants: fields of other types, and characters that are others."""
    tokenizer = load_tokenizer(tiny_checkpoint)
    turns = ChatTurns(tokenizer, (EOS_TOKEN_ID,)) if has_template else None
    path, refused = tmp_path / "a.jsonl", 0
    for seed in range(300):
        rng = random.Random(seed)
        record = dict(rng.choice(RECORDS))
        record[rng.choice([*record, "temperature", "messages"])] = rng.choice(WRONG)
        line = list(json.dumps(record))
        if rng.random() < 0.3:
            line[rng.randrange(len(line))] = rng.choice('{}[]",:0x\\\0\u2028')
        path.write_text("".join(line))
        try:
            list(TrafficFile(path, tokenizer, turns, EOS_TOKEN_ID, vocab_size=VOCAB_SIZE))
        except ConfigError:
            refused += 1
    assert 100 < refused < 300


@pytest.mark.parametrize(
    "record, message",
    [
        ({"prompt": "a"}, "its line 2 must be JSON such as"),
        ([1], "its line 2 must be JSON such as"),
        ({"prompt_token_ids": [5], "answer_token_ids": ["7"]}, "its line 2 must be JSON such as"),
        ({"prompt": "a", "answer": ["b"]}, "its line 2 must be JSON such as"),
        ({"prompt": "a", "answer": "b", "temperature": 10**400}, "its line 2 must be JSON such as"),
        ({"prompt": "a", "answer": ""}, "has 17 tokens of prompt and 0 of answer; each needs one"),
    ],
)
def test_a_mistake_in_traffic_is_named_with_its_line(
    tiny_checkpoint: Path, tmp_path: Path, record: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path / "a.jsonl", tiny_checkpoint, {"prompt": "a", "answer": "b"}, record)
