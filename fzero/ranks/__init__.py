"""Who takes part, how bytes move, and what happens when a rank is gone.

In: a torch DeviceMesh, or sizes alone. Out: a `Live` (this process's rank) or a `Virtual` (all ranks in one process),
which perform moves; `agreement`, by which ranks compare what they are about to run; a transport for each mesh axis.
"""
