"""What user code touches inside a step: `Sharded` values, gradients, `lower`, `remat`, named collectives.

In: torch functions, called on `Sharded` leaves. Out: moves (gather, scatter, take, ...), each with its transpose. A
`MovePerformer` writes the moves into a program, or performs them at once.
"""
