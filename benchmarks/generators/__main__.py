"""Independent load generators against a server with default flags, and whether their figures agree with its own.

    python -m benchmarks generators QUESTIONS.jsonl OUT.json [--tools vllm,guidellm,aiperf,lm_eval]
        [--environments FOLDER] [--model FOLDER] [--server-args 'FLAGS']

QUESTIONS: Spec-Bench's question.jsonl. `python -m benchmarks generators.setup` installs the tools, unmodified.
/metrics is read before and after each run, and the difference has to be what the tool says: counts are equal, or a
stated reason gives the difference; latencies are within stated bounds. Ends with status 1 where they are not.
OUT.json and OUT.md are written after every run.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.generators import aiperf, guidellm, lm_eval, vllm_bench
from benchmarks.generators.agreement import Check, Finding, ServerMetrics, compare
from benchmarks.generators.setup import DEFAULT_DIRECTORY, VLLM_SOURCE
from benchmarks.generators.tool import Figures, Run, Target
from benchmarks.peers.setup import pulled_model
from benchmarks.runner import about, command_line, end_servers_on_sigterm, portable, write_json
from benchmarks.servers import Recipe, Server, free_port
from faser.cli.console import runs_bar

RUNS: tuple[Run, ...] = (*vllm_bench.runs(), *guidellm.runs(), *aiperf.runs(), *lm_eval.runs())


_HEAD = (
    "| load generator and run | requests | input tokens | output tokens | draft tokens, accepted "
    "| mean TTFT: tool, server | mean TPOT: tool, server | counts | latencies |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run. version: of the tool. figures: None: the tool failed, and `failure` is the end of its output."""

    tool: str
    version: str
    run: str
    command: str
    figures: Figures | None
    checks: Sequence[Check]
    failure: str = ""

    @property
    def agrees(self) -> bool:
        return self.figures is not None and all(each.outcome is not Finding.DIFFERS for each in self.checks)


def document(about: dict[str, Any], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {**about, "runs": [{**asdict(each), "agrees": each.agrees} for each in outcomes]}


def page(outcomes: Sequence[Outcome]) -> str:
    """The table, and below it every difference with its reason."""
    lines = [_HEAD, *(_row(each) for each in outcomes)]
    differences = [
        f"- {each.tool}, {each.run}: {check.what}, tool {_number(check.tool)}, server {_number(check.server)}: "
        f"{check.outcome}{': ' if check.reason else ''}{check.reason}"
        for each in outcomes
        for check in each.checks
        if check.outcome in (Finding.DIFFERS, Finding.EXPLAINED)
    ]
    return "\n".join([*lines, "", *differences, ""])


def _row(outcome: Outcome) -> str:
    figures = outcome.figures
    name = f"{outcome.tool} {outcome.version}: {outcome.run}"
    if figures is None:
        return f"| {name} | failed | | | | | | | |"
    drafts = figures.drafts
    cells = [
        str(figures.completed) + (f", {figures.cancelled} cancelled" if figures.cancelled else ""),
        _first(figures.input_tokens, figures.own_input_tokens),
        _first(figures.output_tokens, figures.own_output_tokens),
        "" if drafts is None else f"{drafts.draft_tokens:,}, {drafts.accepted_tokens:,}",
        _means(outcome.checks, "TTFT, mean"),
        _means(outcome.checks, "TPOT, mean"),
        _worst(outcome.checks, latencies=False),
        _worst(outcome.checks, latencies=True),
    ]
    return f"| {name} | {' | '.join(cells)} |"


def _first(*counts: int | None) -> str:
    return next((f"{count:,}" for count in counts if count is not None), "")


def _means(checks: Sequence[Check], what: str) -> str:
    return next(
        (f"{1000 * each.tool:.0f}, {1000 * each.server:.0f} ms" for each in checks if each.what == what), ""
    )


def _worst(checks: Sequence[Check], *, latencies: bool) -> str:
    """The outcome furthest from equal. Latencies are never equal, counts never within bounds."""
    order = list(Finding)
    found = [each.outcome for each in checks if _is_latency(each) == latencies]
    return str(max(found, key=order.index)) if found else ""


def _is_latency(check: Check) -> bool:
    return isinstance(check.tool, float)


def _number(value: float) -> str:
    return f"{1000 * value:.1f} ms" if isinstance(value, float) else f"{value:,}"


_START_TIMEOUT_S = 600.0
_RUN_TIMEOUT_S = 600.0
_IDLE_TIMEOUT_S = 10.0
_TIMEOUT_S = 30.0
_POLL_S = 0.1
_OUTPUT_END = 3000  # characters of a failed tool's output that the results keep


def main(arguments: Sequence[str] | None = None) -> int:
    wanted = _parser().parse_args(arguments)
    tools = wanted.tools.split(",")
    if unknown := sorted(set(tools) - {run.tool for run in RUNS}):
        raise SystemExit(
            f"--tools: {', '.join(unknown)}: not among {', '.join(dict.fromkeys(r.tool for r in RUNS))}"
        )
    runs = [run for run in RUNS if run.tool in tools]
    end_servers_on_sigterm()
    model = wanted.model or pulled_model()
    about = _about(wanted, arguments if arguments is not None else sys.argv[1:])
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="generators-") as name, _server(wanted, Path(name)) as server:
        ready_s = server.wait_until_healthy(_START_TIMEOUT_S)
        print(f"the server is ready after {ready_s:.0f} s", file=sys.stderr)
        with runs_bar() as bar:
            task = bar.add_task("", total=len(runs))
            for number, run in enumerate(runs):
                bar.update(task, description=f"{run.tool}: {run.name}")
                target = _target(wanted, server, model, Path(name) / str(number))
                outcomes.append(_outcome(run, target))
                bar.advance(task)
                if bar.disable:
                    print(f"{run.tool}: {run.name}: agrees: {outcomes[-1].agrees}", file=sys.stderr, flush=True)
                _write(wanted.out, about, outcomes)
    print(page(outcomes))
    return 0 if all(each.agrees for each in outcomes) else 1


