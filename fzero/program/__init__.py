"""A step as a graph: what its operations are, what kind each value is, and what the step costs.

In: a traced graph. Out: `Program`, and walks over it: kinds, collectives, memory, work, timeline, listing. One record
in `ops` states everything about an operation. Walks read records, and have no special case for any operation.
"""
