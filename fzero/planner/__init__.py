"""The planner: what a training step of a model would take on ranks that are not there.

Takes the configuration of a model of transformers, or a step of your own, a mesh and the hardware; gives bytes, seconds
and what fits, from the program that a step would run. No weights, no device and no network. `python -m fzero plan`
prints it.
"""
