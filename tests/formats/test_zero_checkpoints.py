"""Checkpoints of DeepSpeed's ZeRO, made by DeepSpeed (`make_deepspeed.py`): equal to what its own converters read."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tied_model import TiedModel
from torch import Tensor

import fzero
from fzero import FzeroError, VirtualMesh, checkpoint, optim, tree
from fzero.checkpoint import load_adam, load_params, open_deepspeed
from fzero.state.sources import Source

RUNS = Path(__file__).parent / "deepspeed"
NAMES = ("stage1", "stage2-bf16", "stage3-bf16", "stage3-three-ranks")
TRAINED = ("embed.weight", "layers.0.weight", "layers.1.weight", "scale", "layers.0.bias", "layers.1.bias")


def expected(name: str) -> dict[str, Tensor]:
    return load_file(RUNS / name / "expected.safetensors")


def read(source: Source, elements: range) -> Tensor:
    out = torch.empty(len(elements), dtype=source.dtype)
    source.read(elements.start, out)
    return out


@pytest.mark.parametrize("name", NAMES)
def test_every_value_is_what_deepspeeds_converters_read(name: str) -> None:
    sources, reference = open_deepspeed(RUNS / name), expected(name)
    steps = {f"optim.state.{parameter}.step" for parameter in TRAINED}
    if name == "stage1":  # whose frozen parameters the converters of DeepSpeed leave out
        reference["model.fixed"] = torch.arange(6.0) / 7
    assert sources.keys() == reference.keys() | steps
    assert {f"optim.state.{parameter}.exp_avg_sq" for parameter in TRAINED} < reference.keys()
    for key, value in reference.items():
        found = read(sources[key], range(value.numel())).view(sources[key].shape)
        assert not found.requires_grad
        # the converters cast buffers and frozen parameters
        assert found.to(value.dtype).equal(value) and sources[key].path == key, key
    assert all(read(sources[key], range(1)) == 3 for key in steps)


@pytest.mark.parametrize("name", NAMES)
def test_any_range_is_read(name: str) -> None:
    sources, reference = open_deepspeed(RUNS / name), expected(name)
    for key in ("model.embed.weight", "optim.state.layers.0.weight.exp_avg", "model.layers.1.bias"):
        flat = reference[key].view(-1)
        for start in range(flat.numel() + 1):
            for stop in (start, min(start + 5, flat.numel()), flat.numel()):
                assert read(sources[key], range(start, stop)).equal(flat[start:stop]), (key, start, stop)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_moves_over(name: str) -> None:
    sources, reference = open_deepspeed(RUNS / name / "step3"), expected(name)
    like = {parameter: torch.empty(sources[f"model.{parameter}"].shape, device="meta") for parameter in TRAINED}
    optimizer = optim.adamw(optim.schedules.linear_schedule(0.1, 0.0, 10)) if name == "stage1" else optim.adamw(0.1)
    for mesh in VirtualMesh(fsdp=1), VirtualMesh(fsdp=5), VirtualMesh(replica=2, fsdp=3):
        params = load_params(sources, like, mesh, prefix="model.", strict=False)
        opt_state = load_adam(sources, optimizer.init(params), mesh, prefix="optim.state.")
        state = fzero.unpartition(opt_state)
        for parameter in TRAINED:
            assert fzero.unpartition(params)[parameter].equal(reference[f"model.{parameter}"])
            assert state[0].mu[parameter].equal(reference[f"optim.state.{parameter}.exp_avg"])
            assert state[0].nu[parameter].equal(reference[f"optim.state.{parameter}.exp_avg_sq"])
            assert opt_state[0].mu[parameter].form.layout == params[parameter].form.layout
        counts = [leaf for path, leaf in zip(tree.paths(state), tree.leaves(state)) if path.endswith("count")]
        assert len(counts) == (2 if name == "stage1" else 1) and all(count == 3 for count in counts)


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(RUNS / "stage1", tmp_path / "deepspeed-run")
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "checkpoints_of_others.md").read_text()
    _, code = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {"fzero": fzero, "checkpoint": checkpoint, "Model": TiedModel, "torch": torch}
    names |= {"mesh": VirtualMesh(fsdp=2), "optimizer": optim.adamw(0.1)}
    exec(code, names)
    params, opt_state = fzero.unpartition((names["params"], names["opt_state"]))
    saved = expected("stage1") | {"model.fixed": torch.arange(6.0) / 7}
    assert opt_state[0].count == 3
    for path, leaf in zip(tree.paths(params), tree.leaves(params), strict=True):
        assert leaf.equal(saved[f"model.{path}"]), path


def rate(step: Tensor) -> Tensor:
    return 0.1 / (1 + step)


ADAMW = optim.adamw(0.1)
AROUND_ADAM = {
    "the idiom of the documents": optim.chain(optim.clip_by_global_norm(0.5), ADAMW),
    "clipped otherwise": optim.chain(optim.clip(0.5), optim.clip_by_block_rms(0.5), ADAMW),
    "chains in chains": optim.chain(optim.chain(optim.clip_by_global_norm(0.5)), optim.chain(optim.chain(ADAMW))),
    "with a schedule": optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(rate)),
    "scheduled stages": optim.chain(optim.scale_by_adam(), optim.scale_by_schedule(rate), optim.scale(-1.0)),
    "lamb": optim.lamb(0.1),
    "masked": optim.chain(optim.masked(optim.clip_by_global_norm(0.5), lambda path, leaf: "scale" in path),
                          optim.masked(ADAMW, lambda path, leaf: True)),
    "of several": optim.multi_transform({"a": ADAMW, "b": optim.adam(0.2)},
                                        lambda path, leaf: "b" if "scale" in path else "a"),
    "where finite": optim.apply_if_finite(optim.chain(optim.clip_by_global_norm(0.5), ADAMW), 3),
    "rates as state": optim.inject_hyperparams(optim.adamw)(torch.tensor(0.1), b1=rate),
    "all at once": optim.apply_if_finite(
        optim.chain(optim.clip_by_global_norm(1.0), optim.inject_hyperparams(optim.adamw)(rate)), 3
    ),
}  # fmt: skip


def test_state_around_adam_goes_on_from_adams() -> None:
    """Each optimizer that contains an Adam. The next update is that of the state which has Adam's means and counts."""
    sources, reference = open_deepspeed(RUNS / "stage1" / "step3"), expected("stage1")
    like = {parameter: torch.empty(sources[f"model.{parameter}"].shape, device="meta") for parameter in TRAINED}
    params = load_params(sources, like, VirtualMesh(fsdp=3), prefix="model.", strict=False)
    for name, optimizer in AROUND_ADAM.items():
        new = optimizer.init(params)
        state = load_adam(sources, new, VirtualMesh(fsdp=3), prefix="optim.state.")
        assert tree.paths(state) == tree.paths(new), name
        for path, leaf, fresh in zip(tree.paths(state), tree.leaves(state), tree.leaves(new)):
            parameter = path.partition(".mu." if ".mu." in path else ".nu.")[2]
            if parameter:
                kind = "exp_avg" if ".mu." in path else "exp_avg_sq"
                assert leaf.full_tensor().equal(reference[f"optim.state.{parameter}.{kind}"]), (name, path)
                assert leaf.form.layout == fresh.form.layout, (name, path)
            elif path.endswith(".count") or path == "count":
                assert leaf.full_tensor() == 3, (name, path)
            else:
                assert leaf.full_tensor().equal(fresh.full_tensor()), (name, path)
        grads = tree.map(torch.ones_like, params)
        updates, state = optimizer.update(grads, state, params)
        assert all(x.full_tensor().isfinite().all() for x in tree.leaves(updates)), name


