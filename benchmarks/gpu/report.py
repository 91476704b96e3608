"""The page to read and the summary to keep, of the records of a run."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.cells import markdown
from benchmarks.gpu.predictions import DEVICES, judged
from benchmarks.gpu.record import Json, Record


def overlap(result: Json) -> str:
    """Ratios are to drafting before the step; gain: ahead over the best other way. Then lanes, the host's part."""
    rows = result.get("rows", [])
    chunks = dict.fromkeys(name for row in rows for name in row if name.startswith("ahead:"))
    table = _table(rows, (*_OVERLAP, *chunks))
    lanes, gaps = _table(result.get("lanes", []), _LANES), _table(result.get("gaps", []), _GAPS)
    refused = [f"{each['drafter']} by {each['partition']}: {each['says']}" for each in result.get("refused", [])]
    stopped = [
        f"{each['drafter']} by {each['partition']}: ahead is {each['ahead']:.2f} of serial, see {each['trace']}"
        for each in result.get("stopped", [])
    ]
    return "\n\n".join(part for part in (table, result.get("decision"), *refused, *stopped, lanes, gaps) if part)


_OVERLAP = (
    "drafter",
    "partition",
    "acceptance",
    "sequences",
    "serial_tokens_per_s",
    "off",
    "ahead",
    "auto",
    "gain",
    "auto_of_best",
    "auto_ahead",
)
_LANES = ("drafter", "asked", "came", "refusal")
_GAPS = (
    "drafter",
    "partition",
    "acceptance",
    "sequences",
    "pairs",
    "draft_gap_ms",
    "verify_gap_ms",
    "given_ms",
    "join_ms",
    "between_ms",
)


def _table(rows: Sequence[Json], columns: tuple[str, ...]) -> str:
    """Columns that no row has are left out."""
    shown = tuple(name for name in columns if any(row.get(name) is not None for row in rows))
    return markdown(shown, [tuple(_cell(row.get(name)) for name in shown) for row in rows]) if shown else ""


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).replace("|", "/").split())


Table = Callable[[Any], str]

_DRY = "**A dry run on a CPU with tiny models: no figure here says anything of a device.**"


def summary(records: Sequence[Record], dry_run: bool) -> Json:
    """Device, driver and versions first, then what came of each phase."""
    found = {record.phase: record for record in records}
    about = found["environment"].result if "environment" in found else {}
    return {
        "dry_run": dry_run,
        "device": about.get("device"),
        "driver": about.get("as_read", {}).get("driver_version"),
        "versions": about.get("versions"),
        "commit": about.get("commit"),
        "copy_bytes_s": about.get("copy_bytes_s"),
        "phases": {
            record.phase: {
                "complete": record.complete,
                "seconds": record.seconds,
                "error": record.error,
                "skipped": record.skipped,
                "left_out": list(record.left_out),
                "result": record.result,
            }
            for record in records
        },
    }


def page(records: Sequence[Record], dry_run: bool) -> str:
    found = {record.phase: record.result for record in records}
    lines = ["# FASER on a device", ""]
    lines += [_DRY, ""] if dry_run else []
    lines += [*_environment(found.get("environment", {})), "", _states(records)]
    for title, name, table in _TABLES:
        lines += ["", f"## {title}", "", _shown(table, found, name) or "Nothing was measured."]
    lines += ["", "## Predictions", "", _shown(lambda _: _predictions(found), found, "")]
    return "\n".join(lines) + "\n"


def _shown(table: Table, found: dict[str, Json], name: str) -> str:
    """Show a table. What a broken-off phase has kept need not suffice for it; the rest of the page stands."""
    try:
        return table(found.get(name, {}))
    except (KeyError, TypeError, ValueError) as error:
        return f"What was kept makes no table: {type(error).__name__}: {error}"


def predictions(found: Mapping[str, Json]) -> list[Json]:
    """Return what was predicted of this device and measured, with whether it was missed."""
    return list(judged(found, _device(found)))


def _device(found: Mapping[str, Json]) -> str:
    return str((found.get("environment", {}).get("device") or {}).get("name"))


