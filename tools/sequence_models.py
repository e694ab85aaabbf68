"""Which decoders of transformers equal one device where ranks have parts of a sequence: `sp=` of `fzero.hf.parallel`.

    python tools/sequence_models.py [folder ...]

Each folder's model, with a small configuration, computes loss, logits and gradients on virtual ranks and on one device:
packed documents on two ranks, whose attention goes by heads; rows with labels of unequal number on eight ranks, whose
queries see the keys of all; packed documents on two ranks that also share layers; and both, on two times two ranks.
Windows and chunks of attention are shorter than rows. The types that equal one device in all four are those of
`fzero/hf/sequence_models.py`.
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any
from unittest.mock import patch

import tiny_models
import torch
import transformers

import fzero.hf
import fzero.hf.sequence
from fzero import FzeroError, VirtualMesh, tree

ALLOWED = 1e-5
PACKED = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]] * tiny_models.ROWS)
WAYS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "heads": ({"sp": 2}, {"position_ids": PACKED}),
    "keys": ({"sp": 8}, {}),
    "layers": ({"tp": 2}, {"position_ids": PACKED}),
    "both": ({"sp": 2, "tp": 2}, {"position_ids": PACKED}),
}


def compare(folder: str, axes: dict[str, int], more: dict[str, Any]) -> float:
    """The largest relative difference of loss, logits and gradients."""
    made = tiny_models.make(folder, "tp_plan")
    if made is None:
        raise tiny_models.UntriedError("no tensor plan")
    model, batch = made[0].train(), dict.fromkeys(("input_ids", "labels"), made[1]["input_ids"])
    batch["labels"] = batch["labels"].clone()
    batch["labels"][:, 5:7], batch["labels"][1, :3] = -100, -100
    batch |= more
    types = (*fzero.hf.sequence.MODEL_TYPES, model.config.get_text_config().model_type)
    mesh, tp = VirtualMesh(fsdp=1, **axes), "tp" if "tp" in axes else None
    with patch.object(fzero.hf.sequence, "MODEL_TYPES", types):
        params, apply = fzero.hf.parallel(model, mesh, tp=tp, sp=tuple(axes))

    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            output = apply(params, **batch, use_cache=False)
            return output.loss, output.logits

        return fzero.value_and_grad(loss, has_aux=True)(params)

    (loss, logits), grads = fzero.simulate(step, mesh, data=("fsdp",))(params, batch)
    expected = model(**batch, use_cache=False)
    expected.loss.backward()
    pairs = [(loss, expected.loss), (logits, expected.logits)]
    whole = fzero.unpartition(grads)
    for path, grad in zip(tree.paths(whole), tree.leaves(whole)):
        theirs = model.get_parameter(path).grad
        pairs.append((grad, torch.zeros_like(grad) if theirs is None else theirs))
    return max(((a - b).abs().max() / b.abs().max().clamp(min=1e-3)).item() for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", default=tiny_models.list_folders(), help="of transformers")
    equal = []
    print(f"| folder | {' | '.join(WAYS)} |\n|{'---|' * (len(WAYS) + 1)}")
    for folder in parser.parse_args().folders:
        found = []
        for way in WAYS.values():
            try:
                apart = compare(folder, *way)
                found.append("equal" if apart < ALLOWED else f"**differs** by {apart:.1e}")
            except (FzeroError, tiny_models.UntriedError) as error:
                found.append(f"refused: {' '.join(str(error).split())[:120]}")
            except Exception as error:
                found.append(f"**fails**: {type(error).__name__} {' '.join(str(error).split())[:120]}")
            if "equal" not in found[-1]:
                break
        print(f"| {folder} | {' | '.join(found)} |", flush=True)
        equal += [folder] if found == ["equal"] * len(WAYS) else []
    print("\nequal:", ", ".join(equal))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    main()
