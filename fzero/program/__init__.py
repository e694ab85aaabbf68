"""A step as a graph: its operations, the kinds of its values, its costs.

In: a traced graph. Out: `Program`, and walks over it: kinds, collectives, memory, work, timeline, listing. One record
in `ops` states everything about an operation. Walks read records, and have no special case for any operation.
"""
