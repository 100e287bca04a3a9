"""Triton kernels of the decode step, of evictions and of attention under a trace, and their plain torch twins.

`ops.py` is the one place that decides between them. A twin has the name and the arguments of its kernel: it runs
where the kernel does not, and says in the tests what the kernel must compute.
"""
