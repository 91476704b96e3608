"""Steps of at most eight rows: products in Triton, the norm before and the gate after them included.

Unmeasured and off unless asked for. Start reading at product.py; blocks.py makes layers of it.
"""
