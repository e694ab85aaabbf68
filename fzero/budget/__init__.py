"""Budget: of the programs of a step, the fastest whose peak stays under a number of bytes.

`outline` has a program as one line of nodes, `saved` finds what the backward pass uses of the forward pass, `choices`
what a program could do otherwise, `placements` where state could lie, `frontier` which choices go together, and `fit`
builds the program.
"""
