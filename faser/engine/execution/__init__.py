"""The data plane: everything that touches tensors, from the rows of a plan to the tokens of a result.

May import the contract with the control plane, configuration and kernels, and nothing of the control plane itself.
Start with model_executor, then runner/runner.py.
"""
