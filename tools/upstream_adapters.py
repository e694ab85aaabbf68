"""Adapters of peft's own tests, trained by fzero on two virtual ranks and by plain torch.

    python tools/upstream_adapters.py --peft FOLDER              the cases of tests/test_custom_models.py, by hand
    python tools/upstream_adapters.py --peft FOLDER --trainer    the configurations of tests/test_decoder_models.py

A folder is a checkout, or a source distribution, with `tests`. Nothing is downloaded: models are those of the tests, or
small ones of the same classes. By hand means `fzero.lower` and `fzero.value_and_grad` with SGD; plain torch takes the
mean of the losses of both halves of a batch. With `--trainer` the two are `fzero.hf.Trainer` and transformers'. Dropout
is off. A line for each case says "equal", the name of an error, or what differs. Cases come in an order that `--seed`
draws, and lines that build/ has are not made again. docs/adapters.md has the counts.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import random
import shutil
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import peft
import tiny_models
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

import fzero
import fzero.hf
from fzero import FzeroError, VirtualMesh, tree

OUT = Path(__file__).parents[1] / "build" / "upstream"
ROWS, UPDATES, TOLERANCE = 9, 3, 1e-5
KINDS = ("OPT", "GPT2LMHead", "GPTJ", "Llama", "Qwen2", "Gemma3", "Mistral")
"""The decoders of peft's tests, by what stands before ForCausalLM, or before Model."""
SMALL_RATE = ("AdaLoRA", "Groups2")
"""What the names of cases say whose losses are far above 1."""


def import_tests(folder: Path, name: str) -> Any:
    """A module of the tests. They import diffusers, which the cases here do without."""
    stand_in = types.ModuleType("diffusers")
    vars(stand_in).update(StableDiffusionPipeline=type("StableDiffusionPipeline", (), {}), __spec__=None)
    sys.modules.setdefault("diffusers", stand_in)
    package = types.ModuleType("tests")
    package.__path__ = [str(folder / "tests")]
    package.__spec__ = ModuleSpec("tests", None, is_package=True)
    sys.modules["tests"] = package
    return importlib.import_module(f"tests.{name}")


def turn_off_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout", "layerdrop"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def find_loss(output: Tensor) -> Tensor:
    return output.float().square().mean()


def train_plain(model: nn.Module, batches: list[Tensor], rate: float) -> tuple[list[float], dict[str, Tensor]]:
    """The losses, and all parameters at the end, by their names."""
    optimizer = torch.optim.SGD([x for x in model.parameters() if x.requires_grad], rate)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = (find_loss(model(batch[:ROWS])) + find_loss(model(batch[ROWS:]))) / 2
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: x.detach() for name, x in model.named_parameters()}


def train_ours(model: nn.Module, batches: list[Tensor], rate: float) -> tuple[list[float], dict[str, Tensor]]:
    """As `train_plain`, on two virtual ranks."""
    mesh, names = VirtualMesh(fsdp=2), {name for name, x in model.named_parameters() if x.requires_grad}
    params, apply = fzero.lower(model)
    trained, frozen = tree.split(fzero.partition(params, mesh), lambda path, leaf: path in names)
    optimizer = fzero.optim.sgd(rate)

    def update(trained: Any, state: Any, frozen: Any, batch: Tensor) -> Any:
        def compute(trained: Any) -> Tensor:
            return find_loss(apply(tree.merge(trained, frozen), batch))

        loss, grads = fzero.value_and_grad(compute)(trained)
        updates, state = optimizer.update(grads, state, trained)
        return fzero.optim.apply_updates(trained, updates), state, fzero.pmean(loss, "fsdp")

    step, state, losses = fzero.simulate(update, mesh), optimizer.init(trained), []
    for batch in batches:
        trained, state, loss = step(trained, state, frozen, batch)
        losses.append(loss.item())
    whole = fzero.unpartition(tree.merge(trained, frozen))
    return losses, dict(zip(tree.paths(whole), tree.leaves(whole)))


