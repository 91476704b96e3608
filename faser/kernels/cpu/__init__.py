"""The CPU backend, called `native`: C++ kernels, compiled at first use, and the Python that calls them.

Imports the interface only. Start reading at backend.py, then native/linear.cpp and native/attention/attention.cpp.
"""
