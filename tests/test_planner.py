"""`python -m fzero plan`: memory, bytes and seconds of a step on ranks that are not there."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import fzero
from fzero.__main__ import main
from fzero.planner.command import choose_rates
from fzero.planner.forecast import Recipe, has_experts
from fzero.planner.summary import Forecast
from fzero.planner.sweep import Candidate, list_meshes, rank_candidates
from fzero.planner.ways import list_ways
from fzero.program.flops import count_flops
from fzero.program.hardware import ATTAINED, HARDWARE

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4}
LLAMA = {"model_type": "llama", "vocab_size": 128, "num_hidden_layers": 2, "torch_dtype": "bfloat16", **SIZES}


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return str(tmp_path)


def plan(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    status = main(["plan", *options])
    out, error = capsys.readouterr()
    return out if status == 0 else error


def test_a_forecast_has_the_bytes_of_the_step(capsys: pytest.CaptureFixture[str], config: str) -> None:
    """float32 weights and two moments, cut over eight ranks; bfloat16 on the wire, gradients in float32."""
    given = ("--config", config, "--length", "32", "--batch", "2", "--json")
    found = json.loads(plan(capsys, *given, "--mesh", "fsdp=4,tp=2"))
    numel = 2 * 128 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 96 + 2 * 64) + 64
    assert found["parameters"] == numel and found["ranks"] == 8 and found["tokens"] == 4 * 2 * 32
    assert 0 <= found["state"] / (12 * numel / 8) - 1 < 0.02  # padding
    assert found["state"] < found["peak"] and found["fits"] and found["moved"].keys() >= {"fsdp", "tp"}
    assert found["tokens_a_second"] * found["seconds"] * 8 == pytest.approx(found["tokens"])
    for mesh in ("fsdp=4,tp=2", "fsdp=2,sp=2,tp=2"):
        whole, between = (
            json.loads(plan(capsys, *given, "--mesh", mesh, *how)) for how in ([], ["--sequence-parallel"])
        )
        assert between["peak"] < whole["peak"] and between["state"] == whole["state"]
    alone = json.loads(plan(capsys, *given, "--mesh", "fsdp=8", "--remat"))
    assert alone["flops"] > found["flops"] and alone["moved"].keys() == {"fsdp"}


def test_selective_keeps_attention_and_every_other_product(capsys: pytest.CaptureFixture[str], config: str) -> None:
    """Of the products q, k, v, o, gate, up and down of a layer, in this order, k, o and up are computed again."""
    given = ("--config", config, "--length", "32", "--batch", "2", "--mesh", "fsdp=2", "--json")
    kept, selective = (json.loads(plan(capsys, *given, *how)) for how in ((), ("--remat", "selective")))
    assert selective["flops"] - kept["flops"] == 2 * 2 * 64 * (2 * 64 * 64 + 64 * 96)
    assert selective["peak"] < kept["peak"]


def test_a_text_says_what_does_not_fit_and_what_to_try(
    capsys: pytest.CaptureFixture[str], config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(HARDWARE, "h200", HARDWARE["h200"]._replace(nbytes=100_000))
    lines = plan(capsys, "--config", config, "--mesh", "fsdp=2", "--length", "32", "--hardware", "h200").splitlines()
    assert any("TOO MUCH" in line for line in lines) and any("to try    --remat" in line for line in lines)
    rates = Path(config) / "rates.json"
    rates.write_text(json.dumps(HARDWARE["a100-sxm"].rates(fzero.VirtualMesh(fsdp=2))._asdict()))
    measured = plan(capsys, "--config", config, "--mesh", "fsdp=2", "--length", "32", "--rates", str(rates))
    assert f"rates     {rates}" in measured


def test_stages_beside_parts_of_layers_are_the_step_of_a_user(capsys: pytest.CaptureFixture[str], config: str) -> None:
    """A step of `fzero.hf.parallel`, as docs/hf_parallel.md has it. On "meta", as on GPUs, sums travel in float32."""
    mesh, optimizer = fzero.VirtualMesh(fsdp=2, pp=2, tp=2), fzero.optim.adamw(1e-4)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config), dtype=torch.float32).train()
        tokens = torch.zeros(8, 32, dtype=torch.int64)
    params, apply = fzero.hf.parallel(model, mesh, pp="pp", num_microbatches=4)

    def train_step(params: Any, state: Any, tokens: torch.Tensor) -> Any:
        loss_of = fzero.precision(torch.bfloat16, reduce=torch.float32, output=torch.float32)(
            lambda params: apply(params, input_ids=tokens, labels=tokens, use_cache=False).loss
        )
        loss, grads = fzero.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(grads, state, params)
        return fzero.optim.apply_updates(params, updates), state, loss

    step = fzero.simulate(train_step, mesh, data=("fsdp",))
    step.schedule_for(HARDWARE["h100-sxm"].rates(mesh))
    program = step.trace(params, optimizer.init(params), tokens)
    given = ("--config", config, "--length", "32", "--batch", "4", "--microbatches", "4", "--json")
    found = json.loads(plan(capsys, *given, "--mesh", "fsdp=2,pp=2,tp=2"))
    assert found["peak"] == program.memory().peak and found["nodes"] == len(program.graph.nodes)
    assert found["flops"] == sum(count_flops(program).values()) and found["tokens"] == 8 * 32
    assert sum(found["moved"].values()) == sum(x.nbytes for x in program.comm() if mesh.size(x.axis) > 1)
    assert found["moved"].keys() == {"fsdp", "pp", "tp", "pp+tp"}


def test_parts_of_a_sequence_and_stages_are_planned(capsys: pytest.CaptureFixture[str], config: str) -> None:
    """Along both ranks share rows, and along "sp" they have slices of state. A rank of two has half of the products;
    of three ticks of a pipeline two are used. Parts of a sequence have no mask, so that their attention counts 33 of 64
    pairs. Behind stages each rank has half of the words of the head. A stage is computed again but for its
    last product, which nothing reads."""
    given = ("--config", config, "--length", "32", "--batch", "4", "--json", "--mesh")
    alone, parts = (json.loads(plan(capsys, *given, mesh)) for mesh in ("fsdp=1", "sp=2"))
    products = 3 * 2 * 4 * 32 * (2 * (4 * 64 * 64 + 3 * 64 * 96) + 64 * 128)
    assert parts["tokens"] == alone["tokens"] == 4 * 32
    assert parts["flops"] == products / 2 + (alone["flops"] - products) / 2 * 33 / 64
    assert parts["peak"] < alone["peak"] and set(parts["moved"]) == {"sp", "fsdp+sp"}
    stages = json.loads(plan(capsys, *given, "pp=2", "--microbatches", "2"))
    head = 3 * 2 * 4 * 32 * 64 * 128
    again = 2 * 2 * 4 * 32 * (4 * 64 * 64 + 2 * 64 * 96 + 2 * 32 * 64)
    layers = alone["flops"] - head + again
    assert stages["tokens"] == 4 * 32 and stages["flops"] == layers / 2 * 3 / 2 + head / 2
    host = json.loads(plan(capsys, *given, "fsdp=1", "--offload"))
    assert 8 * host["parameters"] < host["host"] < 16 * host["parameters"] and host["peak"] < alone["peak"]


def test_the_cheapest_changes_that_fit_are_planned(
    capsys: pytest.CaptureFixture[str], config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (Path(config) / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 1}))
    given = ("--config", config, "--mesh", "fsdp=1", "--length", "64", "--batch", "2", "--hardware", "h200")
    peak = json.loads(plan(capsys, *given, "--json"))["peak"]
    monkeypatch.setitem(HARDWARE, "h200", HARDWARE["h200"]._replace(nbytes=peak - 1))
    lines = [line.removeprefix("fits      ") for line in plan(capsys, *given, "--fit").splitlines() if "fits  " in line]
    assert len(lines) == 3
    ways, rates = zip(*(line.split(": ") for line in lines))
    numbers = [int(rate.split(", ")[1].split(" tokens")[0].replace(",", "")) for rate in rates]
    assert numbers == sorted(numbers, reverse=True)
    found = json.loads(plan(capsys, *given, "--json", *ways[0].split()))  # what the command says of these options
    assert found["fits"] and round(found["tokens_a_second"]) == numbers[0]


def test_changes_of_a_step_are_listed_singly_and_then_together() -> None:
    listed = [(n, str(way)) for n, way in list_ways(fzero.VirtualMesh(fsdp=8), Recipe(2, 8192, stage=1), 1 << 30)]
    assert listed[:9] == [
        (1, "--stage 3"), (1, "--remat selective"), (1, "--microbatches 2"), (1, "--remat layers"), (1, "--offload"),
        (1, "--mesh fsdp=4,tp=2 --batch 4"), (1, "--mesh fsdp=4,sp=2 --batch 4"),
        (1, "--mesh pp=2,fsdp=4 --batch 4 --microbatches 4"), (1, "--mesh fsdp=16"),
    ]  # fmt: skip
    assert listed[9] == (2, "--stage 3 --microbatches 2") and len(dict.fromkeys(listed)) == len(listed)
    assert listed[-1] == (5, "--mesh fsdp=16 --stage 3 --microbatches 2 --remat layers --offload")
    shared = list_ways(fzero.VirtualMesh(fsdp=4, tp=2), Recipe(2, 8192, stage=1), 1 << 30)
    assert [str(way) for _, way in shared][:2] == ["--stage 3", "--sequence-parallel"]
    staged = list_ways(fzero.VirtualMesh(fsdp=4, tp=2), Recipe(2, 8192), 1 << 30)
    assert "--mesh pp=2,fsdp=2,tp=2 --batch 4 --microbatches 4" in [str(way) for _, way in staged]


def test_a_page_is_written_beside_the_text(capsys: pytest.CaptureFixture[str], config: str) -> None:
    given, page = ("--config", config, "--mesh", "fsdp=2", "--length", "32"), Path(config) / "plan.html"
    assert plan(capsys, *given) == plan(capsys, *given, "--html", str(page))
    assert 'class="limit"' in page.read_text(), "the memory of the device is not drawn"
    assert "is not written" in plan(capsys, *given, "--html", str(page / "inside"))
    assert plan(capsys, *given, "--html", str(page), "--batch", "2", "--beside", "fsdp=2,tp=2")[:7] == "86,336 "
    beside = page.read_text()
    assert "A: train_step on VirtualMesh(fsdp=2)" in beside and "B: train_step on VirtualMesh(fsdp=2, tp=2)" in beside
    assert 'class="limit"' in beside
    assert "give --html FILE too" in plan(capsys, *given, "--beside", "fsdp=4")
    assert "has 4 groups" in plan(capsys, *given, "--html", str(page), "--beside", "fsdp=4")


def test_a_step_of_a_script_is_planned(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of docs/plan.md, smaller: without transformers, beside another mesh."""
    page = (Path(__file__).parents[1] / "docs" / "plan.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    file = tmp_path / "train.py"
    file.write_text(
        code.replace("50304", "64").replace("1024", "16").replace("1025", "17") + "\nnothing = lambda mesh: 3\n"
    )
    monkeypatch.setitem(sys.modules, "fzero.planner.forecast", None)
    given = ("--script", f"{file}:plan", "--mesh", "fsdp=2")
    found = json.loads(plan(capsys, *given, "--json", "--html", str(tmp_path / "a.html"), "--beside", "fsdp=4"))
    assert found["parameters"] == 64 * 16 + 16 * 64 + 64 and found["tokens"] == 2 * 8 * 16
    assert found["state"] == pytest.approx(12 * found["parameters"] / 2, rel=0.05)
    assert "VirtualMesh(fsdp=4)" in (tmp_path / "a.html").read_text()
    for options, said in (
        ((*given, "--batch", "2"), "--batch: is for --config"),
        (("--script", f"{file}:nothing", "--mesh", "fsdp=2"), "returns 3; give a function of a mesh"),
        (("--script", f"{file}:other", "--mesh", "fsdp=2"), "has no function 'other'"),
        (("--script", "train.py", "--mesh", "fsdp=2"), "has no file"),
        ((*given[:2], "--sweep", "2"), "--script: makes a step of one mesh"),
    ):
        assert said in plan(capsys, *options), said


SCRIPT = """
from __future__ import annotations
from dataclasses import dataclass
import fzero, torch

@dataclass
class Config:
    width: int = 8

def plan(mesh, tokens=4):
    from beside_the_script import RATE
    params = fzero.partition({"w": torch.ones(Config().width, 8)}, mesh)
    return fzero.grad(lambda params, x: RATE * (x @ params["w"]).square().mean()), (params, torch.ones(4, 8)), tokens

def many(mesh):
    return plan(mesh, "many")
"""


def test_a_script_may_hold_dataclasses_and_import_late(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, text = tmp_path / "train.py", tmp_path / "train.txt"
    for each in (file, text):
        each.write_text(SCRIPT)
    (tmp_path / "beside_the_script.py").write_text("RATE = 2.0")
    before = list(sys.path)
    assert "64 parameters on 2 x" in plan(capsys, "--script", f"{file}:plan", "--mesh", "fsdp=2")
    assert sys.path == before
    said = plan(capsys, "--script", f"{file}:many", "--mesh", "fsdp=2")
    assert "returns 'many' as the tokens of a step; give a function" in said
    assert "which is no file of Python" in plan(capsys, "--script", f"{text}:plan", "--mesh", "fsdp=2")


def test_a_sweep_plans_each_mesh_of_its_ranks_with_the_same_rows(
    capsys: pytest.CaptureFixture[str], config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (Path(config) / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 1}))
    monkeypatch.setitem(HARDWARE, "h200", HARDWARE["h200"]._replace(host=2))
    heard: list[Any] = []
    with fzero.metrics.progress(heard.append, every=0.0):
        out = plan(capsys, "--config", config, "--length", "8", "--hardware", "h200", "--json", "--sweep", "2")
    rows = json.loads(out)
    planned = [(each.done, each.total, each.at) for each in heard if each.work == "planning"]
    assert planned == [(1, 3, "fsdp=2"), (2, 3, "fsdp=1,tp=2"), (3, 3, "fsdp=1,tp=2")]
    tried = [(*row["mesh"].items(), row["microbatches"]) for row in rows]
    assert sorted(tried) == [(("fsdp", 1), ("tp", 2), 1), (("fsdp", 1), ("tp", 2), 2), (("fsdp", 2), 1)]
    rates = [row["tokens_a_second"] for row in rows]
    assert rates == sorted(rates, reverse=True) and all(row["fits"] and row["tokens"] == 2 * 8 for row in rows)
    assert all(("fsdp" in row["moved"]) == (row["mesh"]["fsdp"] > 1) for row in rows), "one rank sends nothing"


def test_a_sweep_says_what_does_not_fit(
    capsys: pytest.CaptureFixture[str], config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (Path(config) / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 1}))
    given = ("--config", config, "--length", "8", "--sweep", "1", "--hardware", "h200")
    fits = plan(capsys, *given).splitlines()
    assert fits[0].startswith("1 x h200 with 131.3 GiB") and fits[2].startswith("fsdp=1 ") and len(fits) == 3
    told, error, _ = plan(capsys, *given, "--memory", "1KiB").splitlines()
    assert "least peak" in told and "; " not in told
    assert error.startswith("--sweep 1: plans no mesh; the first, fsdp=1: memory: is 1.0 KiB") and "; give at" in error
    monkeypatch.setitem(HARDWARE, "h200", HARDWARE["h200"]._replace(nbytes=100_000))
    (row,) = json.loads(plan(capsys, *given, "--memory", "1GiB", "--json"))
    assert row["problem"] == "needs more memory" and not row["fits"], "a budget above the device's memory"
    for option in ("--html", "--beside"):
        assert f"{option}: is a page" in plan(capsys, *given, option, "fsdp=1")


