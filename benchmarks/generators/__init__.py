"""Load generators of others against `faser serve`: do their figures agree with the server's own?

`setup` makes an environment for each, `__main__` runs them all. A new one is a file in `tools` and a line in
`tools/catalogue.py`.
"""
