"""General programs: one trace for all sizes of a batch.

A step that is called with a second shape is traced with open sizes (`fzero.base.symbols`). Further shapes that fulfil
the conditions of that trace need no trace of their own: numbers take the place of open sizes, and code that was
generated once takes them. The conditions are those of forward, backward and update, and those of the passes.

A general program is used only where it equals, node by node, a program that was traced at another shape.
"""