def _predictions(found: dict[str, Json]) -> str:
    device, rows = _device(found), predictions(found)
    if not any(name in device for name in DEVICES):
        return f"Predictions are of {' and '.join(DEVICES)}; this is {device}."
    columns = tuple(rows[0]) if rows else ()
    return (
        markdown(columns, [tuple(_cell(value) for value in row.values()) for row in rows]) if rows else "None yet."
    )


def _environment(about: Json) -> list[str]:
    device, read = about.get("device", {}), about.get("as_read", {})
    shown = {
        "device": device.get("name"),
        "driver": read.get("driver_version"),
        "clocks": f"{read.get('clocks.sm', '?')} of {read.get('clocks.max.sm', '?')}",
        "versions": ", ".join(f"{name} {value}" for name, value in about.get("versions", {}).items()),
        "commit": about.get("commit"),
        "copies": f"{about.get('copy_bytes_s', 0) / 1e12:.3g} TB/s",
        "products": f"{about.get('product_flops_s', 0) / 1e12:.3g} TFLOP/s",
    }
    return [f"- {name}: {value}" for name, value in shown.items()]


def _states(records: Sequence[Record]) -> str:
    rows = [(record.phase, f"{record.seconds:.0f}", record.state, str(len(record.left_out))) for record in records]
    return markdown(("phase", "s", "state", "left out for time"), rows)


def _checks(result: Json) -> str:
    rows = []
    for check in result.get("checks", []):
        state = {True: "holds", False: "DOES NOT HOLD", None: "NOT CHECKED"}[check["ok"]]
        state = "cannot be checked here" if "skipped" in check else state
        detail = {name: value for name, value in check.items() if name not in ("check", "ok")}
        rows.append((check["check"], state, _short(detail)))
    return markdown(("check", "", "found"), rows) if rows else ""


def _plain(result: Json) -> str:
    columns = ("sequences", "sampling", "ms p10 / median / p90", "times floor", "host ms", "gap ms", "tokens/s")
    rows = [
        (
            str(row["sequences"]),
            row["sampling"],
            _spread(row["period_ms"]),
            f"{row['times_floor']:.2f}",
            f"{row['host_ms']['median']:.3f}",
            "–" if row["gap_ms"] is None else f"{row['gap_ms']:.3f}",
            f"{row['tokens_per_s']:,.0f}",
        )
        for row in result.get("target", [])
    ]
    bare = [
        (
            str(row["sequences"]),
            "the runner alone",
            _spread(row["bare_ms"]),
            f"{row['times_floor']:.2f}",
            "–",
            "–",
            "–",
        )
        for row in result.get("bare", [])
    ]
    return markdown(columns, [*bare, *rows]) if bare or rows else ""


def _verify(result: Json) -> str:
    cells = result.get("cells", [])
    batches = sorted({cell["sequences"] for cell in cells})
    times = {(cell["sequences"], cell["rows_each"]): cell for cell in cells}
    rows = []
    for rows_each in dict.fromkeys(cell["rows_each"] for cell in cells):
        line = [str(rows_each)]
        for batch in batches:
            cell = times.get((batch, rows_each))
            line.append("–" if cell is None else f"{cell['step_ms']['median']:.3f} ({cell['times_floor']:.2f})")
        rows.append(tuple(line))
    columns = ("rows each", *(f"{batch} sequences (times floor)" for batch in batches))
    return markdown(columns, rows) if rows else ""


_HEADS = ("sequences", "drafting_1_ms", "drafting_4_ms", "pass_ms", "cycle_ms")
_SUMS = ("way", "bytes", "right", "same_bits", "microseconds")


