"""What measurements of speculation share: policies by name for simulations, prompts, charts.

`faser bench spec` compares policies on a live engine and prints a table; the programs around go further.
"""
