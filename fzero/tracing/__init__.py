"""A function and its arguments become a `Program`.

In: the user's step and example arguments. Out: one flat graph of forward, backward and update; every node knows the
user's line that it comes from.
"""
