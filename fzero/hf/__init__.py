"""hf: transformers' Trainer and `generate`, over programs of slices.

In: a model of transformers, and its TrainingArguments. Out: its Trainer, with parameters, gradients and optimizer state
in slices, and its `generate`. Needs transformers 5.22 or later, and accelerate. Imported by name: `import fzero.hf`.
"""

from fzero.hf.release import check_release

check_release()  # before the rest, which asks transformers for names that others lack

from fzero.hf.generation import Generator  # noqa: E402
from fzero.hf.pretrained import Pretrained, from_pretrained  # noqa: E402
from fzero.hf.seq2seq import Seq2SeqTrainer  # noqa: E402
from fzero.hf.trainer import Trainer  # noqa: E402
from fzero.hf.training_arguments import Seq2SeqTrainingArguments, TrainingArguments  # noqa: E402

__all__ = [
    "Generator",
    "Pretrained",
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "Trainer",
    "TrainingArguments",
    "from_pretrained",
]
