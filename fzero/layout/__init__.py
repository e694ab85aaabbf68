"""Integers: which element of which leaf lies where, and which rank owns it.

In: shapes, block sizes, a mesh shape. Out: layouts, wires, boxes and chunks, all hashable; and `buffers`, which applies
them to tensors. Planning for 4,096 ranks takes no device.
"""