def _mixtures(result: Json) -> str:
    """Models with fewer layers than they have are said below."""
    rows = [
        (
            cell["model"],
            f"{cell['sequences']} x {cell['rows_each']}",
            _spread(cell["step_ms"]),
            f"{cell['experts']:,.0f} of {cell['of_experts']:,}",
            f"{cell['step_bytes'] / 1e9:.2f}",
            f"{cell['floor_ms']:.3f}",
            f"{cell['times_floor']:.2f}",
            f"{cell['tokens_per_s']:,.0f}" if cell["rows_each"] == 1 else "–",
        )
        for cell in result.get("cells", [])
    ]
    columns = (
        "model",
        "sequences x rows",
        "ms p10 / median / p90",
        "experts read",
        "GB",
        "floor ms",
        "times floor",
    )
    cut = [
        f"{each['model']}: {each['layers']} of its {each['of']} layers."
        for each in result.get("models", [])
        if each["layers"] != each["of"]
    ]
    return "\n\n".join((markdown((*columns, "tokens/s"), rows), *cut)) if rows else ""


_FEW_ROWS = ("model", "rows", "valid", "way", "us", "difference", "same_bits_alone", "experts_read")


def _few_rows(result: Json) -> str:
    """Products by way, then layers, then what was predicted."""
    products = ("model", "bits", "blocks", "rows", "unit", "way", "us", "share_of_copies", "difference", "refused")
    layers, predicted = (
        ("model", "bits", "blocks", "rows", "separate_us", "one_launch_us"),
        ("share_of_copies", "pass_ms", "step_ms", "fp8_step_ms"),
    )
    tables = (("products", products), ("layers", layers), ("predicted", predicted))
    return "\n\n".join(filter(None, (_table(result.get(name, []), columns) for name, columns in tables)))


def _products(result: Json) -> str:
    """Each way, then torch's on fewer processors, then the shares that were predicted of the fastest.

    Behind them the same of weights in 8 bits with scales of blocks.
    """
    columns = ("model", "rows", "unit", "way", "us", "times_torch", "difference", "refused")
    predicted = ("rows", "least", "most")
    tables = (
        ("cells", columns),
        ("carved", columns),
        ("predicted", predicted),
        ("blocks", columns),
        ("blocks_predicted", predicted),
    )
    return "\n\n".join(filter(None, (_table(result.get(name, []), columns) for name, columns in tables)))


def _few_row_mixtures(result: Json) -> str:
    """Layers by way, then whole steps with what was predicted."""
    steps = [each | {"ms": each["step_ms"]["median"]} for each in result.get("cells", [])]
    columns = ("sequences", "rows_each", "graph_rows", "ms", "predicted_ms", "experts", "times_floor")
    return "\n\n".join(filter(None, (_table(result.get("layers", []), _FEW_ROWS), _table(steps, columns))))


def _cycle(result: Json) -> str:
    columns = (
        "steps",
        "sequences",
        "gamma",
        "cycle_ms",
        "times_floor",
        "gap_ms",
        "predicted_gap_ms",
        "tokens_per_s",
    )
    cells = result.get("cells", [])
    return _table(
        [each | {name: each[name]["median"] for name in ("gap_ms", "cycle_ms")} for each in cells], columns
    )


def _passes(result: Json) -> str:
    """Steps by way, how much of them no kernel ran, and the kernels that take longest."""
    rows = [each | {"step_ms": each["bare_ms"]["median"]} for each in result.get("rows", [])]
    of = ("model", "way", "sequences")
    tables = (
        (rows, (*of, "step_ms", "floor_ms", "times_floor")),
        (result.get("profiles", []), (*of, "launches", "step_ms", "kernels_ms", "idle_ms")),
        (result.get("kernels", []), (*of, "kernel", "launches", "us_each", "us_a_step")),
    )
    return "\n\n".join(filter(None, (_table(*each) for each in tables)))


def _prompts(result: Json) -> str:
    """Prompts alone, then beside others."""
    alone = [each | {"ms": each["ms"]["median"]} for each in result.get("alone", [])]
    spreads = ("before_ms", "during_ms")
    beside = [each | {name: each[name]["median"] for name in spreads} for each in result.get("beside", [])]
    columns = ("rows_a_step", "sequences", "tokens", *spreads, "longest_ms", "steps", "first_token_ms")
    tables = (
        (alone, ("tokens", "ms", "floor_ms", "times_floor", "tokens_per_s")),
        (beside, columns),
    )
    return "\n\n".join(filter(None, (_table(*each) for each in tables)))


