"""Who takes part, how bytes move, and what happens when a rank is gone.

In: a torch DeviceMesh, or axis sizes alone. Out: its `Ranks`, a `Live` (the rank of this process) or a `Virtual` (all
ranks in one process), which perform the moves of values. `members` is the host process group of a mesh's ranks,
`agreement` compares what ranks are about to run, `failure` finds missing ranks, `transports` has a file for each way to
communicate.
"""
