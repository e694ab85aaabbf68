"""Safetensors files, read and written by ranges: a rank reads and writes only its own parts.

load_safetensors(path, like, mesh)   a partitioned tree
load_sources(path, like)             a tree of sources, for `partition`
save_safetensors(tree, path)         the inverse, for a partitioned tree
"""

from fzero.state.safetensors.loading import load_safetensors, load_sources
from fzero.state.safetensors.reading import FileSource, TensorFile, open_safetensors
from fzero.state.safetensors.saving import save_safetensors

__all__ = ["FileSource", "TensorFile", "load_safetensors", "load_sources", "open_safetensors", "save_safetensors"]