def test_a_mesh_of_a_sweep_takes_the_rates_of_its_axes(tmp_path: Path) -> None:
    path, measured = tmp_path / "rates.json", HARDWARE["h200"].rates(fzero.VirtualMesh(fsdp=2, tp=2))
    path.write_text(json.dumps(measured._asdict()))
    rates_of = choose_rates(argparse.Namespace(rates=path, hardware="h200"))
    assert rates_of(fzero.VirtualMesh(fsdp=2, tp=2)) == measured
    assert rates_of(fzero.VirtualMesh(replica=2, fsdp=2)) == measured._replace(axes=measured.axes[:1])
    path.write_text(json.dumps(measured._replace(axes=(("cp", 1e9),))._asdict()))
    with pytest.raises(
        fzero.FzeroError, match=r"has rates of \['cp'\], which are no axes; give those of pp, replica, fsdp"
    ):
        choose_rates(argparse.Namespace(rates=path, hardware="h200"))


def test_models_with_experts_are_known_by_each_name_of_their_number(config: str) -> None:
    assert not has_experts(Path(config))
    (Path(config) / "config.json").write_text(json.dumps({"model_type": "aria_text", "moe_num_experts": 4}))
    assert has_experts(Path(config))


def test_a_sweep_keeps_model_axes_inside_of_a_host() -> None:
    def names(*given: Any) -> list[str]:
        return [str(Candidate(mesh, 1)) for mesh in list_meshes(*given)]

    assert names(6, 4) == ["fsdp=6", "fsdp=3,tp=2"]
    assert names(8, 2, ("tp", "ep")) == ["fsdp=8", "replica=4,fsdp=2", "fsdp=4,ep=2", "fsdp=4,tp=2"]
    assert names(4, 4, ("pp", "sp", "tp")) == [
        "fsdp=4", "fsdp=2,sp=2", "fsdp=1,sp=4", "fsdp=2,tp=2", "fsdp=1,tp=2,sp=2", "fsdp=1,tp=4", "pp=2,fsdp=2",
        "pp=2,fsdp=1,tp=2", "pp=4,fsdp=1",
    ]  # fmt: skip


