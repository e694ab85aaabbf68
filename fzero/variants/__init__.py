"""Variants of ZeRO, one file each, made of public names only. Nothing in fzero imports them.

In: a program of the default passes. Out: one that moves or keeps something else. Read them as examples of how to write
a variant (docs/passes.md), and use them: `passes.insert(passes.defaults(stage=3), int8_gather, before="prefetch")`.
"""
