"""Triton kernels of the decode step, of evictions and of attention under a trace, and their plain torch twins.

`ops.py` is the only place that chooses between them. A twin has the name and the arguments of its kernel. It runs where
the kernel cannot, and the tests use it to say what the kernel must compute.
"""
