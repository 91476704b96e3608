"""What measurements of speculation share: policies by name for simulations, prompts, charts.

`faser bench spec` compares drafters on live engines; the programs around go further.
"""
