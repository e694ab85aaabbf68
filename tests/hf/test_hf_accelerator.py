"""Accelerator: a loop of accelerate over slices is that of accelerate, and what cannot be is named."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")  # without which fzero.hf is not there

import accelerate
import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedDataParallelKwargs
from accelerate.utils.deepspeed import DummyOptim
from hf_accelerate import Classifier, assert_equal, prepare, start, train
from hf_models import make_model
from test_docs import ROOT, blocks
from torch import nn

import fzero.hf
from fzero import FzeroError, VirtualMesh

TWO = VirtualMesh(fsdp=2)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """accelerate's state is of the process, and no other test has it."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    accelerator = start(accelerate.Accelerator, gradient_accumulation_steps=2)
    return train(accelerator, prepare(accelerator))


def test_two_virtual_ranks_train_as_accelerate_and_go_on_from_a_folder(
    expected: dict[str, Any], tmp_path: Path
) -> None:
    """Five batches an epoch: the last update of each has one batch."""
    accelerator = start(fzero.hf.Accelerator, mesh=TWO, gradient_accumulation_steps=2)
    prepared = prepare(accelerator)
    model = accelerator.unwrap_model(prepared[0])
    assert isinstance(model, Classifier) and model.embed.weight.shape == (11, 8)
    assert_equal(train(accelerator, prepared, folder=tmp_path), expected)
    accelerator.save_model(model, tmp_path / "model")
    read = accelerate.load_checkpoint_in_model
    read(again := Classifier(), tmp_path / "model")
    torch.testing.assert_close(dict(again.state_dict()), dict(model.state_dict()), atol=0.0, rtol=0.0)

    accelerator = start(fzero.hf.Accelerator, mesh=VirtualMesh(fsdp=4), gradient_accumulation_steps=2)
    prepared = prepare(accelerator)
    accelerator.load_state(tmp_path)
    resumed = train(accelerator, prepared, skip=5)
    second = {name: expected[name][-len(resumed[name]) :] for name in ("losses", "norms", "rates")}
    assert_equal(resumed, {**expected, **second})


def test_a_loss_outside_of_the_model_is_differentiated(expected: dict[str, Any], caplog: Any) -> None:
    caplog.set_level("INFO", logger="fzero")
    accelerator = start(fzero.hf.Accelerator, mesh=TWO, gradient_accumulation_steps=2)
    assert_equal(train(accelerator, prepare(accelerator), is_outside=True), expected)
    assert caplog.text.count("backward runs the model again") == 1


def test_bfloat16_on_one_rank_is_that_of_accelerate_bit_for_bit() -> None:
    """On several ranks sums of bfloat16 are rounded at other places, and so are gradients of one weight used twice."""
    both = []
    for cls, named in ((accelerate.Accelerator, {}), (fzero.hf.Accelerator, {"mesh": VirtualMesh(fsdp=1)})):
        accelerator = start(cls, mixed_precision="bf16", gradient_accumulation_steps=2, **named)
        both.append(train(accelerator, prepare(accelerator, Classifier(is_tied=False))))
    assert_equal(both[1], both[0], atol=1e-6)


def test_text_and_files_are_those_of_transformers(tmp_path: Path) -> None:
    accelerator, plain = start(fzero.hf.Accelerator, mesh=VirtualMesh(fsdp=1)), make_model().eval()
    model = accelerator.prepare(make_model()).eval()
    prompt = torch.tensor([[5, 6, 7]])
    assert torch.equal(model.generate(prompt, max_new_tokens=3), plain.generate(prompt, max_new_tokens=3))
    how = {"is_main_process": accelerator.is_main_process, "save_function": accelerator.save}
    accelerator.unwrap_model(model).save_pretrained(tmp_path, **how)
    read = type(plain).from_pretrained(tmp_path)
    torch.testing.assert_close(dict(read.state_dict()), dict(plain.state_dict()), atol=0.0, rtol=0.0)


# what is named


def clip_a_part(accelerator: Any, model: Any, **_: Any) -> None:
    accelerator.clip_grad_norm_(model.head.parameters(), 1.0)


def step_twice(model: Any, optimizer: Any, backward: Any, **_: Any) -> None:
    backward()
    optimizer.step()
    backward()


def use_old_output(model: Any, optimizer: Any, batch: Any, accelerator: Any, backward: Any, **_: Any) -> None:
    logits = model(**batch).logits
    backward()
    optimizer.step()
    optimizer.zero_grad()
    accelerator.backward(logits.sum())


def save_in_the_middle(accelerator: Any, backward: Any, folder: Path, **_: Any) -> None:
    backward()
    accelerator.save_state(folder)


def follow_an_input(model: Any, **_: Any) -> None:
    class Scale(nn.Module):
        def forward(self, x: Any) -> Any:
            return model(x)

    model(torch.ones(2, 3, requires_grad=True))


