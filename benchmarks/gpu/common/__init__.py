"""What every phase stands on: the plan and its sizes, made-up models, engines over them, clocks, and the records.

Imports nothing else of benchmarks.gpu. Start with plan.py.
"""
