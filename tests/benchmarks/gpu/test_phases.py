"""The bench programs for a GPU, on a CPU: every phase runs with tiny models, and says that it was no GPU."""

import json
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import engines
from benchmarks.gpu.__main__ import failed_checks, main
from benchmarks.gpu.checks.checks import run as run_checks
from benchmarks.gpu.decoding import overlap
from benchmarks.gpu.decoding.mixtures import shapes
from benchmarks.gpu.decoding.passes import WAYS
from benchmarks.gpu.decoding.policies import run as run_policies
from benchmarks.gpu.decoding.vllm_arm import run as run_vllm
from benchmarks.gpu.decoding.vllm_arm import side_by_side
from benchmarks.gpu.phases import (
    GRACE,
    GRACE_S,
    PHASES,
    Phase,
    phases_named,
    run_all,
    run_apart,
    run_here,
    with_work,
)
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.record import Desk, Folder, Json, Record
from benchmarks.gpu.report import page, summary, vllm_side_by_side
from faser.engine.engine import Engine

VLLM = '''
"""Says as many tokens as are asked for, and when it was asked."""
import time
__version__ = "0.24.0 (stand-in)"

class SamplingParams:
    def __init__(self, *, temperature, max_tokens, ignore_eos, detokenize):
        assert temperature == 0.0 and ignore_eos and not detokenize
        self.max_tokens = max_tokens

class _Output:
    def __init__(self, count):
        self.outputs = [self]
        self.token_ids = [0] * count

class LLM:
    def __init__(self, *, model, skip_tokenizer_init, load_format, speculative_config=None, **rest):
        assert skip_tokenizer_init and load_format == "dummy"
        self.step_s = 1e-4
        if speculative_config is not None:
            rates = speculative_config["synthetic_acceptance_rates"]
            assert len(rates) == speculative_config["num_speculative_tokens"]
            self.step_s /= 1 + sum(rates)

    def generate(self, prompts, params, use_tqdm):
        time.sleep(self.step_s * params.max_tokens)
        return [_Output(params.max_tokens) for _ in prompts]
'''


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """A dry run for which everything is there."""
    vllm = tmp_path_factory.mktemp("vllm")
    (vllm / "vllm").mkdir()
    (vllm / "vllm" / "__init__.py").write_text(VLLM)
    out = tmp_path_factory.mktemp("out")
    return Plan(out=out, dry_run=True, vllm=vllm)