def test_the_fastest_that_fits_is_first() -> None:
    slow = Forecast(1, 1, 1, 0, 10, [], {}, 2.0, 2.0, 0, 1, ())
    fits = Candidate(fzero.VirtualMesh(fsdp=1), 1, slow)
    fast = fits._replace(found=slow._replace(seconds=1.0))
    large = fast._replace(found=slow._replace(seconds=0.5, peak=20), problem="needs more memory")
    refused = fits._replace(found=None, problem="has 4 heads")
    assert rank_candidates([refused, large, fits, fast]) == [fast, fits, large, refused]


def test_an_axis_inside_of_a_host_is_as_fast_as_the_host() -> None:
    hardware = HARDWARE["h100-sxm"]
    axes = dict(hardware.rates(fzero.VirtualMesh(replica=2, fsdp=4, tp=4)).axes)
    assert axes == {"replica": ATTAINED * 50e9, "fsdp": ATTAINED * 50e9, "tp": ATTAINED * 450e9}
    assert dict(hardware.rates(fzero.VirtualMesh(fsdp=8)).axes) == {"fsdp": ATTAINED * 450e9}
    assert hardware.rates(fzero.VirtualMesh(fsdp=8)).flops == ATTAINED * 989e12


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--mesh", "eight"), "--mesh: is 'eight'; write axes"),
        (("--mesh", "fsdp=2,fsdp=2"), "each axis once"),
        (("--mesh", "fsdp=2,cp=2"), "has the axis 'cp'; a plan knows fsdp"),
        (("--mesh", "fsdp=1,tp=3"), "has 4 heads, to be split over 3 ranks"),
        (("--mesh", "tp=2,pp=2"), "pp='pp': is behind 'tp'"),
        (("--mesh", "pp=4"), "has 2 layers, for stages on 4 ranks along 'pp'; take a mesh with 1, 2 ranks"),
        (("--mesh", "pp=2", "--microbatches", "2"), "batch: has 1 rows, for 2 microbatches; give num_microbatches one"),
        (("--mesh", "sp=3"), "sp"),
        (("--mesh", "sp=2", "--sequence-parallel"), "--sequence-parallel: is given, and VirtualMesh("),
        (("--mesh", "pp=2,tp=2", "--sequence-parallel"), "pp='pp': is given beside sp, and stages do not have it"),
        (("--mesh", "fsdp=2", "--compute", "float8"), "--compute: is float8, and no layer of transformers"),
        (("--mesh", "fsdp=2", "--axes", "tp"), "--axes: is of --sweep, and --mesh names its own axes"),
        (("--sweep", "2", "--fit"), "--fit: plans changes of one mesh, and --sweep plans many"),
        (("--mesh", "fsdp=2", "--fit", "--memory", "1GiB"), "--fit: tries a budget among its changes"),
        (("--mesh", "fsdp=2", "--fit", "--json"), "--fit: says its changes as text, and --json prints none"),
        (("--sweep", "2", "--axes", "tp,fsdp"), "--axes: has ['fsdp'], along which ranks share no examples"),
        (("--mesh", "fsdp=2", "--memory", "much"), "--memory: "),
        (("--mesh", "fsdp=2", "--memory", "1KiB"), "least peak"),
        (("--mesh", "fsdp=2", "--rates", "/dev/null"), "/dev/null: has no rates"),
        (("--mesh", "fsdp=2", "--config", "/nowhere"), "is not there"),
        (("--sweep", "1", "--microbatches", "3"), "fsdp=1: accumulate: batch: has 1 rows, which do not divide into 3"),
    ],
)
def test_what_cannot_be_planned_is_named(
    capsys: pytest.CaptureFixture[str], config: str, options: tuple[str, ...], problem: str
) -> None:
    given = options if "--config" in options else ("--config", config, *options)
    assert problem in plan(capsys, *given, "--length", "16")
    assert torch.get_default_device().type == "cpu"


def test_a_wrong_option_of_a_sweep_is_named_once(capsys: pytest.CaptureFixture[str], config: str) -> None:
    line, _ = plan(capsys, "--config", config, "--sweep", "8", "--rates", "/nofile").splitlines()
    assert line.startswith("/nofile: has no rates") and line.endswith(
        "; write json.dumps(step.calibrate(...)._asdict()) to it"
    )
