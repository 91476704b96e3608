"""Sampling and verification: from logits to tokens and log probabilities, and to accepted draft tokens.

    Sampler.rows -> LogitRows (logits after the logits processors) -> tokens, probabilities -> StepTokens

Imports the plan's values and the contracts of kernels; knows no model and no schedule. Start with sampler.py and
rows.py; verify.py and rejection.py are the rules of acceptance. distribution.py defines the arithmetic of
temperature, min_p, top_k and top_p by tensor operations (kernels.py); the native kernels (kernels/cpu) and the
Triton kernels (kernels/cuda/triton/sampling) give the same bits.

How to add a sampling parameter, with top_n_sigma as the example:

 1. `faser/types.py`: a field of SamplingParams with its limits and `edits`. Bodies of all dialects and docs/api.md
    follow (`make docs`).
 2. `processors.py`: a LogitsProcessor whose `edit` returns `edit_rows` with rows and a function of their logits,
 and
    its place in make_logits_processors. Tensor operations apply it on every device before the kernels run.

Requests that use it are sampled by the Sampler; all others keep the path on which the runner samples. If kernels
can apply it while they read the logits, and it has to be that fast: a field of SamplingMetadata and of
SamplingState, its definition in distribution.py, and then the native and Triton kernels.
"""