@pytest.fixture(scope="module")
def records(plan: Plan) -> dict[str, Record]:
    """Of all phases, one after the other in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "LEAST_AHEAD", 0.0)  # how fast a tiny model is here decides nothing
        return {phase.name: run_here(plan, phase, 60.0, lambda _: None) for phase in PHASES}


@pytest.mark.full
@pytest.mark.parametrize("name", [phase.name for phase in PHASES])
def test_every_phase_comes_to_its_end_and_says_that_it_was_a_dry_run(
    records: dict[str, Record], name: str
) -> None:
    record = records[name]
    assert record.error is None
    assert record.complete
    assert record.dry_run
    assert not record.left_out
    assert "not there" not in record.result


@pytest.mark.full
def test_every_check_holds_on_the_reference_backend(records: dict[str, Record]) -> None:
    checks = records["checks"].result["checks"]
    assert failed_checks([records["checks"]]) == [], checks
    assert len(checks) == 14
    assert [each["check"] for each in checks if each["ok"] is None] == ["replays", "memory of a step"]


@pytest.mark.full
def test_checks_of_families_hold_on_the_reference_backend(records: dict[str, Record]) -> None:
    checks = records["family_checks"].result["checks"]
    assert failed_checks([records["family_checks"]]) == [], checks
    assert [each["check"] for each in checks if each["ok"] is None] == ["replays"]
    found = next(each for each in checks if each["check"] == "rope, append and attention")["relative_errors"]
    assert {"4/2 x 16, window 48, sinks, decoding", "4/2 x 16, sinks, decoding"} <= set(found)
    assert "4/2 x 16, window 48, capped, decoding" in found


@pytest.mark.full
def test_experts_of_mixtures_are_counted(plan: Plan, records: dict[str, Record]) -> None:
    """Planted: the experts of the steps that warm up counted, and not divided by."""
    cells = records["mixtures"].result["cells"]
    wanted = [(sequences, rows) for _ in plan.sizes.mixtures for sequences, rows in shapes(plan)]
    assert [(cell["sequences"], cell["rows_each"]) for cell in cells] == wanted
    for cell in cells:
        rows = cell["sequences"] * cell["rows_each"]
        most = min(cell["of_experts"], rows * 2 * 2)  # two layers, of whose experts a row passes two
        assert 4 <= cell["experts"] <= most, cell


@pytest.mark.full
def test_reference_answers_are_the_same_again(records: dict[str, Record]) -> None:
    """In bfloat16 torch may round a row otherwise in another batch: speculation need not give the same tokens."""
    found = {check["check"]: check for check in records["checks"].result["checks"]}
    assert found["answers: the same again"] | {"check": ""} == {
        "check": "",
        "ok": True,
        "greedy": True,
        "T 0.8": True,
    }
    assert found["answers: synchronous"]["same"] == 1.0


@pytest.mark.full
def test_plain_decoding_is_timed_in_every_cell(plan: Plan, records: dict[str, Record]) -> None:
    result = records["plain"].result
    assert [row["sequences"] for row in result["bare"]] == sorted(plan.sizes.batches)
    cells = [(row["sampling"], row["sequences"]) for row in result["target"]]
    assert cells == [(name, each) for name in ("greedy", "T 0.8, top_p 0.95") for each in plan.sizes.batches]
    assert all(row["gap_ms"] is not None for row in result["target"])


@pytest.mark.full
def test_cycles_are_timed_both_ways_where_there_was_a_gap(plan: Plan, records: dict[str, Record]) -> None:
    cells = records["cycle"].result["cells"]
    assert {cell["steps"] for cell in cells} == {"read", "followed"}
    assert all(cell["gamma"] == plan.sizes.cycle_gamma and cell["floor_ms"] > 0 for cell in cells)


@pytest.mark.full
def test_whole_steps_are_timed_each_way(plan: Plan, records: dict[str, Record]) -> None:
    result = records["passes"].result
    wanted = [(way.model, way.name, each) for way in WAYS for each in plan.sizes.pass_batches]
    for table in ("rows", "profiles"):
        assert [(row["model"], row["way"], row["sequences"]) for row in result[table]] == wanted
    assert all(row["launches"] >= 1 for row in result["profiles"])


@pytest.mark.full
def test_policies_are_compared_with_off_in_every_cell(plan: Plan, records: dict[str, Record]) -> None:
    rows = records["policies"].result["rows"]
    policies = {"off", "fixed:1", "fixed:2", "goodput", "faser"}
    for acceptance in plan.sizes.acceptances:
        for sequences in plan.sizes.policy_batches:
            cell = {row["policy"]: row for row in rows if row["sequences"] == sequences}
            assert set(cell) == policies, acceptance
            assert cell["off"]["times_off"] == 1.0
            assert cell["off"]["gamma"] == 0.0
            assert cell["fixed:2"]["gamma"] == pytest.approx(2.0, abs=0.35)


@pytest.mark.full
def test_the_report_has_all_tables_and_warns_of_dry_runs(plan: Plan, records: dict[str, Record]) -> None:
    text = page(list(records.values()), plan.dry_run)
    assert "Nothing was measured" not in text
    assert "no figure here says anything of a device" in text
    kept = summary(list(records.values()), plan.dry_run)
    assert kept["dry_run"] is True
    assert kept["versions"]["torch"] == torch.__version__
    assert set(kept["phases"]) == {phase.name for phase in PHASES}
    json.dumps(kept)


# What the report of each phase is made of: a JSON file without it would make a table without rows.
TABLES = {
    "environment": ("device", "versions", "copy_bytes_s", "product_flops_s"),
    "checks": ("checks",),
    "plain": ("bare", "target"),
    "verify": ("cells",),
    "attention": ("cells",),
    "passes": ("rows", "profiles", "kernels"),
    "cycle": ("cells",),
    "policies": ("turns", "rows"),
    "overlap": ("lanes", "turns", "rows", "gaps", "decision"),
    "vllm": ("arms", "rows"),
    "family_checks": ("checks",),
    "mixtures": ("models", "cells"),
    "few_rows": ("predicted", "products", "layers"),
    "products": ("predicted", "cells", "carved"),
    "few_row_mixtures": ("layers", "cells"),
    "prompts": ("alone", "beside"),
    "grammar": ("cells",),
    "lanes": ("copies", "passes"),
    "heads": ("cells", "rows"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", [phase.name for phase in PHASES])
def test_the_report_needs_only_the_disk(plan: Plan, records: dict[str, Record], name: str) -> None:
    found = Folder(plan.out, dry_run=True).load(name)
    assert found is not None
    assert [each for each in TABLES[name] if not found.result.get(each)] == []
    assert page([found], dry_run=True) == page([records[name]], dry_run=True)


@pytest.mark.full
def test_a_second_run_does_nothing_again_and_writes_the_same_report(
    plan: Plan, records: dict[str, Record], capsys: pytest.CaptureFixture[str]
) -> None:
    """Planted: a phase that is run again, a report of the phases of this run alone."""
    files = {path: path.stat().st_mtime_ns for path in plan.out.rglob("*.json") if path.stem in records}
    assert len(files) == len(PHASES)

    assert main(["run", str(plan.out), "--dry-run", "--vllm", str(plan.vllm)]) == 0
    said = capsys.readouterr().out
    assert [line for line in said.splitlines() if line.endswith(": there already")] == [
        f"{phase.name}: there already" for phase in PHASES
    ]
    assert {path: path.stat().st_mtime_ns for path in files} == files
    whole = page(list(records.values()), dry_run=True)
    assert (plan.out / "report.md").read_text() == whole

    assert main(["run", str(plan.out), "--dry-run", "--phases", "environment"]) == 0
    assert (plan.out / "report.md").read_text() == whole


def test_a_phase_whose_process_ends_too_early_is_noted(tmp_path: Path) -> None:
    """Planted: the record of an earlier try taken for this one's."""
    plan = Plan(out=tmp_path, dry_run=True)
    Folder(tmp_path, dry_run=True).save(Record(phase="broken", dry_run=True, error="of yesterday"))
    broken = Phase(name="broken", run=("nowhere", "run"), share=1.0, about="")
    record = run_apart(plan, broken, 20.0, ["run", str(tmp_path), "--dry-run"])
    assert record.error is not None
    assert "process ended with status" in record.error
    assert not record.complete


