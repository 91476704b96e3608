"""Sampling: from logits to tokens and log probabilities, and the parameters of every slot.

Imports the plan's values and the contracts of kernels; knows no model and no schedule. Start with sampler.py.

    SamplingState (by slot) -> SamplingMetadata (by row) -> LogitsProcessors -> SamplingKernels -> token ids

`distribution.py` defines the arithmetic of temperature, min_p, top_k and top_p by tensor operations. The native
kernels (kernels/cpu) and the Triton kernels (kernels/cuda/triton/sampling) give the same bits.

How to add a sampling parameter, with top_n_sigma as the example:

 1. `faser/types.py`: a field of SamplingParams with its limits and `edits`. Bodies of all dialects and docs/api.md
    follow (`make docs`).
 2. `logits_processors/top_n_sigma.py`: a LogitsProcessor whose `edit` returns a RowsEdit: rows, and a function of
    their logits. Tensor operations apply it on every device before the kernels run, so no kernel changes.
 3. `logits_processors/registry.py`: its place in the order.

Requests that use it are sampled by the Sampler; all others keep the path on which the runner samples. If it has to
be faster, give it an edit of its own in kernels/interface/sampling/logits_processor_kernels.py with a case in both
implementations; or, if kernels can apply it while they read the logits, a field of SamplingMetadata and of
SamplingState, its definition in `distribution.py`, and then the native and Triton kernels.
"""
