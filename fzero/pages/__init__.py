"""Pages: a program as one HTML file, with pictures of its memory and of its time.

In: a `Program`. Out: a text that needs no network and no script: charts are SVG, values stand under the mouse.
"""