def test_an_exception_ends_its_phase_only(tmp_path: Path) -> None:
    plan = Plan(out=tmp_path, dry_run=True)
    record = run_here(plan, Phase(name="broken", run=("nowhere", "run"), share=1.0, about=""), 1.0, lambda _: None)
    assert record.error is not None
    assert "No module named 'nowhere'" in record.error
    assert not record.complete
    found = Folder(tmp_path, dry_run=True).load("broken")
    assert found == record


def test_time_that_a_phase_leaves_goes_to_those_behind_it(tmp_path: Path) -> None:
    """Planted: shares of the whole budget whatever is done."""
    now = [0.0]
    given: list[tuple[str, float]] = []

    def launch(phase: Phase, budget_s: float) -> Record:
        given.append((phase.name, budget_s))
        now[0] += 1.0
        return Record(phase=phase.name, dry_run=True, complete=True)

    phases = [
        Phase(name=name, run=("", ""), share=share, about="")
        for name, share in (("a", 0.5), ("b", 0.25), ("c", 0.25))
    ]
    folder = Folder(tmp_path, dry_run=True)
    run_all(phases, folder, 100.0, launch, lambda _: None, now=lambda: now[0])
    assert given == [("a", 50.0), ("b", 99.0 / 2), ("c", (98.0 - GRACE_S) / GRACE)]


