"""lightning: a strategy of Lightning's Trainer, over models in slices.

In: a LightningModule, as it is for DDP. Out: its training by Lightning's Trainer, with parameters, gradients and
optimizer state in slices. Needs Lightning, transformers and accelerate. Imported by name: `import fzero.lightning`.
"""

from fzero.lightning.strategy import Strategy

__all__ = ["Strategy"]
