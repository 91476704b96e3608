"""Measures that speculation is lossless, and that what measures it would see a loss.

    python -m benchmarks exactness.losslessness OUT.json [--samples 200000] [--jobs 1] [--model DIR]
        [--only distributions|tokens]

`distributions`: chi-square of what the verifiers emit, with the real drafting loop, sampler and noise on small
tables, against the exact distribution of the target alone; and of planted mistakes, which have to be seen.

`tokens`: a real model's answers with every drafter and policy, token by token, against the engine built without a
drafter. Float32 on the native kernels, sixteen sequences at once, prompts in chunks, prefix caching, and a KV pool
that is too small for all of them, so that some are preempted.

Seeds are fixed. Sections of OUT.json that are not asked for stay as they are. Exits with 1 if a right rule is
flagged, a wrong one is not, or a token differs.
"""

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from benchmarks.engines import Tokens, answers, model_directory
from benchmarks.models.grow_model import NoisySource, copy_model
from benchmarks.runner import command_line, write_json
from faser.config.engine import EngineConfig
from faser.config.speculation import POLICIES, TEXT_METHODS
from faser.engine.build import build_engine
from faser.engine.contract.step_times import StepTimes
from faser.engine.engine import Engine
from faser.engine.execution.models.loader import open_source
from faser.engine.text.tokenizer import load_tokenizer
from faser.types.request import Request
from faser.types.sampling import SamplingParams
from tests.prompts import PROMPTS

