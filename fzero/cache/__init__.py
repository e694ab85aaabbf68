"""Programs in a folder: a restarted run takes the program of a step from a file, and traces nothing.

In: a function, its arguments, and all that a trace of it depends on. Out: the program that a trace would give, or None.
A file is named by a hash of what the program depends on, holds plain data, and is compared before it is used. What
cannot be described exactly has no file.
"""
