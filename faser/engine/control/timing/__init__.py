"""Time as the control plane sees it: a clock, and the cost model that predicts how long steps take.

Imports `contract` only. Start reading at cost_model.py.
"""
