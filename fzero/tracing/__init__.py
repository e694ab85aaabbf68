"""A function and its arguments become a `Program`.

In: the user's step. Out: one flat graph of forward, backward and update, each node with the user's line.
"""
