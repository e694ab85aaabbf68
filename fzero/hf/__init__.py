"""hf: transformers' Trainer and `generate`, over programs of slices.

In: a model of transformers, and its TrainingArguments. Out: its Trainer, with parameters, gradients and optimizer state
in slices, and its `generate`. Needs transformers and accelerate. Imported by name: `import fzero.hf`.
"""

from fzero.hf.generation import Generator
from fzero.hf.pretrained import Pretrained, from_pretrained
from fzero.hf.seq2seq import Seq2SeqTrainer
from fzero.hf.trainer import Trainer

__all__ = ["Generator", "Pretrained", "Seq2SeqTrainer", "Trainer", "from_pretrained"]
