"""What every other room rests on: the one error, pytrees, mesh shapes, seeds, dtypes of sums, torch's private names.

In: nothing of fzero. Out: values and pure functions. `torch_private` is the only file that uses a private torch name.
"""
