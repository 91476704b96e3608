"""The chart, the rules and the dashboards of deploy/, held against the program.

`make deploy-tools` installs what renders and validates them.
"""
