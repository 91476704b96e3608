"""Share of seeded tokens that change when logits change by a rounding error, by how tokens are drawn.

    python -m benchmarks exactness.seeded_flips OUT.json [--model MODEL.gguf] [--windows 16] [--every 36]

Other kernels, ranks and batches round sums otherwise. Here normal noise of a given size is added to the logits
that the model has over this project's own documents, and the probability that a token drawn with the same random
numbers is another one is computed exactly, for:

    vocabulary      the inverse of the running sum of probabilities in the order of ids (FASER until it raced)
    likelihood      the same in the order of likelihood
    gumbel          a race of all tokens
    race            a race of blocks of 256 tokens, then of the tokens of one (what FASER does)
    bound           the total variation distance: no way of drawing does better

`agreement`: how often a token drawn from another model's probabilities, those of the same weights in 4 bits, is
the target's; that is the acceptance of a coupled draft, whose bound is 1 minus the distance.
"""

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.engines import model_directory
from benchmarks.kernels.low_bit_quality import log_probabilities, paged_model, shuffle, windows
from benchmarks.runner import about, command_line, write_json
from faser.kernels.interface.sampling import RACE_BLOCK

Floats = NDArray[np.float64]
NOISE = (1e-6, 1e-5, 3e-5)
SETTINGS = ((1.0, 1.0), (1.0, 0.95), (0.8, 1.0), (0.8, 0.95))  # temperature, top_p


def final_probs(logits: Floats, temperature: float, top_p: float) -> Floats:
    """Return the probabilities [V] after temperature and top_p."""
    weights = np.exp((logits - logits.max()) / temperature)
    if top_p < 1:
        order = np.argsort(-weights, kind="stable")
        sums = weights[order].cumsum()
        weights[order[1 + int(np.searchsorted(sums, top_p * sums[-1])) :]] = 0.0
    found: Floats = weights / weights.sum()
    return found


def same_by_running_sum(probs: Floats, others: Floats, *, by_likelihood: bool = False) -> float:
    """Probability that one number in [0, 1) falls into the same token of both."""
    starts, ends = [], []
    for each in (probs, others):
        order = np.argsort(-each, kind="stable") if by_likelihood else np.arange(len(each))
        end = np.empty(len(each))
        end[order] = each[order].cumsum()
        starts.append(end - each)
        ends.append(end)
    return float(np.maximum(np.minimum(*ends) - np.maximum(*starts), 0.0).sum())


def same_by_race(probs: Floats, others: Floats) -> Floats:
    """Return the probability [N] that this one wins both races, run with the same exponential numbers.

    Of n with ratios r = others / probs: 1 / Σ_j max(probs_j / probs_n, others_j / others_n).
    """
    probs, others = probs / probs.sum(), others / others.sum()
    found, both = np.zeros(len(probs)), (probs > 0) & (others > 0)
    ratios = np.divide(others, probs, out=np.where(others > 0, np.inf, 0.0), where=probs > 0)
    order = np.argsort(ratios, kind="stable")
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    before, behind = probs[order].cumsum(), others.sum() - others[order].cumsum()
    at = place[both]
    found[both] = 1 / (before[at] / probs[both] + behind[at] / others[both])
    return found


def same_by_blocks(probs: Floats, others: Floats) -> float:
    """Probability that the same block wins, and in it the same token."""
    one, other = (np.pad(each, (0, -len(each) % RACE_BLOCK)).reshape(-1, RACE_BLOCK) for each in (probs, others))
    blocks = same_by_race(one.sum(1), other.sum(1))
    return float(sum(blocks[i] * same_by_race(one[i], other[i]).sum() for i in np.flatnonzero(blocks > 1e-15)))


SAME: dict[str, Callable[[Floats, Floats], float]] = {
    "vocabulary": same_by_running_sum,
    "likelihood": lambda probs, others: same_by_running_sum(probs, others, by_likelihood=True),
    "gumbel": lambda probs, others: float(same_by_race(probs, others).sum()),
    "race": same_by_blocks,
    "bound": lambda probs, others: float(np.minimum(probs, others).sum()),
}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, default=None, help="GGUF file; default: the model of `faser pull`")
    parser.add_argument("--windows", type=int, default=16, help="of 256 tokens (default 16)")
    parser.add_argument("--every", type=int, default=36, help="every how many positions count (default 36)")
    options = parser.parse_args()
    target, drafter = _logits(options)
    random = np.random.default_rng(0)
    tables = []
    for temperature, top_p in SETTINGS:
        sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for row, draft_row in zip(target, drafter, strict=True):
            probs = final_probs(row, temperature, top_p)
            changed = {f"{size:g}": row + size * random.standard_normal(len(row)) for size in NOISE}
            for name, same in SAME.items():
                for size, logits in changed.items():
                    flips = 1 - same(probs, final_probs(logits, temperature, top_p))
                    sums[name][f"flips, {size}"] += flips / len(target)
                sums[name]["agreement"] += same(probs, final_probs(draft_row, temperature, top_p)) / len(target)
        found = {name: {key: float(f"{value:.3g}") for key, value in each.items()} for name, each in sums.items()}
        tables.append({"temperature": temperature, "top_p": top_p, "ways": found})
    result = {
        **about("exactness.seeded_flips"),
        "unit": "tokens that change, of one; noise is the standard deviation of the change of logits",
        "positions": len(target),
        "settings": tables,
    }
    write_json(options.out, result, show=True)


def _logits(options: argparse.Namespace) -> tuple[Floats, Floats]:
    """Logits of the model and of its weights in 4 bits, [N, V] each."""
    model = options.model or model_directory(None) / "model.gguf"
    texts = list(windows(model, options.windows, 256))
    with tempfile.TemporaryDirectory() as folder:
        shuffled = Path(folder) / "shuffled.gguf"
        shuffle(model, shuffled)
        models = (
            paged_model(model, 256, "none", torch.float32),
            paged_model(shuffled, 256, "int4", torch.bfloat16),
        )
        found = [
            torch.cat([log_probabilities(each, text)[:: options.every] for text in texts]).double().numpy()
            for each in models
        ]
    return found[0], found[1]
