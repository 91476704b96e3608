"""Code shared by measurements of speculation: policies by name for simulations, prompts, charts.

`faser bench spec` compares drafters on live engines; the programs around go further.
"""
