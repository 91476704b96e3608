"""One engine: the step loop, and `build`, which puts it together. `client` and `text` serve the front-end's side.

`control` decides without torch, `execution` computes with it, and only values of `contract` pass between the two.
Start reading at engine.py, then contract/plan.py.
"""
