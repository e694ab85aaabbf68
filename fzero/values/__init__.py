"""What user code touches inside a step.

In: torch functions, called on `Sharded` leaves. Out: moves (gather, scatter, take, ...) with their transposes, which
whoever performs moves writes down or performs at once. Also here: `lower`, `remat`, gradients and named collectives.
"""
