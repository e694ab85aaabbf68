"""hf: transformers' Trainer and `generate`, accelerate's Accelerator and TRL's trainers, over programs of slices.

In: a model of transformers, and its TrainingArguments. Out: its Trainer, with parameters, gradients and optimizer state
in slices, and its `generate`; or the model as a function, split by its own tensor plan (`parallel`). Needs transformers
5.22 or later, and accelerate. Imported by name: `import fzero.hf`.
TRL is imported once one of its trainers is asked for.
"""

from typing import TYPE_CHECKING, Any

from fzero.hf.release import check_release

check_release()  # before the rest, which asks transformers for names that others lack

from fzero.hf import trl_options  # noqa: E402
from fzero.hf.accelerator import Accelerator  # noqa: E402
from fzero.hf.generation import Generator  # noqa: E402
from fzero.hf.parallelize import parallel  # noqa: E402
from fzero.hf.pipelines import save_pretrained  # noqa: E402
from fzero.hf.pretrained import Pretrained, from_pretrained  # noqa: E402
from fzero.hf.seq2seq import Seq2SeqTrainer  # noqa: E402
from fzero.hf.trainer import Trainer  # noqa: E402
from fzero.hf.training_arguments import Seq2SeqTrainingArguments, TrainingArguments  # noqa: E402

if TYPE_CHECKING:
    from fzero.hf.trl_trainers import DPOTrainer as DPOTrainer
    from fzero.hf.trl_trainers import GRPOTrainer as GRPOTrainer
    from fzero.hf.trl_trainers import KTOTrainer as KTOTrainer
    from fzero.hf.trl_trainers import RewardTrainer as RewardTrainer
    from fzero.hf.trl_trainers import RLOOTrainer as RLOOTrainer
    from fzero.hf.trl_trainers import SFTTrainer as SFTTrainer

__all__ = [  # and TRL's, if installed
    "Accelerator",
    "Generator",
    "Pretrained",
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "Trainer",
    "TrainingArguments",
    "from_pretrained",
    "parallel",
    "save_pretrained",
]


def __getattr__(name: str) -> Any:
    if name not in trl_options.NAMES:
        others = f"; of TRL's trainers there are {', '.join(trl_options.NAMES)}" if name.endswith("Trainer") else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{others}")
    trl_options.check_release()
    from fzero.hf import trl_trainers

    return getattr(trl_trainers, name)
