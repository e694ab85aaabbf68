"""Random models whose parts ranks compute, on meshes of data and model axes, beside the same functions on one device.

    python -m property_tests.random_axes --count 2000          # seeds, and how many are equal, wrong or raw
    python -m property_tests.random_axes --seed 12             # one: its layers, mesh, split leaves and verdict

A model is a chain of layers. Each takes a value that is whole, or of which each rank along the model axes has a part
along a dim, and gives one: so all chains are valid programs, whose collectives stand where a person would write them.
"""
