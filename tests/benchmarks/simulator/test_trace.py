"""Traces: what is written is read again; what does not fit is refused by name."""

import json
from pathlib import Path

import pytest

from benchmarks.simulator.trace import RequestTrace, Trace, iid_trace, read_trace, write_trace
from faser.errors import ConfigError


def request(**changes: object) -> RequestTrace:
    given = {
        "prompt_len": 3,
        "runs": (0, 2, 0),
        "lengths": (0, 2, 1),
        "confidences": ((), (0.5, 1.25), (3.0,)),
        "methods": (0, 1, 1),
        "category": "code",
        "seed": 5,
        "prompt_token_ids": (1, 2, 3),
        "output_token_ids": (4, 5, 6),
    }
    return RequestTrace(**given | changes)  # type: ignore[arg-type]


def trace(*requests: RequestTrace) -> Trace:
    return Trace(
        model="m",
        drafter="auto",
        max_tokens=4,
        temperature=0.7,
        methods=("suffix", "ngram"),
        requests=requests or (request(),),
    )


def test_a_trace_survives_its_file(tmp_path: Path) -> None:
    written = trace(request(), request(seed=6, category=""))
    write_trace(written, tmp_path / "trace.jsonl")
    assert read_trace(tmp_path / "trace.jsonl") == written


def test_a_file_has_a_header_and_a_line_a_request_with_rounded_confidences(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(trace(request(confidences=((), (1 / 3, 2.0), (3.0,)))), path)
    header, line = (json.loads(each) for each in path.read_text().splitlines())
    assert (header["drafter"], header["max_tokens"], header["temperature"]) == ("auto", 4, 0.7)
    assert line["confidences"] == [[], [0.3333, 2.0], [3.0]]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"runs": (0, 3, 0)}, "position 1 has a run of 3, a length of 2"),
        ({"confidences": ((), (0.5,), (3.0,))}, "1 confidences"),
        ({"methods": (0, 1)}, r"\[2, 3\] positions"),
        ({"prompt_len": 0}, "prompt_len is 0"),
        ({"runs": ()}, "0 positions"),
    ],
)
def test_a_request_whose_arrays_do_not_fit_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        request(**changes)


def test_a_draft_beyond_the_header_is_refused() -> None:
    with pytest.raises(ConfigError, match="drafts of 5 tokens"):
        trace(request(lengths=(0, 5, 1), confidences=((), (1.0,) * 5, (1.0,))))


@pytest.mark.parametrize("line", ["{", '{"prompt_len": 3}', "[1]", '"text"'])
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(trace(), path)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ConfigError, match="line 3"):
        read_trace(path)


@pytest.mark.parametrize("text", ["", "[]", '{"format": 9}'])
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"trace\.jsonl, line 1"):
        read_trace(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        read_trace(tmp_path / "nowhere")


@pytest.mark.parametrize("spread", [0.0, 0.3])
def test_made_up_tokens_are_right_as_often_as_asked_for(spread: float) -> None:
    made = iid_trace(0.7, max_tokens=3, num_requests=40, output_len=200, spread=spread)
    runs = [run for each in made.requests for run in each.runs]
    assert sum(runs) / len(runs) == pytest.approx(0.7 + 0.7**2 + 0.7**3, rel=0.05)


def test_confidences_tell_something_only_where_probabilities_differ() -> None:
    made = iid_trace(0.5, max_tokens=1, num_requests=40, output_len=100, spread=0.5)
    sure = [
        run
        for each in made.requests
        for run, (confidence,) in zip(each.runs, each.confidences, strict=True)
        if confidence > 1
    ]
    assert sum(sure) / len(sure) > 0.8
    plain = iid_trace(0.5, max_tokens=1)
    assert {row for each in plain.requests for row in each.confidences} == {(0.0,)}


def test_an_acceptance_that_is_no_probability_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"acceptance is 1\.5"):
        iid_trace(1.5)
