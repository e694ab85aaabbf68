"""Run a `Program`: on this rank (codegen), on all ranks in one process (lockstep), compiled, as a CUDA graph, timed.

In: a program and a rank. Out: a function of the program's tensor arguments that returns its tensor results.
"""
