"""Workloads: seeded, the same for everybody, and as fast as asked for."""

from pathlib import Path

import pytest

from benchmarks.simulator.trace import iid_trace
from benchmarks.simulator.workload import Workload, parse_workload, read_azure
from faser.errors import ConfigError

TRACE = iid_trace(0.5, num_requests=3, prompt_len=10, output_len=5)
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:46.4951690,374,44
2023-11-16 18:15:52.4951690,879,3
"""


def azure(tmp_path: Path, text: str = AZURE) -> Path:
    path = tmp_path / "azure.csv"
    path.write_text(text)
    return path


def test_a_recorded_csv_starts_at_zero_in_the_order_of_time(tmp_path: Path) -> None:
    assert read_azure(azure(tmp_path)) == ((0.0, 374, 44), (4.5, 396, 109), (6.0, 879, 3))


def test_load_speeds_arrivals_up_and_scale_shortens_lengths_to_at_least_a_token(tmp_path: Path) -> None:
    workload = parse_workload(str(azure(tmp_path)), scale=0.1).at_load(3.0)
    found = list(workload.arrivals(TRACE, duration_s=None, limit=None, seed=0))
    assert [(each.at_s, each.prompt_len, each.output_len) for each in found] == [
        (0.0, 37, 4),
        (1.5, 40, 11),
        (2.0, 88, 1),
    ]


def test_arrivals_end_with_the_duration_and_with_the_limit(tmp_path: Path) -> None:
    workload = parse_workload(str(azure(tmp_path)))
    assert len(list(workload.arrivals(TRACE, duration_s=6.0, limit=None, seed=0))) == 2
    assert len(list(workload.arrivals(TRACE, duration_s=None, limit=1, seed=0))) == 1


def test_a_poisson_process_has_its_rate_and_its_seed() -> None:
    workload = parse_workload("poisson:4").at_load(2.5)
    found = list(workload.arrivals(TRACE, duration_s=400.0, limit=None, seed=1))
    assert len(found) == pytest.approx(4000, rel=0.05)
    assert found == list(workload.arrivals(TRACE, duration_s=400.0, limit=None, seed=1))
    assert found != list(workload.arrivals(TRACE, duration_s=400.0, limit=None, seed=2))


def test_a_closed_workload_has_clients_and_no_times() -> None:
    workload = parse_workload("closed:4").at_load(2.0)
    assert workload.clients == 8
    found = list(workload.arrivals(TRACE, duration_s=None, limit=50, seed=0))
    assert {(each.at_s, each.prompt_len, each.output_len) for each in found} == {(None, 10, 5)}
    assert {each.trace for each in found} == {0, 1, 2}


def test_recorded_requests_come_in_order_where_that_is_asked_for() -> None:
    workload = Workload(clients=2, in_order=True).at_load(1.0)
    assert [each.trace for each in workload.arrivals(TRACE, duration_s=None, limit=5, seed=0)] == [0, 1, 2, 0, 1]


@pytest.mark.parametrize("text", ["poisson:", "poisson:0", "poisson:-1", "poisson:inf", "closed:1.5", "closed:0"])
def test_a_rate_or_a_number_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--arrivals is {text}; it must be"):
        parse_workload(text)


def test_what_is_neither_a_word_nor_a_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="no file"):
        parse_workload("bursty:3")


@pytest.mark.parametrize(
    "text, message",
    [
        ("TIMESTAMP,ContextTokens\n2023-11-16 18:15:50.9,3\n", "line 2.*GeneratedTokens"),
        (AZURE + "yesterday,1,1\n", "line 5"),
        (AZURE.splitlines()[0] + "\n", "has no request"),
    ],
)
def test_a_csv_of_another_kind_is_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_azure(azure(tmp_path, text))
