"""A `Program` runs: on this rank (codegen), on all ranks in one process (lockstep), compiled, as a CUDA graph, timed.

In: a program and a place among ranks. Out: a function of tensors.
"""
