"""Checks of tokens: chosen, guessed and verified as the references do on the CPU; and their distributions.

The references are the engine's own tensor operations. Exact distributions are computed from the documented meaning
of the parameters, without the engine's code, and compared with counts by chi-square.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.exactness.distributions import p_value
from benchmarks.gpu.checks.models import backend_of
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.record import Json
from faser.config.speculation import SpeculationConfig
from faser.engine.contract.plan import SequenceStart
from faser.engine.execution.drafting.drafter import by_slot
from faser.engine.execution.sampling.kernels import TorchSamplingKernels
from faser.engine.execution.sampling.rows import DraftLayout
from faser.engine.execution.sampling.sampler import Sampler
from faser.engine.execution.sampling.tokens import HostTokenSampler
from faser.engine.execution.sampling.verify import make_verifier
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.sampling import DeviceSamplingMetadata, SamplingMetadata
from faser.types.sampling import SamplingParams

Floats = NDArray[np.float64]

_FEW_TOKENS = 60  # that can be chosen at all; they lie apart from each other in the whole vocabulary
LEAST_P = 1e-5  # of a right distribution this small is seen in one run of a hundred thousand
_TOP_K, _TOP_P, _TEMPERATURE = 20, 0.9, 0.8
DRAFTS = {
    "coupled": SpeculationConfig(policy="fixed", method="draft_model"),
    "rejection": SpeculationConfig(policy="fixed", method="draft_model", draft_sample_method="probabilistic"),
}
# Everything that edits logits, alone and all of it together.
EDITS = (
    SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2),
    SamplingParams(logit_bias=tuple((token, 9.0) for token in range(4, 20))),
    SamplingParams(allowed_token_ids=tuple(range(3, 36))),
    SamplingParams(bad_words=((7,), (33, 11))),
    SamplingParams(max_tokens=64, min_tokens=40, stop_token_ids=(5,)),
    SamplingParams(
        repetition_penalty=1.1,
        presence_penalty=0.5,
        logit_bias=((3, 2.0),),
        allowed_token_ids=tuple(range(2, 38)),
        bad_words=((7,),),
        max_tokens=64,
        min_tokens=40,
        stop_token_ids=(5,),
    ),
)
# temperature, min_p, top_k, top_p
_CASES = {
    "greedy": (0.0, 0.0, 0, 1.0),
    "T 1": (1.0, 0.0, 0, 1.0),
    "T 0.8, top_k": (_TEMPERATURE, 0.0, _TOP_K, 1.0),
    "T 0.8, top_p": (_TEMPERATURE, 0.0, 0, _TOP_P),
    "T 0.8, min_p": (_TEMPERATURE, 0.05, 0, 1.0),
    "all": (1.3, 0.01, _TOP_K, _TOP_P),
}


def chosen(plan: Plan) -> Json:
    """Rows with a NaN, with one possible token, and with ties are among them."""
    found = {}
    rows = plan.sizes.choice_rows
    for name, case in _cases(plan):
        logits, requests = _logits(plan.sizes.vocab, rows), _requests(rows, case)
        wanted = HostTokenSampler(TorchSamplingKernels()).take(logits.clone(), requests).wait().token_ids
        out = torch.empty(rows, dtype=torch.int64, device=plan.device)
        cuts = requests.truncation_flags
        choice = _device_choice(plan, rows, plan.sizes.vocab)
        choice.take(
            logits.to(plan.device),
            rows_of(requests, plan.device),
            out,
            top_k=cuts.top_k,
            top_p=cuts.top_p,
            random=cuts.random,
        )
        found[name] = int((out.cpu().numpy() != wanted).sum())
    return {"ok": not any(found.values()), "rows": rows, "other_tokens": found}


def guessed(plan: Plan) -> Json:
    found = {}
    rows = plan.sizes.choice_rows
    for name, case in _cases(plan):
        logits, requests = _logits(plan.sizes.vocab, rows), _requests(rows, case)
        wanted = HostTokenSampler(TorchSamplingKernels()).draft(logits.clone(), requests).wait()
        assert wanted.margins is not None, "a guess comes with its lead"
        out = torch.empty(rows, dtype=torch.int64, device=plan.device)
        leads = torch.empty(rows, dtype=torch.float32, device=plan.device)
        cuts = requests.truncation_flags
        choice = _device_choice(plan, rows, plan.sizes.vocab)
        choice.draft(
            logits.to(plan.device),
            rows_of(requests, plan.device),
            out,
            leads,
            top_k=cuts.top_k,
            top_p=cuts.top_p,
            random=cuts.random,
        )
        found[name] = {
            "other_tokens": int((out.cpu().numpy() != wanted.token_ids).sum()),
            "other_leads": int((leads.cpu().numpy() != wanted.margins.astype(np.float32)).sum()),
        }
    return {"ok": not any(any(each.values()) for each in found.values()), "rows": rows, "found": found}


def verification(plan: Plan, backend: Backend | None = None) -> Json:
    """The engine's verifiers, with the device's sampling kernels, and over the same logits on the CPU.

    backend: None: the plan's.
    """
    count, vocab, backend = plan.sizes.choice_rows, plan.sizes.vocab, backend or backend_of(plan)
    sequences, draft_probs = _drafts(count, vocab)
    logits = _logits(vocab, rows=sequences.num_rows)
    found: Json = {}
    for name, drafts in DRAFTS.items():
        probs = draft_probs if name == "rejection" else None
        said = []
        for device, sampler in (
            (plan.device, sampler_on(backend, vocab, count)),
            ("cpu", Sampler(count, vocab, (1,))),
        ):
            _start(sampler, count, _TEMPERATURE)
            distributions = None if probs is None else probs.to(device)
            tokens = make_verifier(drafts, sampler).verify(logits.to(device, copy=True), sequences, distributions)
            said.append([*by_slot(range(count), tokens.counts, tokens.token_ids)])
        found[name] = sum(one != other for one, other in zip(*said, strict=True))
    return {"ok": not any(found.values()), "sequences": count, "other_verdicts": found}


def edited(plan: Plan, backend: Backend | None = None) -> Json:
    """Logits that requests edit, by tensor operations on the device and on the CPU.

    backend: as in verification.
    """
    vocab, count, backend = plan.sizes.vocab, len(EDITS), backend or backend_of(plan)
    logits, prompt = _logits(vocab, count + 3)[:count], tuple(range(2, 34))  # without the odd rows
    processed = []
    for device, sampler in (
        (plan.device, sampler_on(backend, vocab, count)),
        ("cpu", Sampler(count, vocab, (1,))),
    ):
        for slot, asked in enumerate(EDITS):
            sampler.start(SequenceStart(slot=slot, sampling=asked, seed=slot, prompt_len=8, token_ids=prompt))
        given = logits.to(device, copy=True)
        asking = DraftLayout.plain(np.arange(count), np.full(count, len(prompt)))
        processed.append(sampler.rows(given, asking).logits.cpu())
    ours, wanted = processed
    others = ~torch.isclose(ours, wanted, rtol=1e-6, atol=1e-6)
    return {"ok": not bool(others.any()), "other_logits": others.sum(-1).tolist()}


def distribution_of_choice(plan: Plan) -> Json:
    """Tokens of many seeds over one row of logits."""
    rows, row = plan.sizes.exact_rows, _few_logits(0, plan.sizes.vocab)
    found = {}
    for name, case in _cases(plan):
        requests = _requests(rows, case)
        out = torch.empty(rows, dtype=torch.int64, device=plan.device)
        cuts = requests.truncation_flags
        _device_choice(plan, rows, plan.sizes.vocab).take(
            row.to(plan.device).repeat(rows, 1),
            rows_of(requests, plan.device),
            out,
            top_k=cuts.top_k,
            top_p=cuts.top_p,
            random=cuts.random,
        )
        found[name] = p_value(out.cpu().numpy(), exact_distribution(row.double().numpy(), *case))
    return {"ok": min(found.values()) > LEAST_P, "rows": rows, "p_values": found}


def distribution_of_verification(plan: Plan) -> Json:
    """The first token after one drafted token each: it has the target's distribution, whatever was drafted."""
    found = verified(plan, plan.sizes.exact_rows // 2)
    return {"ok": min(each["p_value"] for each in found.values()) > LEAST_P, "found": found}


def verified(plan: Plan, sequences: int, temperature: float = _TEMPERATURE) -> Json:
    """Return by verifier how likely its counts are at a temperature; they are drawn at _TEMPERATURE."""
    vocab, backend = plan.sizes.vocab, backend_of(plan)
    row = _few_logits(0, vocab)
    target = exact_distribution(row.double().numpy(), temperature, 0.0, 0, 1.0)
    draft = exact_distribution(_few_logits(1, vocab).double().numpy(), 1.0, 0.0, 0, 1.0)
    drafted = np.random.default_rng(5).choice(vocab, size=sequences, p=draft)
    slots = np.arange(len(drafted))
    asked = DraftLayout.of(slots, np.full(len(slots), 10), np.ones_like(slots), drafted)
    found = {}
    for name, drafts in DRAFTS.items():
        distributions = (
            torch.from_numpy(draft).to(plan.device).repeat(sequences, 1) if name == "rejection" else None
        )
        sampler = sampler_on(backend, vocab, sequences)
        _start(sampler, sequences, _TEMPERATURE)
        verifier = make_verifier(drafts, sampler)
        said = verifier.verify(row.to(plan.device).repeat(2 * sequences, 1), asked, distributions)
        counts = np.array(said.counts)
        first = np.array(said.token_ids)[counts.cumsum() - counts]
        found[name] = {
            "p_value": p_value(first, target),
            "accepted": round(float((counts == 2).mean()), 4),
        }
    return found


def exact_distribution(logits: Floats, temperature: float, min_p: float, top_k: int, top_p: float) -> Floats:
    """Return each token's probability [V]: temperature, min_p, top_k, top_p, each on what the last has left."""
    if temperature == 0:
        return np.asarray(np.arange(len(logits)) == logits.argmax(), np.float64)
    order = np.argsort(-logits, kind="stable")
    weights = np.exp((logits[order] - logits.max()) / temperature)
    weights[weights < min_p] = 0.0
    if top_k:
        weights[top_k:] = 0.0
    before = weights.cumsum() - weights
    if top_p < 1:
        weights[before >= top_p * weights.sum()] = 0.0
    distribution: Floats = np.empty(len(logits))
    distribution[order] = weights / weights.sum()
    return distribution


def rows_of(requests: SamplingMetadata, device: str) -> DeviceSamplingMetadata:
    """Requests as kernels read them."""
    return DeviceSamplingMetadata(
        temperature=torch.from_numpy(requests.temperature).to(device),
        log_min_p=torch.from_numpy(requests.min_p).log().float().to(device),
        top_k=torch.from_numpy(requests.top_k).to(device),
        top_p=torch.from_numpy(requests.top_p).to(device),
        seeds=torch.from_numpy(requests.seeds.view(np.int64)).to(device),
        positions=torch.from_numpy(requests.positions).to(device),
    )


def _cases(plan: Plan) -> list[tuple[str, tuple[float, float, int, float]]]:
    return [(name, _CASES[name]) for name in plan.sizes.cases]


def _requests(rows: int, case: tuple[float, float, int, float]) -> SamplingMetadata:
    temperature, min_p, top_k, top_p = case
    return SamplingMetadata(
        temperature=np.full(rows, temperature, np.float32),
        min_p=np.full(rows, min_p),
        top_k=np.full(rows, top_k, np.int64),
        top_p=np.full(rows, top_p),
        seeds=np.random.default_rng(3).integers(0, 2**63, rows, dtype=np.int64).astype(np.uint64),
        positions=np.arange(rows, dtype=np.int64) % 1000 + 1,
    )


def _logits(vocab: int, rows: int) -> Tensor:
    """Return [rows, vocab] float32 on the CPU, as flat as a language model's; the last rows are the odd ones."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(rows, vocab, generator=generator) * 3.0
    logits[-1, 1:] = -torch.inf
    logits[-2, vocab // 2] = torch.nan
    logits[-3] = logits[-3].clamp(-2, 1).round()
    return logits


def _few_logits(seed: int, vocab: int) -> Tensor:
    """Return [vocab] float32 on the CPU; finite in _FEW_TOKENS places all over it, or in all."""
    row = torch.full((vocab,), -torch.inf)
    places = torch.linspace(0, vocab - 1, min(_FEW_TOKENS, vocab)).long()
    row[places] = torch.randn(len(places), generator=torch.Generator().manual_seed(seed)) * 1.5
    return row


def _drafts(count: int, vocab: int) -> tuple[DraftLayout, Tensor]:
    """Ragged drafts of 0 … 3 tokens from [T, V] float64 distributions of their own, half of them likely ones."""
    rng, distributions, row = np.random.default_rng(6), [], 0
    token_ids: list[int] = []
    slots = np.arange(count)
    total = sum(1 + slot % 4 for slot in range(count))
    target = (_logits(vocab, total).double() / _TEMPERATURE).nan_to_num(0.0, neginf=-1e4).softmax(-1).numpy()
    for slot in range(count):
        for depth in range(slot % 4):
            distribution = 0.5 * target[row + depth] + 0.5 * rng.dirichlet(np.ones(vocab))
            distributions.append(distribution / distribution.sum())
            token_ids.append(int(rng.choice(vocab, p=distributions[-1])))
        row += slot % 4 + 1
    sequences = DraftLayout.of(slots, 20 * slots + 5, slots % 4, np.array(token_ids))
    return sequences, torch.from_numpy(np.array(distributions))


def _start(sampler: Sampler, count: int, temperature: float) -> None:
    for slot in range(count):
        sampling = SamplingParams(temperature=temperature)
        sampler.start(
            SequenceStart(slot=slot, sampling=sampling, seed=slot * 977 + 1, prompt_len=1, token_ids=(1,))
        )


def sampler_on(backend: Backend, vocab: int, slots: int) -> Sampler:
    """Make a sampler as the engine does, with the device's kernels."""
    return Sampler(slots, vocab, (1,), backend.sampling_kernels)


def _device_choice(plan: Plan, rows: int, vocab: int) -> Any:
    """Return the device kernels of the backend. A CPU has none: Triton's interpreter runs the kernels there."""
    choice = backend_of(plan).device_sampling_kernels(rows, vocab)
    if choice is None:
        from faser.kernels.cuda.triton.sampling.device_sampling import TritonDeviceSamplingKernels

        choice = TritonDeviceSamplingKernels(rows, vocab, plan.device)
    return choice
