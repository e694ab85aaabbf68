"""A module's own constructor, run with parameters that are cut over the ranks as they are made.

In: a constructor. Out: `(params, apply)`, as `fzero.lower` gives them, partitioned.
"""
