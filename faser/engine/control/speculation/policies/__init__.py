"""The policies: one file each, and the objective that several of them maximise.

Imports the contract, the acceptance estimates and the cost model; never the control that calls it.
Start with policy.py, the seam. A new policy is a file here, a case in registry.py and a name in POLICIES.
"""
