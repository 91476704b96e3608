"""The wheel: builds it with kernels for every CPU of x86-64 inside, audits it, says what is in it.

`make wheel`, or `python -m deploy.wheel` where the packages of requirements.txt are. Start reading at __main__.py.
"""
