"""hf: transformers' Trainer, over programs of slices.

In: a model of transformers, and its TrainingArguments. Out: its Trainer, with parameters, gradients and optimizer state
in slices. Needs transformers and accelerate. Imported by name: `import fzero.hf`.
"""

from fzero.hf.pretrained import Pretrained, from_pretrained
from fzero.hf.trainer import Trainer

__all__ = ["Pretrained", "Trainer", "from_pretrained"]
