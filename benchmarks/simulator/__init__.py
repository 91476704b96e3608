"""The simulator: the real scheduler and policies on a simulated clock; only the model is played back."""
