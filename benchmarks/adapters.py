"""Full fine-tuning of a Llama beside LoRA and QLoRA, on 4 ranks at stage 3: the bytes of state that a rank holds, what
a step moves, and its peak.

    python benchmarks/adapters.py           # prints both tables
    python benchmarks/adapters.py --plan    # the first one alone: nothing runs

The model is that of transformers, with peft's LoRA of rank 16 in all products of its layers, and AdamW. Layers are
computed again in the backward pass. The products of a layer compute in bfloat16. Full fine-tuning holds weights in
float32, LoRA frozen ones in bfloat16, and QLoRA frozen ones of the layers as nf4 codes.

Ranks are virtual, and have a row each. The plan has the shapes of Llama 3.1 8B, on tensors without data. The steps that
run are small. Their peak is a quarter of the bytes of state, and of the growth of the bytes in use of the allocator
(`examples/measure.py`) between the first operation of an update and any other, beside what `program.memory()` predicts.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rounds
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import fzero
from fzero.hf.codes import KINDS, quantize_base

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from measure import malloc_in_use, nbytes

MIB, GIB = 1 << 20, 1 << 30
RANKS = 4
RESULTS = Path(__file__).parent / "results" / "adapters.json"
PLANNED = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 2048,
}  # fmt: skip
MEASURED = {
    "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
FORMS = ("full", "LoRA", "QLoRA")


def make(form: str, sizes: dict[str, int]) -> Any:
    """A Llama on the default device, in which a form trains."""
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes))
    if form != "full":
        adapters = LoraConfig(task_type="CAUSAL_LM", r=16, target_modules="all-linear")
        model = get_peft_model(model.to(torch.bfloat16), adapters)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def prepare(form: str, sizes: dict[str, int], mesh: Any) -> tuple[Any, Any, Callable[..., Any]]:
    """`(params, opt_state, train_step)` of a form."""
    model, optimizer = make(form, sizes), fzero.optim.adamw(1e-4)
    params, apply = fzero.lower(model)
    params = fzero.partition(params, mesh)
    if form == "QLoRA":
        params = quantize_base(params, model, KINDS["nf4"])
    compute = fzero.precision(torch.bfloat16, output=torch.float32)(apply) if form == "full" else apply

    def train_step(params: Any, opt_state: Any, tokens: Tensor) -> Any:
        def loss_fn(params: Any) -> Tensor:
            return compute(params, input_ids=tokens, labels=tokens, use_cache=False).loss

        loss, grads = fzero.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return fzero.optim.apply_updates(params, updates), opt_state, loss

    return params, optimizer.init(params), train_step


def count(state: Any) -> int:
    """The bytes of the leaves of a tree."""
    return sum(leaf.nbytes for leaf in fzero.tree.leaves(state) if isinstance(leaf, Tensor))


def plan() -> dict[str, Any]:
    """Form -> the bytes of state that a rank holds, of collectives by name, and the predicted peak."""
    mesh, found = fzero.VirtualMesh(fsdp=RANKS), dict[str, Any]()
    tokens = torch.empty(RANKS, PLANNED["max_position_embeddings"], dtype=torch.int64, device="meta")
    for form in FORMS:
        with torch.device("meta"):
            params, opt_state, train_step = prepare(form, PLANNED, mesh)
        program = fzero.simulate(train_step, mesh).trace(params, opt_state, tokens)
        moved = Counter[str]()
        for each in program.comm():
            moved[each.op] += each.nbytes
        found[form] = {
            "params": count(params) / RANKS, "opt_state": count(opt_state) / RANKS, "moved": dict(moved),
            "peak": program.memory().peak,
        }  # fmt: skip
    return found


def measure() -> dict[str, Any]:
    """Form -> the bytes of state of a rank, its measured and its predicted peak, in steady updates."""
    mesh, found = fzero.VirtualMesh(fsdp=RANKS), dict[str, Any]()
    tokens = torch.randint(MEASURED["vocab_size"], (RANKS, MEASURED["max_position_embeddings"]))
    for form in FORMS:
        *state, train_step = prepare(form, MEASURED, mesh)
        step = fzero.simulate(train_step, mesh)
        predicted = step.trace(*state, tokens).memory().peak
        *state, _ = step(*state, tokens)
        held, in_use, rows = nbytes([*fzero.tree.leaves(state), tokens]), malloc_in_use(), list[int]()
        assert in_use is not None, "the C library does not say how many bytes are in use"
        step(*state, tokens, watch=lambda *_, in_use=in_use, rows=rows: rows.append(in_use()))
        grown = max(rows) - rows[0]  # at the first node a simulated rank has its copy of the state, and no more
        found[form] = {"held": held / RANKS, "measured": (held + grown) / RANKS, "predicted": predicted}
    return found


def main() -> None:
    """Prints the tables, and writes the record."""
    flags = rounds.parse(__doc__, RESULTS)
    planned = plan()
    print(f"planned, Llama of {PLANNED}, {RANKS} ranks, a row each; GiB of a rank, and of buffers that move\n")
    print("| | weights | optimizer state | gathered | scattered | peak |\n|---|---|---|---|---|---|")
    for form, row in planned.items():
        moved = [row["moved"].get(op, 0) for op in ("all_gather", "reduce_scatter")]
        cells = [row["params"], row["opt_state"], *moved, row["peak"]]
        print(f"| {form} | " + " | ".join(f"{x / GIB:.2f}" for x in cells) + " |")
    if flags.plan:
        return
    measured = measure()
    print(f"\nmeasured, Llama of {MEASURED}, {RANKS} ranks, a row each; MiB of a rank\n")
    print("| | state | peak | predicted |\n|---|---|---|---|")
    for form, row in measured.items():
        print(f"| {form} | " + " | ".join(f"{row[x] / MIB:.1f}" for x in ("held", "measured", "predicted")) + " |")
    rounds.write(flags.json, {"planned": planned, "measured": measured})


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    main()
