"""Plan of a run and its sizes: on a device, or on a CPU to see that every phase runs at all."""

from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.gpu.families import (
    CHECKED,
    GPT_OSS_20B,
    QWEN3_30B_A3B,
    TINY_GEMMA2,
    TINY_GPT_OSS,
    TINY_QWEN3_MOE,
)
from benchmarks.gpu.models import (
    LLAMA_1B,
    QWEN3_8B,
    QWEN3_600M,
    TINY_DRAFT,
    TINY_NORMED,
    TINY_TARGET,
    Config,
    has_room,
    own_head,
)

REFERENCE_BYTES_S = 4.3e12  # of a large copy on an H200, to compare machines; it is shown next to what is measured
REFERENCE_FLOPS_S = 780e12  # of a large bfloat16 product there


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """context: tokens of a prompt. rows: of a step at most. steps: timed in a cell, within cell_s seconds.

    batches: sequences at a time, descending, of plain decoding; policy_batches, verify_batches: ascending;
    vllm_batches, overlap_batches: the most telling first. caps: fixed draft lengths; cap: longest of the policies.
    window_s: of one policy's turn. compared: answers whose tokens are compared, answer_tokens each. vocab,
    choice_rows, exact_rows, cases: of checks of tokens; own_tests: files.
    overlap_drafts: models to draft ahead with, by name; overlap_context: tokens of their prompts; chunks: fixed
    lengths of their drafts. partitions: of phase overlap.
    mixtures: timed, whole; families: checked, family_seeds models of each, with answers of answering and
    expert_rows rows of each mixture; family_tests: files. mixture_…: as those of the 8B. pass_batches:
    of whole steps, each way. prompt_lengths: of single prompts; beside_prompt: of one that joins `beside` others,
    in steps of chunk_rows. lane_…: processors of a lane of its own, sequences and contexts of passes there.
    """

    target: Config
    draft: Config
    checked: tuple[Config, ...]
    context: int
    rows: int
    batches: tuple[int, ...]
    steps: int
    cell_s: float
    verify_batches: tuple[int, ...]
    verify_rows: tuple[int, ...]
    cycle_gamma: int
    policy_batches: tuple[int, ...]
    vllm_batches: tuple[int, ...]
    caps: tuple[int, ...]
    cap: int
    acceptances: tuple[float, ...]
    window_s: float
    rounds: int
    compared: int
    answer_tokens: int
    vocab: int
    choice_rows: int
    cases: tuple[str, ...]
    exact_rows: int
    copy_bytes: int
    own_tests: tuple[str, ...]
    overlap_drafts: tuple[tuple[str, Config], ...]
    overlap_batches: tuple[int, ...]
    overlap_context: int
    overlap_acceptances: tuple[float, ...]
    chunks: tuple[int, ...]
    partitions: tuple[str, ...]
    mixtures: tuple[Config, ...]
    families: tuple[Config, ...]
    family_seeds: int
    answering: Config
    family_tests: tuple[str, ...]
    expert_rows: tuple[int, ...]
    mixture_batches: tuple[int, ...]
    mixture_verify_batches: tuple[int, ...]
    mixture_verify_rows: tuple[int, ...]
    pass_batches: tuple[int, ...]
    attention_batches: tuple[int, ...]
    prompt_lengths: tuple[int, ...]
    chunk_rows: tuple[int, ...]
    beside: int
    beside_prompt: int
    lane_counts: tuple[int, ...]
    lane_batches: tuple[int, ...]
    lane_contexts: tuple[int, ...]


