"""The campaign of `faser bench spec`: policies of speculation measured on a live engine.

May import everything below cli. Start with campaign.py; runner.py measures one run, report.py and plots.py
present the results.
"""
