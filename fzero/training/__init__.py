"""Training: what the loops of DeepSpeed and of Hugging Face have in common.

In: a module, an optimizer of torch or its type and params. Out: slices of parameters, groups of parameters with their
optimizers, functions that add gradients batch by batch, the mesh of all ranks, and modules whose old
values are errors.
"""
