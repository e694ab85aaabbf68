"""Trees of tensors become trees of slices, and back.

In: tensors, initializers, constructors, safetensors files, or the values of one rank. Out: `Sharded` leaves, of which
each rank holds its own part; or whole tensors; or a safetensors file. A rank holds its parts and one chunk at most;
`build` also holds one whole parameter.
"""