ON_DEVICE = Sizes(
    target=QWEN3_8B,
    draft=QWEN3_600M,
    # Norms of heads, four and three query heads a KV head, both sizes of heads, a tied head and one of its own.
    checked=(QWEN3_8B | {"num_hidden_layers": 2}, LLAMA_1B | {"num_hidden_layers": 3, "num_attention_heads": 24}),
    context=1024,
    rows=8192,
    batches=(256, 128, 32, 8, 1),
    steps=60,
    cell_s=2.0,
    verify_batches=(1, 8, 32, 64, 256),
    verify_rows=(1, 2, 3, 4, 5, 6, 7, 8),
    cycle_gamma=4,
    policy_batches=(1, 8, 32, 128),
    vllm_batches=(32, 1, 128, 8),
    caps=(1, 3, 5),
    cap=7,
    acceptances=(0.8, 0.6, 0.9),
    window_s=1.5,  # a test of the policy's guard has at least 64 steps
    rounds=3,
    compared=16,
    answer_tokens=32,
    vocab=151936,
    choice_rows=12,
    cases=("greedy", "T 1", "T 0.8, top_k", "T 0.8, top_p", "T 0.8, min_p", "all"),
    exact_rows=4096,
    copy_bytes=4 << 30,
    own_tests=(
        "tests/kernels/cuda/triton/test_rope_append.py",
        "tests/kernels/cuda/triton/test_norm.py",
        "tests/kernels/cuda/triton/test_gate.py",
        "tests/kernels/cuda/triton/sampling/test_truncation.py",
    ),
    overlap_drafts=(("0.6B", QWEN3_600M),),
    # Where drafting ahead could pay: short contexts, so that a pass of the draft is latency and not bandwidth.
    overlap_batches=(128, 64, 1),
    overlap_context=128,
    overlap_acceptances=(0.9,),
    chunks=(3,),
    partitions=("sm", "streams"),
    mixtures=(QWEN3_30B_A3B, GPT_OSS_20B),
    families=CHECKED,
    family_seeds=4,
    answering=GPT_OSS_20B | {"num_hidden_layers": 4},
    family_tests=(
        "tests/kernels/cuda/triton/test_rope_append.py",
        "tests/kernels/cuda/triton/sampling/test_truncation.py",
        "tests/kernels/cuda/triton/test_sinks.py",
        "tests/kernels/cuda/triton/test_experts.py",
        "tests/kernels/cuda/triton/test_gate.py",
    ),
    expert_rows=(1, 7, 64, 300),
    mixture_batches=(1, 8, 32, 128),
    mixture_verify_batches=(1, 8, 32),
    mixture_verify_rows=(1, 2, 4, 8),
    pass_batches=(1, 2, 4, 8, 32, 128),
    attention_batches=(1, 32, 64, 128),
    prompt_lengths=(512, 2048, 8192, 32768),
    chunk_rows=(2048, 8192),
    beside=32,
    beside_prompt=8192,
    lane_counts=(12, 20, 36, 44, 60, 84),
    lane_batches=(1, 16, 64),
    lane_contexts=(64, 1024),
)
ON_CPU = Sizes(
    target=TINY_TARGET,
    draft=TINY_DRAFT,
    checked=(TINY_NORMED, TINY_TARGET),
    context=64,
    rows=128,
    batches=(3, 1),
    steps=4,
    cell_s=0.2,
    verify_batches=(1, 2),
    verify_rows=(1, 3),
    cycle_gamma=2,
    policy_batches=(1, 2),
    vllm_batches=(2, 1),
    caps=(1, 2),
    cap=3,
    acceptances=(0.8, 0.6),
    window_s=0.02,
    rounds=1,
    compared=2,
    answer_tokens=6,
    vocab=40,
    choice_rows=4,
    cases=("greedy", "T 1", "T 0.8, min_p"),  # cuts take seconds each in the interpreter
    exact_rows=16,
    copy_bytes=1 << 20,
    own_tests=("tests/kernels/cuda/triton/sampling/test_noise.py",),
    overlap_drafts=(("tiny", TINY_DRAFT),),
    overlap_batches=(2, 1),
    overlap_context=64,
    overlap_acceptances=(0.9, 0.6),
    chunks=(1,),
    partitions=("cores",),
    mixtures=(TINY_QWEN3_MOE, TINY_GPT_OSS),
    families=(TINY_QWEN3_MOE, TINY_GPT_OSS, TINY_GEMMA2),
    family_seeds=2,
    answering=TINY_GPT_OSS,
    family_tests=("tests/kernels/cuda/triton/test_sinks.py",),
    expert_rows=(1, 5),
    mixture_batches=(1, 2),
    mixture_verify_batches=(1, 2),
    mixture_verify_rows=(1, 3),
    pass_batches=(1, 2),
    attention_batches=(2,),
    prompt_lengths=(16, 200),
    chunk_rows=(16,),
    beside=2,
    beside_prompt=64,
    lane_counts=(1,),
    lane_batches=(1, 2),
    lane_contexts=(16, 64),
)


def fitting(sizes: Sizes, memory_bytes: int) -> Sizes:
    """Without the numbers of sequences for which a device of this memory has no room.

    Raises ValueError where there is none for a single one.
    """

    def kept(counts: tuple[int, ...], *models: Config) -> tuple[int, ...]:
        found = tuple(
            each for each in counts if has_room(memory_bytes, models, sequences=each, context=sizes.context)
        )
        if not found:
            raise ValueError(f"a device of {memory_bytes} bytes has no room for these models")
        return found

    target, draft = sizes.target, sizes.draft
    return replace(
        sizes,
        batches=kept(sizes.batches, target),
        verify_batches=kept(sizes.verify_batches, target),
        policy_batches=kept(sizes.policy_batches, target, draft),
        vllm_batches=kept(sizes.vllm_batches, target, draft),
        overlap_batches=kept(sizes.overlap_batches, target, own_head(_largest_draft(sizes))),
    )


def _largest_draft(sizes: Sizes) -> Config:
    """The largest draft model of phase overlap."""
    return max((config for _, config in sizes.overlap_drafts), key=lambda each: int(each["hidden_size"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run. models: folder for the directories of the models that it makes.

    vllm: directory to import vLLM from; None: what needs it is left out, and says so. commit: of this checkout,
    where git does not know it. memory_bytes: of the device; None: everything fits.
    """

    out: Path
    dry_run: bool = False
    vllm: Path | None = None
    commit: str | None = None
    memory_bytes: int | None = None

    @property
    def sizes(self) -> Sizes:
        """On a device: of what it has room for."""
        if self.dry_run:
            return ON_CPU
        return ON_DEVICE if self.memory_bytes is None else fitting(ON_DEVICE, self.memory_bytes)

    @property
    def device(self) -> str:
        return "cpu" if self.dry_run else "cuda"

    @property
    def backend(self) -> str:
        return "torch" if self.dry_run else "flashinfer"

    @property
    def models(self) -> Path:
        return self.out / "models"
