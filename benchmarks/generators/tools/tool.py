"""Run: one run of a load generator, as a command and a function that reads its figures."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.generators.figures import Figures, Latency


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is measured. tokenizer: folder of the model's tokenizer. questions: Spec-Bench's question.jsonl.

    model, root: the card in /v1/models; tools that are told no tokenizer load it from root, a folder or hub id.
    environments: folder with one virtual environment a tool. folder: of the run, empty at first.
    """

    url: str
    model: str
    root: str
    tokenizer: Path
    questions: Path
    environments: Path
    folder: Path

    def program(self, tool: str, name: str) -> str:
        """An executable of a tool's environment. Raises FileNotFoundError that says how to make it."""
        path = self.environments / tool / "bin" / name
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing: run python -m benchmarks.generators.setup {tool}")
        return str(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """environment: variables beside the caller's own. read: the figures, once the command has ended."""

    arguments: tuple[str, ...]
    read: Callable[[], Figures]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """tool: its environment. distribution: whose version the results name; None: that of a source package.

    says: a line that the tool has to print, as it does for servers that it knows.
    """

    name: str
    tool: str
    distribution: str | None
    command: Callable[[Target], Command]
    says: str = ""


_REVISION = "0" * 40

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def write_hub_cache(target: Target, name: str) -> None:
    """Let the tokenizer be in the Hugging Face hub's cache, for a command whose HF_HOME is the run's folder."""
    repository = target.folder / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / _REVISION
    snapshot.mkdir(parents=True)
    for each in target.tokenizer.iterdir():
        (snapshot / each.name).symlink_to(each.absolute())
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(_REVISION, encoding="utf-8")


def latency_ms(count: int, mean_ms: float, percentiles_ms: Mapping[int, float]) -> Latency:
    """From a tool that gives milliseconds."""
    return Latency(
        count=count,
        mean_s=mean_ms / 1000,
        percentiles={percentile: value_ms / 1000 for percentile, value_ms in percentiles_ms.items()},
    )
