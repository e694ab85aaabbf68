"""What everything rests on: the one error, pytrees, mesh shapes, seeds, and torch's private names.

Imports nothing of fzero. `torch_private` is the one file that touches a name of torch that is not public.
"""
