"""The way to a machine without a network: the bundle, kernels compiled ahead, and vLLM cut to one GPU."""
