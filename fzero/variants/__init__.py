"""Variants of ZeRO, one file each, written with public names only. Only `fzero.deepspeed` imports them.

In: a program of the default passes. Out: a program that moves or keeps something else. To use a variant, insert it:
`passes.insert(passes.defaults(stage=3), int8_gather, before="prefetch")`. docs/passes.md shows how to write one.
"""
