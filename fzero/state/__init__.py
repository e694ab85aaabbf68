"""Trees of tensors become trees of slices, and back.

In: tensors, rules, constructors, files, other ranks. Out: `Sharded` leaves, each rank its own part; or whole tensors,
or files again. No rank holds more than its parts and one chunk.
"""
