"""Everything that is done once, before the first request: device, models, kernels, memory, step times.

An engine's models are a list: found (files.py), loaded and started (models.py), warmed up and measured
(warm_up.py, memory.py). Start with executor.py.
"""