def change_an_option(optimizer: Any, backward: Any, **_: Any) -> None:
    optimizer.param_groups[0]["weight_decay"] = 9.0
    backward()
    optimizer.step()


MISUSES: dict[str, tuple[Callable[..., Any], str]] = {
    "a part of the parameters": (clip_a_part, "clip_grad_norm_: is called without embed.weight: .*model by model"),
    "another norm": (
        lambda accelerator, model, **_: accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=1),
        "got norm_type=1; give 2",
    ),
    "torch's clipping": (
        lambda model, **_: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        r"model: embed.weight: .grad needs values, .*accelerator.clip_grad_norm_",
    ),
    "a read": (lambda model, **_: model.head.weight.sum(), "head.weight: sum needs values.*get_state_dict"),
    "no zero_grad": (step_twice, "optimizer.zero_grad: is not called between two updates"),
    "an old output": (use_old_output, "accelerator.backward: the parameters have changed since"),
    "a save between updates": (save_in_the_middle, "save_state: gradients are waiting for an update"),
    "an input with a gradient": (follow_an_input, "argument 0.0: requires a gradient, .*into one nn.Module"),
    "a closure": (lambda optimizer, **_: optimizer.step(lambda: 1.0), "optimizer.step: got a closure"),
    "a second optimizer": (
        lambda accelerator, model, **_: accelerator.prepare(torch.optim.SGD(model.parameters(), 0.1)),
        "Classifier has an optimizer already; give one optimizer with groups",
    ),
    "no model": (
        lambda accelerator, **_: accelerator.prepare(torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)),
        "SGD has parameters of no model that is prepared",
    ),
    "a stand-in of DeepSpeed": (
        lambda accelerator, model, **_: accelerator.prepare(DummyOptim(model.parameters())),
        "got a DummyOptim, .*give an optimizer and a scheduler of torch",
    ),
    "hooks of states": (
        lambda accelerator, **_: accelerator.register_save_state_pre_hook(print),
        "register_save_state_pre_hook: would get whole models",
    ),
    "uneven inputs": (
        lambda accelerator, model, **_: accelerator.join_uneven_inputs([model]),
        "join_uneven_inputs: lets ranks make unequal numbers of steps",
    ),
    "a folder of others": (
        lambda accelerator, model, optimizer, folder, **_: (
            accelerator.save_state(folder), (folder / "fzero").rename(folder / "other"), accelerator.load_state(folder)
        ),
        "fzero: has no slices of this model; give a folder that accelerator.save_state wrote",
    ),
    "an option that changed": (
        change_an_option,
        "group 0: weight_decay: was 0.1 when the state was made, and is 9.0",
    ),
}  # fmt: skip
"""Each leaves the state as it was, but for gradients; the last changes an option."""


def test_a_misuse_is_named(subtests: pytest.Subtests, tmp_path: Path) -> None:
    accelerator = start(fzero.hf.Accelerator, mesh=VirtualMesh(fsdp=1))
    model, optimizer, loader, _ = prepare(accelerator)
    batch = next(iter(loader))

    def backward() -> None:
        accelerator.backward(model(**batch).loss)

    named = {"accelerator": accelerator, "model": model, "optimizer": optimizer, "batch": batch, "backward": backward}
    for number, (name, (misuse, said)) in enumerate(MISUSES.items()):
        with subtests.test(name):
            with pytest.raises(FzeroError, match=re.compile(said, re.DOTALL)):
                misuse(**named, folder=tmp_path / str(number))
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"fsdp_plugin": object()}, "Accelerator: fsdp_plugin: is given, and fzero cuts parameters into slices itself"),
        ({"stage": 4}, "stage: is 4; stages are 0, 1, 2 and 3"),
        ({"dynamo_backend": "eager"}, "dynamo_backend: is 'EAGER'; give"),
        (
            {
                "kwargs_handlers": [
                    DistributedDataParallelKwargs(comm_hook=accelerate.utils.DDPCommunicationHookType.FP16)
                ]
            },
            "DistributedDataParallelKwargs: has comm_hook",
        ),
    ],
)
def test_an_argument_that_is_not_supported_is_named(named: dict[str, Any], said: str) -> None:
    with pytest.raises(FzeroError, match=said):
        start(fzero.hf.Accelerator, **{"mesh": TWO, **named})


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On two virtual ranks."""
    (code,) = blocks((ROOT / "docs" / "accelerate.md").read_text(), "python")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"TWO": TWO}
    exec(
        compile(code.replace("Accelerator(g", "Accelerator(mesh=TWO, cpu=True, g"), "docs/accelerate.md", "exec"), names
    )
    assert names["accelerator"].step == 0 and names["loss"] < 4.2
    assert {"state", "out"} == {path.name for path in tmp_path.iterdir()}