def test_a_phase_that_failed_is_tried_again_and_one_that_is_complete_is_not(tmp_path: Path) -> None:
    folder = Folder(tmp_path, dry_run=True)
    folder.save(Record(phase="a", dry_run=True, complete=True))
    folder.save(Record(phase="b", dry_run=True, error="broke"))
    launched = []

    def launch(phase: Phase, _budget_s: float) -> Record:
        launched.append(phase.name)
        return Record(phase=phase.name, dry_run=True, complete=True)

    phases = [Phase(name=name, run=("", ""), share=1.0, about="") for name in ("a", "b")]
    records = run_all(phases, folder, 100.0, launch, lambda _: None)
    assert launched == ["b"]
    assert all(record.complete for record in records)


def test_a_dry_run_and_another_do_not_share_a_folder(tmp_path: Path) -> None:
    Folder(tmp_path, dry_run=True).save(Record(phase="plain", dry_run=True, complete=True))
    with pytest.raises(ValueError, match=r"plain.json is of a dry run, this is a run on a device"):
        Folder(tmp_path, dry_run=False).load("plain")


def test_what_there_is_no_time_for_is_left_out_by_name(tmp_path: Path) -> None:
    now = [0.0]
    desk = Desk(Folder(tmp_path, dry_run=True), "plain", 10.0, lambda _: None, lambda: now[0])
    assert desk.may_begin("one")
    assert not desk.may_begin("two", needs_s=11.0)
    now[0] = 10.5
    assert not desk.may_begin("three")
    assert desk.finish().left_out == ("two", "three")


def test_results_are_on_the_disk_as_soon_as_they_are_there(tmp_path: Path) -> None:
    folder = Folder(tmp_path, dry_run=True)
    desk = Desk(folder, "plain", 10.0, lambda _: None)
    desk.append("cells", {"ms": 1})
    desk.append("cells", {"ms": 2})
    found = folder.stopped("plain", "stopped after 20 s", 20.0)
    assert found.result == {"cells": [{"ms": 1}, {"ms": 2}]}
    assert (found.complete, found.error) == (False, "stopped after 20 s")


def test_a_phase_that_there_is_not_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="there is no phase plan; there are environment, checks, plain"):
        phases_named(["plan"])
    assert [phase.name for phase in phases_named(["plain", "checks"])] == ["checks", "plain"]


def test_phases_without_their_input_take_no_time_of_others(tmp_path: Path) -> None:
    phases = {phase.name: phase for phase in with_work(Plan(out=tmp_path), PHASES)}
    assert phases["vllm"].share == 0.0
    given: list[tuple[str, float]] = []

    def launch(phase: Phase, budget_s: float) -> Record:
        given.append((phase.name, budget_s))
        return Record(phase=phase.name, dry_run=True, complete=True)

    folder, both = Folder(tmp_path, dry_run=True), [phases["vllm"], replace(phases["plain"], least_s=0.0)]
    run_all(both, folder, 28.0, launch, lambda _: None, now=lambda: 0.0)
    assert given == [("vllm", 0.0), ("plain", pytest.approx(10.0))]


