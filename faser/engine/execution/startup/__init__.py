"""Everything that is done once, before the first request: device, loading, kernels, memory, step_times/.

The engine's builder calls these modules in that order. Imports config, the engine's contract and checkpoints, the
rest of the data plane, and kernels. Start with model_loading.py and memory_profile.py.
"""