CAP = 5
CONCURRENCY = 16
CHUNK = 96  # rows a step
NUM_TOKENS = 24
NUM_BLOCKS = 24  # of 16 tokens; sixteen sequences need two to six each
NOISE = 0.05  # on the weights of the draft model, in their own standard deviations
GREEDY, WARM = 0.0, 0.8
AHEAD_AND_PRUNED = "draft_model, coupled, ahead and pruned"
DRAFTERS: Mapping[str, Mapping[str, Any]] = {
    **{method: {"method": method} for method in TEXT_METHODS if method != "grammar"},
    "auto, text": {"method": "auto"},
    "auto, text and model": {"method": "auto", "model": "drafter"},
    "draft_model, greedy": {"method": "draft_model", "model": "drafter", "draft_sample_method": "greedy"},
    "draft_model, coupled": {"method": "draft_model", "model": "drafter", "draft_sample_method": "coupled"},
    "draft_model, probabilistic": {
        "method": "draft_model",
        "model": "drafter",
        "draft_sample_method": "probabilistic",
    },
    "draft_model, probabilistic, block": {
        "method": "draft_model",
        "model": "drafter",
        "draft_sample_method": "probabilistic",
        "rejection_sample_method": "block",
    },
    AHEAD_AND_PRUNED: {"method": "draft_model", "model": "drafter"},
}
SETTINGS: Mapping[str, Mapping[str, Any]] = {AHEAD_AND_PRUNED: {"spec_overlap": "on", "early_prune": "on"}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One drafter under one policy. equal, total: answers. Counts are of this run alone."""

    drafter: str
    policy: str
    temperature: float
    equal: int
    total: int
    drafted: int
    accepted: int
    preemptions: int
    cached_tokens: int
    seconds: float

    @property
    def passed(self) -> bool:
        return self.equal == self.total


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """directory: the target. drafter: the draft model. texts: prompts. block_bytes: of a block, one model's."""

    directory: Path
    drafter: Path
    texts: Sequence[str]
    block_bytes: int

    def engine(self, speculation: Mapping[str, Any] | None, **settings: Any) -> Engine:
        """speculation: None: without a drafter. settings: of the engine, in addition to the usual ones."""
        given: dict[str, Any] = {"policy": "off"} if speculation is None else dict(speculation)
        num_models = 1
        if given.get("model") is not None:
            given["model"], num_models = str(self.drafter), 2
        if speculation is not None:
            given["num_speculative_tokens"] = CAP
            given["num_speculative_tokens_per_batch_size"] = [[1, 4, CAP], [5, CONCURRENCY, 2]]
        config = EngineConfig(
            model=str(self.directory),
            dtype="float32",
            quantization="none",
            max_model_len=256,
            max_num_seqs=CONCURRENCY,
            max_num_batched_tokens=CHUNK,
            kv_cache_memory=NUM_BLOCKS * num_models * self.block_bytes,
            speculative_config=given,
            **settings,
        )
        times = StepTimes.proportional(step_s=0.05, pass_s=1e-4, text_s=1e-6)  # drafting seems to pay
        engine, _ = build_engine(config, self.directory, lambda *_: None, step_times=times)
        return engine

    def requests(self, temperature: float) -> list[Request]:
        """Every fourth prompt begins as the one before, so that blocks are shared; some repeat themselves."""
        tokenizer = load_tokenizer(self.directory)
        texts = [text * 3 if i % 3 == 0 else text for i, text in enumerate(self.texts)]
        texts = [texts[i - 1] + text if i % 4 == 3 else text for i, text in enumerate(texts)]
        return [
            Request(
                request_id=str(i),
                prompt_token_ids=tuple(tokenizer.encode(text)[:60]),
                sampling=SamplingParams(
                    temperature=temperature, max_tokens=NUM_TOKENS - i % 5, seed=i, ignore_eos=True
                ),
                arrival_s=float(i),
            )
            for i, text in enumerate(texts)
        ]


def block_bytes(directory: Path) -> int:
    """Bytes of one KV block of 16 tokens in float32."""
    from faser.engine.checkpoints.files import read_model_config

    spec = read_model_config(directory).spec
    return 16 * 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 4


def write_drafter(directory: Path, out: Path) -> None:
    """The target with noise on its weights."""
    copy_model(directory, NoisySource(open_source(directory), NOISE), out, torch.bfloat16)


def plan(drafters: Sequence[str]) -> list[tuple[str, str, float]]:
    """(drafter, policy, temperature): greedy everywhere; warm under one of them, where drafts are point masses."""
    greedy = [(drafter, policy, GREEDY) for drafter in drafters for policy in POLICIES]
    warm = [
        (drafter, policy, WARM) for drafter in drafters if "probabilistic" not in drafter for policy in ("fixed",)
    ]
    return sorted(greedy + warm, key=lambda each: list(drafters).index(each[0]))


def compare(setup: Setup, drafters: Sequence[str], done: Callable[[Comparison], None]) -> list[Comparison]:
    """Every run of the plan. done: called after each."""
    plain = setup.engine(None)
    asked = {temperature: setup.requests(temperature) for temperature in (GREEDY, WARM)}
    expected = {temperature: answers(plain, requests) for temperature, requests in asked.items()}
    del plain
    found: list[Comparison] = []
    engine, built = None, ""
    for drafter, policy, temperature in plan(drafters):
        if engine is None or built != drafter:
            engine, built = None, drafter  # the old one is freed before the new one is made
            engine = setup.engine(DRAFTERS[drafter], **SETTINGS.get(drafter, {}))
        engine.use_policy(policy, CAP if policy == "fixed" else None)
        found.append(_run(engine, drafter, policy, temperature, asked[temperature], expected[temperature]))
        done(found[-1])
    return found


def _run(
    engine: Engine,
    drafter: str,
    policy: str,
    temperature: float,
    asked: Sequence[Request],
    expected: dict[str, Tokens],
) -> Comparison:
    before, began_s = _counts(engine), time.perf_counter()
    said = answers(engine, asked)
    seconds = time.perf_counter() - began_s
    drafted, accepted, preemptions, cached = (
        after - old for after, old in zip(_counts(engine), before, strict=True)
    )
    return Comparison(
        drafter=drafter,
        policy=policy,
        temperature=temperature,
        equal=sum(said[request_id] == token_ids for request_id, token_ids in expected.items()),
        total=len(expected),
        drafted=drafted,
        accepted=accepted,
        preemptions=preemptions,
        cached_tokens=cached,
        seconds=round(seconds, 1),
    )


def _counts(engine: Engine) -> tuple[int, int, int, int]:
    """Verified and accepted draft tokens, preemptions, prompt tokens from the prefix cache; since the start."""
    stats = engine.stats()
    methods = stats.speculation.methods if stats.speculation is not None else ()
    return (
        sum(each.verified for each in methods),
        sum(each.accepted for each in methods),
        stats.num_preemptions,
        stats.prefix_cache_hits,
    )


SECTIONS = ("distributions", "tokens")


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--samples", type=int, default=200_000, help="sequences of each combination")
    parser.add_argument("--jobs", type=int, default=1, help="processes that sample distributions (default 1)")
    parser.add_argument("--only", choices=SECTIONS, help="one section (default: both)")
    parser.add_argument("--model", help="model directory of `tokens` (default: the embedded model)")
    options = parser.parse_args()
    result: dict[str, Any] = json.loads(options.out.read_text("utf-8")) if options.out.exists() else {}
    for section in SECTIONS if options.only is None else (options.only,):
        command = f"python -m benchmarks exactness.losslessness OUT.json --only {section}"
        began_s = time.perf_counter()
        if section == "distributions":
            found = check_distributions(options.samples, options.jobs)
            command += f" --samples {options.samples}"
        else:
            found = compare_tokens(options.model, PROMPTS)
        result[section] = {"command": command, "seconds": round(time.perf_counter() - began_s, 1)} | found
        write_json(options.out, result)
        print(f"{section}: {'passed' if result[section]['passed'] else 'FAILED'}")
    return 0 if all(each["passed"] for each in result.values()) else 1


def compare_tokens(model: str | None, texts: Sequence[str]) -> dict[str, Any]:
    """The section `tokens`."""
    directory = model_directory(model)
    drafters = tuple(DRAFTERS)
    with tempfile.TemporaryDirectory() as folder, Progress() as bar:
        drafter = Path(folder) / "drafter"
        write_drafter(directory, drafter)
        task = bar.add_task("tokens", total=len(plan(drafters)))
        setup = Setup(directory=directory, drafter=drafter, texts=texts, block_bytes=block_bytes(directory))
        runs = compare(setup, drafters, lambda _: bar.advance(task))
    return {
        "passed": all(run.passed for run in runs),
        "model": directory.name,
        "dtype": "float32",
        "concurrency": CONCURRENCY,
        "prompts": len(texts),
        "max_tokens": NUM_TOKENS,
        "equal": sum(run.equal for run in runs),
        "total": sum(run.total for run in runs),
        "preemptions": sum(run.preemptions for run in runs),
        "runs": [asdict(run) for run in runs],
    }


def check_distributions(num_samples: int, jobs: int) -> dict[str, Any]:
    """The section `distributions`."""
    from benchmarks.exactness import cases

    with Progress() as bar:
        task = bar.add_task("distributions", total=len(cases.RIGHT) + len(cases.WRONG))
        return cases.compare_all(num_samples, jobs, lambda: bar.advance(task))