def _parser() -> argparse.ArgumentParser:
    parser = command_line(__doc__)
    parser.add_argument("questions", type=Path, help="Spec-Bench's question.jsonl")
    parser.add_argument("out", type=Path, help="file for the results, .json")
    parser.add_argument("--tools", default="vllm,guidellm,aiperf,lm_eval", help="default: %(default)s")
    parser.add_argument("--environments", type=Path, default=DEFAULT_DIRECTORY, help="default: %(default)s")
    parser.add_argument("--model", type=Path, help="checkpoint folder; default: what `faser pull` fetches")
    parser.add_argument("--server-args", default="", help="further flags of `faser serve`")
    return parser


def _server(wanted: argparse.Namespace, folder: Path) -> Server:
    port = free_port()
    flags = (*shlex.split(wanted.server_args), "--port", str(port))
    command = (sys.executable, "-m", "faser", "serve", *([str(wanted.model)] if wanted.model else []), *flags)
    url = f"http://127.0.0.1:{port}"
    log = folder / "server.log"
    return Server(Recipe(name="faser", command=command, environment={}, base_url=url, log_path=log))


def _target(wanted: argparse.Namespace, server: Server, model: Path, folder: Path) -> Target:
    folder.mkdir()
    url = server.recipe.base_url
    (card,) = httpx.get(f"{url}/v1/models", timeout=_TIMEOUT_S, trust_env=False).json()["data"]
    return Target(
        url=url,
        model=card["id"],
        root=card["root"],
        tokenizer=model,
        questions=wanted.questions.absolute(),
        environments=wanted.environments.absolute(),
        folder=folder,
    )


def _outcome(run: Run, target: Target) -> Outcome:
    """Make one run. A tool that fails is an outcome too."""
    command = run.command(target)
    before = ServerMetrics.scrape(target.url)
    ended = subprocess.run(
        command.arguments,
        env={**os.environ, **command.environment},
        cwd=target.folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=_RUN_TIMEOUT_S,
        check=False,
    )
    after = _idle(target.url)
    failure = ended.stdout[-_OUTPUT_END:] if ended.returncode else ""
    figures = None if ended.returncode else command.read()
    checks = [_idle_check(after)]
    if figures is not None:
        checks += [*_said(run, ended.stdout), *compare(figures, after.since(before), _template_tokens(target))]
    return Outcome(
        tool="vllm bench serve" if run.tool == "vllm" else run.tool,
        version=_version(run, target.environments),
        run=run.name,
        command=_shown(command.arguments, target),
        figures=figures,
        checks=checks,
        failure=failure,
    )


def _idle(url: str) -> ServerMetrics:
    """The metrics once the server is idle, or after a while all the same."""
    deadline_s = time.monotonic() + _IDLE_TIMEOUT_S
    while not (metrics := ServerMetrics.scrape(url)).is_idle() and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    return metrics


def _idle_check(after: ServerMetrics) -> Check:
    left = after.total("vllm:num_requests_running") + after.total("vllm:num_requests_waiting")
    held = left or not after.is_idle()
    outcome = Finding.DIFFERS if held else Finding.EQUAL
    return Check(what="requests that still run or hold KV", tool=0, server=max(left, int(held)), outcome=outcome)


def _said(run: Run, output: str) -> list[Check]:
    if not run.says:
        return []
    said = run.says in output
    outcome = Finding.EQUAL if said else Finding.DIFFERS
    return [Check(what=f"prints its block {run.says!r}", tool=int(said), server=1, outcome=outcome)]


def _template_tokens(target: Target) -> int:
    """Tokens that the chat template adds to one user message, by the tokenizer of transformers."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target.tokenizer)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}], add_generation_prompt=True, tokenize=False
    )
    return len(tokenizer.encode(str(text), add_special_tokens=False)) - len(tokenizer.encode("x"))


def _version(run: Run, environments: Path) -> str:
    if run.distribution is None:
        return (environments / run.tool / VLLM_SOURCE / "NAME").read_text("utf-8").rpartition("-")[2]
    python = environments / run.tool / "bin" / "python"
    program = f"import importlib.metadata as m; print(m.version({run.distribution!r}))"
    return subprocess.run([str(python), "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def _shown(arguments: Sequence[str], target: Target) -> str:
    """The command without what differs between machines."""
    text = shlex.join(arguments)
    known = {
        str(target.environments): "ENVIRONMENTS",
        str(target.tokenizer): "TOKENIZER",
        str(target.questions): "QUESTIONS",
        str(target.folder): "FOLDER",
        target.url: "URL",
    }
    for path, name in known.items():
        text = text.replace(path, name)
    return portable(text)


def _about(wanted: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    files = {str(wanted.questions), str(wanted.out), str(wanted.environments)}
    shown = [Path(each).name if each in files else each for each in arguments]
    return {
        **about("generators", shown),
    }


def _write(out: Path, about: dict[str, Any], outcomes: Sequence[Outcome]) -> None:
    write_json(out, document(about, outcomes))
    out.with_suffix(".md").write_text(page(outcomes), encoding="utf-8")
