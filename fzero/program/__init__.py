"""A step as a graph: what its operations are, what kind each value is, and what the step costs.

In: a traced graph. Out: `Program`, and walks over it: kinds, collectives, memory, work, timeline, listing. What is
known of one operation stands in its record, in `ops`. A walk reads records, and has no case of its own for one.
"""
