"""Integers: which element of which leaf lies where, and which rank owns the element.

In: shapes, block sizes, a mesh shape. Out: layouts, wires, boxes and chunks, all hashable. `buffers` applies layouts to
tensors; all else here is arithmetic, so that a plan for 4,096 ranks needs no device.
"""
