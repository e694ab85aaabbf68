"""Checkpoints: state on disk, and trees in the formats of others.

export_hf(path, params, model)   a folder for Hugging Face's `from_pretrained`
load_hf(path, like, mesh)        a partitioned tree of such a folder
"""

from fzero.checkpoint.hugging_face import export_hf, load_hf

__all__ = ["export_hf", "load_hf"]