def compare_by_hand(tests: Any, case: Any) -> str:
    """What a case of test_custom_models gives."""
    name, model_id, config, kwargs = case
    draw = torch.Generator().manual_seed(3)
    sizes = (2 * ROWS, 10)
    is_embedding = model_id == "EmbConv1D"
    batches: list[Tensor] = [
        torch.randint(0, 100, sizes, generator=draw) if is_embedding else torch.randn(sizes, generator=draw)
        for _ in range(UPDATES)
    ]
    found = []
    rate = 1e-9 if any(word in name or word in config.__name__ for word in SMALL_RATE) else 0.02
    for train in (train_plain, train_ours):
        base = tests.MockTransformerWrapper.from_pretrained(model_id)
        model = peft.get_peft_model(base, config(base_model_name_or_path=model_id, **copy.deepcopy(kwargs)))
        model.train(config is not peft.PveraConfig and "rank_dropout" not in kwargs)  # these draw when they train
        found.append(train(turn_off_dropout(model), batches, rate))
    (expected, weights), (losses, held) = found
    far = max(abs(x - y) / max(1.0, abs(y)) for x, y in zip(losses, expected))
    assert held.keys() == weights.keys()
    far = max(far, *((held[key] - x).abs().max().item() / max(1.0, x.abs().max().item()) for key, x in weights.items()))
    return "equal" if far <= TOLERANCE else f"differs by {far:.1e}"


def compare_trainers(kind: str, config: Any, kwargs: dict[str, Any]) -> str:
    """What a configuration of test_decoder_models gives in a model of a class."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from hf_models import make_arguments, make_dataset, read_logs

    cls: Any = getattr(transformers, f"{kind}Model" if kind.endswith("Head") else f"{kind}ForCausalLM")
    trainers: list[tuple[Any, dict[str, Any]]] = [(transformers.Trainer, {}), (fzero.hf.Trainer, {"mesh": 2})]
    logs, files, folder = [], [], Path(tempfile.mkdtemp())
    changed = {"max_steps": UPDATES, "gradient_accumulation_steps": 1, "learning_rate": 1e-2, "warmup_steps": 0}
    try:
        for trainer_cls, named in trainers:
            made = tiny_models.shrink(cls.config_class)
            made.pad_token_id = made.eos_token_id = made.bos_token_id = 0
            torch.manual_seed(0)
            model = turn_off_dropout(peft.get_peft_model(cls(made), config(**copy.deepcopy(kwargs))))
            mesh = {"mesh": VirtualMesh(fsdp=named["mesh"])} if named else {}
            trainer = trainer_cls(model, make_arguments(folder, **changed), train_dataset=make_dataset(), **mesh)
            trainer.train()
            trainer.save_model(folder / trainer_cls.__module__)
            logs.append(read_logs(trainer))
            files.append(load_file(folder / trainer_cls.__module__ / "adapter_model.safetensors"))
    finally:
        shutil.rmtree(folder)
    far = max(abs(x[key] - y[key]) for x, y in zip(*logs) for key in ("loss", "grad_norm"))
    assert files[0].keys() == files[1].keys()
    far = max(
        far, *((files[0][key].float() - x.float()).abs().max().item() for key, x in files[1].items() if x.numel())
    )
    return "equal" if far <= TOLERANCE else f"differs by {far:.1e}"


def iter_cases(folder: Path, is_trainer: bool) -> Iterator[tuple[str, Any]]:
    """The words of each case, and a function that tries it."""
    tests = import_tests(folder, "test_decoder_models" if is_trainer else "test_custom_models")
    if is_trainer:
        for kind in KINDS:
            for i, (config, kwargs) in enumerate(tests.ALL_CONFIGS):
                yield f"{kind} {i} {config.__name__}", lambda k=kind, c=config, x=kwargs: compare_trainers(k, c, x)
    else:
        for i, case in enumerate(tests.TEST_CASES):
            yield f"{i} {case[0]}", lambda case=case: compare_by_hand(tests, case)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peft", type=Path, required=True, help="the folder of a checkout")
    parser.add_argument("--trainer", action="store_true", help="configurations of decoders, in Trainers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=600.0, help="no case begins later")
    given = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    out = OUT / ("adapters-trainer.txt" if given.trainer else "adapters.txt")
    done = {line.partition(" | ")[0] for line in out.read_text().splitlines()} if out.exists() else set()
    cases = [case for case in iter_cases(given.peft.resolve(), given.trainer) if case[0] not in done]
    random.Random(given.seed).shuffle(cases)
    begin = time.monotonic()
    for words, compare in cases:
        if time.monotonic() - begin > given.seconds:
            break
        try:
            result = compare()
        except FzeroError as error:
            result = f"refused: {error}"
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        line = f"{words} | {' '.join(result.split())[:300]}"
        print(line, flush=True)
        with out.open("a") as file:
            print(line, file=file)


if __name__ == "__main__":
    main()
