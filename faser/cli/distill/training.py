"""The second half of `faser distill`: the states of the target, the training, the measurement, the files."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from faser.cli.console.progress import ProgressReporter
from faser.cli.distill.arguments import DistillArguments
from faser.cli.distill.display import TokenBar, TrainingBar, acceptance_table, speedup_table
from faser.config.engine import EngineConfig
from faser.distill.dataset import Dataset
from faser.engine.control.step_cost import CostModel

_TERMINATED = 143  # 128 + SIGTERM, as shells say it


def train_head(own: DistillArguments, config: EngineConfig, directory: Path, dataset: Dataset) -> int:
    """Returns the exit status: 0 when the head is written, 143 when SIGTERM stopped the training."""
    import torch

    from faser.distill.acceptance import LOADS, expected_speedup, speedup_in_words
    from faser.distill.distillation import Distillation, HeadSettings
    from faser.distill.target import load_target
    from faser.distill.trainer import TrainingSettings

    settings = TrainingSettings(seed=own.seed, epochs=own.epochs, hours=own.hours, steps=own.steps, rows=own.rows)
    head = HeadSettings(draft_vocab_size=own.draft_vocab_size, int8=own.int8)
    torch.set_num_threads(config.threads)
    torch.set_flush_denormal(True)  # what is almost impossible would take ten times as long as the rest
    with ProgressReporter() as report:
        target = load_target(config, directory, report)
    made = Distillation(own.output, target, directory.name, config, settings, head)
    with TokenBar() as bar:
        made.record(dataset, bar)
    with _stop_on_signal() as stops, TrainingBar() as shown:
        finished = made.train(dataset, shown, stops)
    if not finished:
        print(f"faser distill: stopped; run it again to go on from {own.output}", file=sys.stderr)
        return _TERMINATED
    with TokenBar(unit="batches") as bar:
        found = made.measure(
            temperature=own.measured_temperature, on_batch=lambda done, total: bar("measuring", done, total)
        )
    about = {"acceptance": {"greedy": found.greedy, "sampled": found.sampled}}
    made.write(about)
    print(acceptance_table(found.greedy, found.sampled, own.measured_temperature), end="\n\n")
    del made, target  # the engine needs their memory
    costs = head_costs(config, directory, own.output)
    loads = [load for load in LOADS if load <= config.max_num_seqs]
    greedy = [expected_speedup(costs, found.greedy, load) for load in loads if found.greedy]
    sampled = [expected_speedup(costs, found.sampled, load) for load in loads if found.sampled]
    print(speedup_table(greedy, sampled, own.measured_temperature), end="\n\n")
    print(f"The head is {speedup_in_words(greedy or sampled)}.")
    print(f'head: {own.output}\nserve it: faser serve MODEL --speculative-config \'{{"model": "{own.output}"}}\'')
    return 0


def head_costs(config: EngineConfig, directory: Path, head: Path) -> CostModel:
    """What steps and the head's passes take in an engine on this machine."""
    from faser.engine.build import build

    serving = replace(config, speculative_policy=None, speculative_config={"model": str(head)})
    with ProgressReporter() as report:
        costs = build(serving, directory, report).costs
    assert costs is not None, "an engine that speculates has costs"
    return costs


@contextmanager
def _stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Whether SIGTERM or Ctrl-C has come: training stops after the batch that runs, and keeps what it has."""
    asked = []

    def note(number: int, frame: object) -> None:
        del frame
        asked.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