def _grammar(result: Json) -> str:
    cells = [each | {"ms": each["period_ms"]["median"]} for each in result.get("cells", [])]
    return _table(cells, ("grammars", "sequences", "ms", "tokens_per_s"))


def _lane_rates(result: Json) -> str:
    """Copies, then passes, by processors; then the splits that the driver refused."""
    rates = ("ms", "gb_s", "gb_s_a_processor")
    copies = _table(result.get("copies", []), ("processors", *rates))
    passes = _table(result.get("passes", []), ("processors", "sequences", "context", *rates))
    return "\n\n".join(filter(None, (copies, passes, _table(result.get("refused", []), ("processors", "says")))))


def _attention(result: Json) -> str:
    columns = ("model", "sequences", "rows_each", "tile", "us", "floor_us", "times_floor")
    return _table(result.get("cells", []), columns)


def _policies(result: Json, about: str) -> str:
    found = result.get("rows", [])
    policies = list(dict.fromkeys(row["policy"] for row in found))
    cells = {(row[about], row["sequences"], row["policy"]): row for row in found}
    rows = []
    for value, sequences in dict.fromkeys((row[about], row["sequences"]) for row in found):
        line = [str(value), str(sequences)]
        for policy in policies:
            row = cells.get((value, sequences, policy))
            line.append(_times(row))
        rows.append(tuple(line))
    return markdown((about, "sequences", *policies), rows) if rows else ""


def _times(row: Json | None) -> str:
    if row is None:
        return "–"
    if row["policy"] == "off" or row["times_off"] is None:
        return f"{row['tokens_per_s']:,.0f} tokens/s"
    return f"{row['times_off']:.2f}x (γ {row['gamma']:.1f})"


def vllm_side_by_side(result: Json) -> str:
    """Next to FASER's own of the same turn."""
    if "not there" in result:
        return f"vLLM is not there: {_short(result['not there'])}"
    rows = [
        (
            row["configuration"],
            str(row["sequences"]),
            f"{row['vllm']:,.0f}",
            f"{row['faser']:,.0f}" if "faser" in row else "–",
            f"{row['ratio']:.2f}x" if "faser" in row else "–",
        )
        for row in result.get("rows", [])
    ]
    rows += [
        (name, "", f"stopped: {_short(arm['error'])}", "", "")
        for name, arm in result.get("arms", {}).items()
        if arm["error"]
    ]
    return markdown(("configuration", "sequences", "vLLM", "FASER", "FASER over vLLM"), rows) if rows else ""


def _spread(times: Json) -> str:
    return f"{times['p10']:.3f} / {times['median']:.3f} / {times['p90']:.3f}"


def _short(value: Any) -> str:
    text = " ".join(str(value).replace("|", "/").split())
    return text if len(text) <= 160 else f"{text[:160]}…"


# Title, phase whose result the table shows, and the table.
_TABLES: tuple[tuple[str, str, Table], ...] = (
    ("Checks", "checks", _checks),
    ("Plain decoding", "plain", _plain),
    ("Whole steps, each way", "passes", _passes),
    ("Verification: ms by rows of a sequence", "verify", _verify),
    ("Attention of a layer, by tile", "attention", _attention),
    ("Drafting and verifying", "cycle", _cycle),
    ("Policies at given acceptance: times policy off", "policies", partial(_policies, about="acceptance")),
    ("Copies and passes on some of the processors", "lanes", _lane_rates),
    ("Drafting ahead: times drafting before the step", "overlap", overlap),
    ("vLLM and FASER: tokens/s", "vllm", vllm_side_by_side),
    ("Checks of mixtures, sinks, windows and heads of 256", "family_checks", _checks),
    ("Mixtures of experts", "mixtures", _mixtures),
    ("Products of few rows", "few_rows", _few_rows),
    ("Products alone", "products", _products),
    ("Mixtures of few rows", "few_row_mixtures", _few_row_mixtures),
    ("Prompts", "prompts", _prompts),
    ("A grammar among other requests", "grammar", _grammar),
    ("An EAGLE-3 head", "heads", lambda result: _table(result.get("rows", []), _HEADS)),
    ("Ranks", "ranks", lambda result: _table(result.get("sums", []), _SUMS)),
)