# What is refused.

OPTIMIZER, MODEL = "zero_pp_rank_1_mp_rank_00_optim_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"


class Foreign:
    """A class that no list knows."""


def change(file: Path, edit: Callable[[Any], Any]) -> None:
    saved = torch.load(file, weights_only=True)
    edit(saved)
    torch.save(saved, file)


WITHOUT_WEIGHTS = {"zero_stage": 1, "partition_count": [2, 2], "base_optimizer_state": {}}

MISTAKES: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "a rank's file is missing": (
        "stage3-three-ranks",
        lambda path: (path / OPTIMIZER).unlink(),
        r"step3: has no file of rank 1 of 3; copy the folder",
    ),
    "the last rank's file is missing": (
        "stage1",
        lambda path: (path / OPTIMIZER).unlink(),
        r"zero_pp_rank_0_mp_rank_00_optim_states\.pt: is of a group of \[2, 2\] ranks, 1 files are there; copy",
    ),
    "the model's file is missing": (
        "stage3-bf16",
        lambda path: (path / MODEL).unlink(),
        rf"{MODEL}: is not there; copy",
    ),
    "no file at all": ("stage1", lambda path: [x.unlink() for x in path.iterdir()], "has no file .* among its 0 files"),
    "model parallel": (
        "stage1",
        lambda path: shutil.copy(path / OPTIMIZER, path / OPTIMIZER.replace("mp_rank_00", "mp_rank_01")),
        "step3: has files of model-parallel ranks 01, each with a part",
    ),
    "a truncated file": (
        "stage1",
        lambda path: (path / OPTIMIZER).write_bytes((path / OPTIMIZER).read_bytes()[:3000]),
        rf"{OPTIMIZER}: torch cannot load it: .*; the file is damaged",
    ),
    "a class that is not known": (
        "stage3-bf16",
        lambda path: change(path / MODEL, lambda saved: saved.update(client=Foreign())),
        rf"{MODEL}: names test_zero_checkpoints\.Foreign, which loading would run; if you trust",
    ),
    "no weights": (
        "stage1",
        lambda path: torch.save({"optimizer_state_dict": WITHOUT_WEIGHTS}, path / OPTIMIZER),
        rf"{OPTIMIZER}: has no 'single_partition_of_fp32_groups'; give a checkpoint that DeepSpeed's ZeRO saved",
    ),
    "other shapes, stage 1": (
        "stage1",
        lambda path: change(
            path / "mp_rank_00_model_states.pt",
            lambda saved: saved["param_shapes"][0].update({"embed.weight": torch.Size([9, 6])}),
        ),
        "step3: group 0 has 114 elements of weights, its parameters need 126; copy",
    ),
    "other shapes, stage 3": (
        "stage3-bf16",
        lambda path: change(
            path / MODEL, lambda saved: saved["param_shapes"][0].update({"embed.weight": torch.Size([9, 6])})
        ),
        "step3: rank 0 has 64 elements of weights, its parts of the parameters need 70; copy",
    ),
    "another program's file": (
        "stage1",
        lambda path: change(path / "mp_rank_00_model_states.pt", lambda saved: saved.update(param_shapes=[1, 2])),
        "step3: is not laid out as DeepSpeed's ZeRO does: TypeError: .*; copy",
    ),
    "latest names nothing": (
        "stage1",
        lambda path: (path.parent / "latest").write_text("../step3"),
        r"latest: names '\.\./step3', which is no folder beside it",
    ),
}


