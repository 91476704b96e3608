"""Activations of feed-forward networks, which checkpoints name and kernels compute."""

from enum import StrEnum


class Activation(StrEnum):
    """Functions of the gate g in a feed-forward network, before it multiplies the other half.

    SILU: g σ(g). GELU_TANH: g (1 + tanh(√(2/π) (g + 0.044715 g³))) / 2. SWIGLU_OAI: g σ(1.702 g), of a g that is
    cut off at 7; the other half is clamped to ±7, and one is added. GELU: g Φ(g), of encoders, where a network may
    have no other half.
    """

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    SWIGLU_OAI = "swigluoai"
    GELU = "gelu"
