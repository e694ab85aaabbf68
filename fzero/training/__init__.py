"""Training: what the loops of DeepSpeed and of Hugging Face have in common.

In: a module. Out: slices of parameters, functions that add gradients batch by batch, the mesh of all ranks, and modules
whose old values are errors.
"""