@pytest.mark.parametrize(("name", "spoil", "said"), MISTAKES.values(), ids=MISTAKES)
def test_damaged_checkpoints(name: str, spoil: Callable[[Path], Any], said: str, tmp_path: Path) -> None:
    run = shutil.copytree(RUNS / name, tmp_path / name)
    spoil(run / "step3")
    with pytest.raises(FzeroError, match=said):
        open_deepspeed(run)


def sources_of(**changed: Any) -> dict[str, Any]:
    """Sources of the first run with some in the place of others."""
    found: dict[str, Any] = open_deepspeed(RUNS / "stage1")
    return found | {f"optim.state.{key.replace('__', '.')}": value for key, value in changed.items()}


def load_state(sources: Any, optimizer: Any = None, **how: Any) -> Any:
    like = {parameter: torch.empty(sources[f"model.{parameter}"].shape) for parameter in TRAINED}
    params = fzero.partition(like, VirtualMesh(fsdp=2))
    state = (optimizer or optim.adamw(0.1)).init(params)
    return load_adam(sources, state, VirtualMesh(fsdp=2), **{"prefix": "optim.state."} | how)


def test_state_that_adam_does_not_have_is_refused() -> None:
    sources = sources_of(scale__step=fzero.checkpoint.open_state_dict({"step": torch.tensor(4.0)})["step"])
    with pytest.raises(
        FzeroError, match=r"count: made 3 steps \(embed.weight\), 4 steps \(scale\); Adam's state has one"
    ):
        load_state(sources)
    largest = fzero.checkpoint.open_state_dict({"max": torch.ones(1)})["max"]
    with pytest.raises(FzeroError, match=r"keys without a leaf \(1\): 'scale.max_exp_avg_sq'"):
        load_state(sources_of(scale__max_exp_avg_sq=largest))
    for optimizer, of in {optim.amsgrad(0.1): "ScaleByAmsgradState", optim.nadam(0.1): "ScaleByNadamState",
                          optim.lion(0.1): "ScaleByLionState", optim.adamw8bit(0.1): "ScaleByAdam8bitState",
                          optim.chain(optim.adam(0.1), optim.ema(0.9)): "EmaState",
                          optim.schedule_free(optim.adamw(0.1), 0.1): "ScheduleFreeState"}.items():  # fmt: skip
        with pytest.raises(FzeroError, match=rf"\w: is no part of Adam's state, but of {of}; give the state of an"):
            load_state(sources_of(), optimizer)
    with pytest.raises(
        FzeroError, match=r"embed.weight: has no key 'embed.weight.step' among 0; give prefix and rename"
    ):
        load_state(sources_of(), prefix="optimizer.")
    missing = sources_of()
    del missing["optim.state.scale.exp_avg"]
    with pytest.raises(FzeroError, match=r"leaves without values \(1\): 0.mu.scale \(as 'scale.exp_avg'\)"):
        load_state(missing)


def test_leaves_of_other_names_are_renamed() -> None:
    sources, reference = open_deepspeed(RUNS / "stage1"), expected("stage1")
    params = fzero.partition({"w": torch.empty(7, 6)}, VirtualMesh(fsdp=2))
    only = {key: source for key, source in sources.items() if key.startswith("optim.state.embed")}
    state = load_adam(
        only,
        optim.adamw(0.1).init(params),
        VirtualMesh(fsdp=2),
        prefix="optim.state.",
        rename={"w": "embed.weight"}.get,
    )
    assert state[0].mu["w"].full_tensor().equal(reference["optim.state.embed.weight.exp_avg"])
