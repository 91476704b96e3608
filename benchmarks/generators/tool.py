"""Figures: what a load generator says of a run, in one form for all of them.

Times are in seconds, as the server's are.

Run: one run of a load generator, as a command and a function that reads its figures.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """One kind of latency. count: observations. percentiles: 50, 90 and 99 where the tool gives them."""

    count: int
    mean_s: float
    percentiles: Mapping[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """A tool's block about speculative decoding. by_position: accepted tokens a draft, from the first position."""

    drafts: int
    draft_tokens: int
    accepted_tokens: int
    by_position: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One run. None: the tool does not say.

    completed, failed, cancelled: requests. input_tokens, output_tokens: of the completed ones, from the usage in
    the answers. own_input_tokens, own_output_tokens: counted by the tool's tokenizer instead, from the texts.
    in_chat: the server puts the texts into its chat template. chunks: time between two chunks of a stream.
    tpot: mean of a request per token after its first. also_sent: requests that these figures leave out.
    """

    completed: int
    failed: int = 0
    cancelled: int = 0
    input_tokens: int | None = None
    output_tokens: int | None = None
    own_input_tokens: int | None = None
    own_output_tokens: int | None = None
    in_chat: bool = False
    ttft: Latency | None = None
    chunks: Latency | None = None
    tpot: Latency | None = None
    e2e: Latency | None = None
    drafts: Drafts | None = None
    also_sent: "Figures | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Target of the tools. tokenizer: folder of the model's tokenizer. questions: Spec-Bench's question.jsonl.

    model, root: the card in /v1/models; tools that are given no tokenizer load it from root, a folder or hub id.
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
            raise FileNotFoundError(f"{path} is missing: run python -m benchmarks generators.setup {tool}")
        return str(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """environment: variables in addition to the caller's own. read: the figures, once the command has ended."""

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