def test_shares_of_all_phases_are_a_whole() -> None:
    assert sum(phase.share for phase in PHASES) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "check, status", [({"ok": True}, 0), ({"ok": None}, 1), ({"ok": False}, 1), ({"ok": None, "skipped": "no"}, 0)]
)
def test_a_check_that_does_not_hold_or_was_not_made_ends_a_run_with_status_1(
    tmp_path: Path, check: Json, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Planted: a status by what is complete alone; what was not checked taken for what holds."""
    checks = {"checks": [{"check": "c", **check}]}
    Folder(tmp_path, dry_run=True).save(Record(phase="checks", dry_run=True, complete=True, result=checks))
    assert main(["run", str(tmp_path), "--dry-run", "--phases", "checks"]) == status
    assert "checks: there already" in capsys.readouterr().out


def test_a_check_without_time_is_noted_as_not_checked(tmp_path: Path) -> None:
    """Planted: left out by name alone, so that the report does not show it as missing among the checks."""
    desk = Desk(Folder(tmp_path, dry_run=True), "checks", 0.0, lambda _: None, lambda: 0.0)
    run_checks(Plan(out=tmp_path, dry_run=True), desk)
    checks = desk.finish().result["checks"]
    assert len(checks) == 14
    assert all(each["ok"] is None and "skipped" not in each for each in checks)


@pytest.mark.full
def test_no_engine_is_alive_when_the_next_one_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the engine of the acceptance before this one, still named; a device has no room for two."""
    built: list[weakref.ref[Engine]] = []
    build = engines.open_engine

    def watched(plan: Plan, wanted: engines.Wanted) -> engines.Opened:
        assert [each for each in built if each() is not None] == []
        opened = build(plan, wanted)
        built.append(weakref.ref(opened.engine))
        return opened

    monkeypatch.setattr(engines, "open_engine", watched)
    plan = Plan(out=tmp_path, dry_run=True)
    run_policies(plan, Desk(Folder(tmp_path, dry_run=True), "policies", 60.0, lambda _: None))
    assert len(built) == len(plan.sizes.acceptances) > 1


def test_the_report_says_what_failed_what_does_not_hold_and_what_was_left_out() -> None:
    """Planted: a failed phase given as complete, a check that does not hold as one that does."""
    text = page(
        [
            Record(phase="plain", dry_run=False, error="a\nValueError: b", left_out=("one", "two")),
            Record(phase="checks", dry_run=False, complete=True, result={"checks": [{"check": "c", "ok": False}]}),
        ],
        dry_run=False,
    )
    assert "| plain | 0 | FAILED: ValueError: b | 2 |" in text
    assert "| checks | 0 | complete | 0 |" in text
    assert "| c | DOES NOT HOLD |" in text
    assert "dry run" not in text


def test_vllm_is_shown_next_to_the_same_work_of_the_same_turn() -> None:
    """Planted: the ratio upside down; a cell of ours with another number of sequences."""
    arms = {
        name: {
            "acceptance": acceptance,
            "error": None,
            "cells": [{"sequences": 8, "tokens_per_s": 100.0}, {"sequences": 1, "tokens_per_s": 10.0}],
            "ours": [{"sequences": 8, "tokens_per_s": rate}],
        }
        for name, acceptance, rate in (("plain", None, 200.0), ("draft_model:3", 0.8, 300.0))
    }
    text = vllm_side_by_side({"arms": arms, "rows": side_by_side(arms)})
    assert "| plain | 8 | 100 | 200 | 2.00x |" in text
    assert "| plain | 1 | 10 | – | – |" in text
    assert "| draft_model:3 | 8 | 100 | 300 | 3.00x |" in text


@pytest.mark.full
def test_both_are_timed_over_the_same_batches_the_most_telling_first(
    plan: Plan, records: dict[str, Record]
) -> None:
    for arm in records["vllm"].result["arms"].values():
        assert [cell["sequences"] for cell in arm["cells"]] == list(plan.sizes.vllm_batches)
        assert [cell["sequences"] for cell in arm["ours"]] == list(plan.sizes.vllm_batches)


def test_a_vllm_that_cannot_be_imported_is_said_by_the_process_that_was_to_run_it(tmp_path: Path) -> None:
    """Planted: a process of its own for the import, which takes as long again."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("import a_package_that_is_not_there")
    plan = Plan(out=tmp_path / "out", dry_run=True, vllm=tmp_path)
    desk = Desk(Folder(plan.out, dry_run=True), "vllm", 30.0, lambda _: None)
    run_vllm(plan, desk)
    assert "No module named 'a_package_that_is_not_there'" in desk.result["not there"]
    assert list(plan.out.glob("*.log")) == [plan.out / "vllm-plain.log"]
