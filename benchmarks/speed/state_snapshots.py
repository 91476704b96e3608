"""Times conversations with a model that has recurrent states, with snapshots of these and without.

    python -m benchmarks.speed.state_snapshots OUT.json [--rounds 3] [--threads 2] [--prompt 400] [--more 60]
        [--answer 16] [--turns 4] [--samples 4]

The model has the sizes of Qwen3.5-0.8B and made-up weights in bfloat16, so answers mean nothing and times do. A
turn asks all that was said so far and --more tokens. Counted are the seconds until the first token of its answer;
then those until each of --samples samples of a new prompt has one. Both engines serve the same conversation in
turn, round by round, each with a cache_salt of its own; medians are kept. Then the copies: a state into a
snapshot, and back.
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.models import MadeUp, write_shape
from benchmarks.runner import about, command_line, timed_turns, write_json
from faser.config.engine import EngineConfig
from faser.engine.build import Built, build
from faser.engine.checkpoints.families import decoder_spec
from faser.engine.execution.models.decoder import delta_shape
from faser.engine.execution.runner.state_cache import Snapshots
from faser.kernels.interface.delta_net import CHUNK, StateShape
from faser.kernels.torch_backend import TorchBackend
from faser.types import Request, SamplingParams

QWEN3_5_0_8B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
    "max_position_embeddings": 262144,
    "tie_word_embeddings": True,
    "vocab_size": 248320,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
WITH, WITHOUT = "with snapshots", "without"
SLOTS = 8


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    for name, tokens in (("prompt", 400), ("more", 60), ("answer", 16), ("turns", 4), ("samples", 4)):
        parser.add_argument(f"--{name}", type=int, default=tokens)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = write_shape(Path(folder), QWEN3_5_0_8B)
        arms = {name: engine_of(directory, args.threads, snapshots=name == WITH) for name in (WITH, WITHOUT)}
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in arms}
    hits: dict[str, float] = {}
    for number in range(args.rounds + 1):
        for name, built in arms.items():
            talk = Talk(built, args, salt=f"round {number}")
            for what, took in talk.hold().items():
                if number > 0:  # the first round warms up
                    seconds[name].setdefault(what, []).append(took)
            hits[name] = round(talk.cached / talk.asked, 3)
    times = [
        {"what": what, **{name: round(statistics.median(seconds[name][what]), 4) for name in arms}}
        for what in seconds[WITH]
    ]
    for each in times:
        print(", ".join(f"{key}: {value}" for key, value in each.items()), flush=True)
    options = {name: value for name, value in vars(args).items() if name != "out"}
    report = {
        **about("benchmarks.speed.state_snapshots"),
        **options,
        "cached_share_of_prompts": hits,
        "seconds_to_first_token": times,
        "copies_ms": copies(),
    }
    write_json(args.out, report)


def engine_of(directory: Path, threads: int, *, snapshots: bool) -> Built:
    config = EngineConfig(
        model=str(directory),
        dtype="bfloat16",
        device="cpu",
        num_threads=threads,
        max_model_len=4096,
        max_num_seqs=SLOTS,
        kv_cache_memory=1 << 30,
        speculative_policy="off",
        state_snapshot_memory=None if snapshots else 0,
    )
    return build(config, directory, lambda *_: None, sources=lambda found: MadeUp.of(found, "cpu"))


class Talk:
    """One conversation, and a prompt with several samples. cached, asked: tokens of prompts."""

    def __init__(self, built: Built, args: Any, *, salt: str) -> None:
        self._engine, self._args, self._salt = built.engine, args, salt
        self._generator = torch.Generator().manual_seed(len(salt))
        self._number = 0
        self.cached = self.asked = 0

    def hold(self) -> dict[str, float]:
        """Seconds until each turn's first token, and until all samples' first ones."""
        args, said, found = self._args, self._text(self._args.prompt), {}
        for turn in range(1, args.turns + 1):
            found[f"turn {turn}, {len(said)} tokens"], answer = self._ask(said)
            said = [*said, *answer, *self._text(args.more)]
        prompt = self._text(args.prompt)
        found[f"{args.samples} samples, {len(prompt)} tokens"], _ = self._ask(prompt, n=args.samples)
        return found

    def _text(self, count: int) -> list[int]:
        found: list[int] = torch.randint(2, 200000, (count,), generator=self._generator).tolist()
        return found

    def _ask(self, prompt: list[int], n: int = 1) -> tuple[float, list[int]]:
        """Seconds until all samples have a token, and the first one's answer."""
        self._number += 1
        request = Request(
            request_id=f"{self._salt} {self._number}",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=self._args.answer, ignore_eos=True, n=n, temperature=0.0),
            cache_salt=self._salt,
        )
        began_s, waiting, answer, took = time.perf_counter(), set(range(n)), list[int](), 0.0
        self._engine.add(request)
        while self._engine.has_work():
            for delta in self._engine.step():
                if delta.index in waiting and delta.token_ids:
                    waiting.remove(delta.index)
                    took = time.perf_counter() - began_s
                    self.cached += delta.num_cached_tokens
                    self.asked += len(prompt)
                if delta.index == 0:
                    answer += delta.token_ids
        return took, answer


def copies() -> dict[str, float]:
    """Milliseconds of a copy: a slot's state into a snapshot, and back. Slots take turns: none is in a cache."""
    layers = tuple(None if each is None else delta_shape(each) for each in decoder_spec(QWEN3_5_0_8B).delta_nets)
    shape = StateShape(layers=layers, num_slots=SLOTS, most_drafts=0, dtype=torch.bfloat16, num_snapshots=SLOTS)
    states = TorchBackend().allocate_states(shape)
    snapshots = Snapshots(states, shape)

    def save() -> None:
        for at in range(SLOTS):
            snapshots.save(at, at, CHUNK)

    def restore() -> None:
        for at in range(SLOTS):
            snapshots.restore(at, at)

    seconds = timed_turns({"save": save, "restore": restore}, 9)
    return {name: round(1e3 * statistics.median(found) / SLOTS, 2) for name, found in seconds.items()}


if __name__ == "__main__":
    main()
