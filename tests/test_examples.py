"""The examples: what the corpus, the bigram model, the meter and the GPT promise, and short runs of all the others.

The small examples check themselves: each asserts at its end what it shows.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import math
import os
import re
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import Outcome, run_cases, run_script, values
from torch.distributed.device_mesh import DeviceMesh

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

import bf16_accumulate  # noqa: E402
import bigram  # noqa: E402
import corpus  # noqa: E402
import distill  # noqa: E402
import fp16_overflow  # noqa: E402
import gan  # noqa: E402
import lora  # noqa: E402
import measure  # noqa: E402
import muon_vs_adamw  # noqa: E402
import qlora  # noqa: E402
import report  # noqa: E402
import virtual_ranks  # noqa: E402
from corpus import Cut  # noqa: E402
from gpt import GPT, GPTConfig  # noqa: E402

TINY = GPTConfig(vocab=11, seq=8, dim=16, layers=2, heads=2)
TEXT = torch.arange(100, dtype=torch.uint8)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Forty files whose text is their own name, among files that do not belong."""
    for name in [*(f"pkg{i % 3}/m{i}.py" for i in range(40)), "test/t.py", "site-packages/s.py", "pkg0/data.txt"]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"<{name}>")
    return tmp_path


def files(text: torch.Tensor) -> set[str]:
    return set(bytes(text.tolist()).decode().strip("<>").split("><"))


def test_split_is_disjoint_and_covers_the_library(library: Path) -> None:
    train, heldout = map(files, corpus.read(library))
    assert train.isdisjoint(heldout) and heldout
    assert train | heldout == {f"pkg{i % 3}/m{i}.py" for i in range(40)} == set(corpus.names(library))


def test_split_depends_on_names_alone(library: Path) -> None:
    first = corpus.read(library)
    (library / "pkg0" / "new.py").write_text("<pkg0/new.py>")
    second = corpus.read(library)
    assert files(first.heldout) <= files(second.heldout) and files(first.train) <= files(second.train)


def test_the_standard_library_is_large_and_a_tenth_is_held_out() -> None:
    text = corpus.stdlib()
    total = len(text.train) + len(text.heldout)
    assert total > 5_000_000 and 0.03 < len(text.heldout) / total < 0.25


def test_batches_depend_on_seed_and_step_alone() -> None:
    def draw(seed: int, step: int) -> list[list[int]]:
        return corpus.train_batch(TEXT, Cut(4, 5), seed=seed, step=step)["inputs"].tolist()

    assert draw(0, 1) == draw(0, 1)
    assert len({str(draw(seed, step)) for seed in range(3) for step in range(3)}) == 9


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_together_have_the_batch_of_one_process(world: int) -> None:
    whole = corpus.train_batch(TEXT, Cut(4, 5), seed=3, step=7)
    parts = [corpus.train_batch(TEXT, Cut(4, 5, rank, world), seed=3, step=7) for rank in range(world)]
    for key in whole:
        assert torch.equal(torch.cat([part[key] for part in parts]), whole[key])


def test_windows_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="4 windows do not divide among 3 ranks"):
        corpus.train_batch(TEXT, Cut(4, 5, 0, 3), seed=0, step=0)


def test_targets_are_the_next_bytes() -> None:
    batch = corpus.windows(TEXT, torch.tensor([0, 90]), Cut(2, 3))
    assert batch["inputs"].tolist() == [[0, 1, 2], [90, 91, 92]]
    assert batch["targets"].tolist() == [[1, 2, 3], [91, 92, 93]]


def test_heldout_windows_lie_evenly_and_inside() -> None:
    batches = list(corpus.heldout_batches(TEXT, Cut(2, 9), 3))
    assert torch.cat([batch["inputs"][:, 0] for batch in batches]).tolist() == [0, 15, 30, 45, 60, 75]


def test_bigram_by_hand() -> None:
    text = torch.tensor([0, 1, 0, 1, 1], dtype=torch.uint8)  # pairs 01 10 01 11; with one more each of 00 01 10 11
    model = bigram.count(text, vocab=2)
    assert model.exp2().tolist() == [pytest.approx([1 / 4, 3 / 4]), pytest.approx([1 / 2, 1 / 2])]
    batches = [{"inputs": torch.tensor([[0, 1]]), "targets": torch.tensor([[1, 0]])}]  # 3/4, then 1/2
    assert bigram.bits_per_byte(model, batches) == pytest.approx((math.log2(4 / 3) + 1) / 2)


def test_gpt_shape_and_names() -> None:
    model = GPT(TINY)
    assert model(torch.zeros(3, 5, dtype=torch.long)).shape == (3, 5, 11)
    assert [name for name, _ in model.named_children()] == ["wte", "wpe", "blocks", "norm", "head"]


def test_gpt_is_causal() -> None:
    model, tokens = GPT(TINY), torch.arange(8)[None]
    changed = tokens.clone()
    changed[0, 5] = 10
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :5], after[0, :5]) and not torch.equal(before[0, 5:], after[0, 5:])


def test_gpt_starts_near_the_uniform_distribution() -> None:
    torch.manual_seed(0)
    logits = GPT(TINY)(torch.randint(11, (4, 8)))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.randint(11, (32,)))
    assert loss.item() == pytest.approx(math.log(11), rel=0.05)  # logits have a standard deviation near 0.02 * sqrt(16)


def test_gpt_of_benchmark_size_m() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab=8192, seq=256, dim=768, layers=8, heads=12))
    assert sum(parameter.numel() for parameter in model.parameters()) == 69_484_032


def test_nbytes_counts_each_storage_once() -> None:
    flat = torch.zeros(100)
    assert measure.nbytes({"a": flat, "b": (flat[:10], flat[50:]), "c": torch.zeros(3, dtype=torch.int64)}) == 424


@pytest.mark.skipif(measure.malloc_in_use() is None, reason="needs mallinfo2 of glibc 2.33")
def test_measure_sees_a_peak_that_is_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    in_use, samples = measure.malloc_in_use(), list[int]()

    def sampled() -> int:
        samples.append(in_use())
        return samples[-1]

    def run() -> None:
        _held = torch.ones(5_000_000)
        before = len(samples)
        while len(samples) < before + 2:  # the first may have begun without the tensor
            time.sleep(0.001)

    monkeypatch.setattr(measure, "malloc_in_use", lambda: sampled)
    peak = measure.measure(run, torch.ones(1000), torch.device("cpu")).peak
    assert peak == pytest.approx(20_004_000, rel=0.01)  # malloc rounds to pages, python takes a little


@pytest.mark.parametrize(
    ("nbytes", "text"), [(None, "-"), (8, "8 B"), (1536, "1.5 KiB"), (3 << 20, "3.0 MiB"), (5 << 40, "5120.0 GiB")]
)
def test_sizes_read_well(nbytes: int | None, text: str) -> None:
    assert report.size(nbytes) == text


def test_a_rank_sends_what_the_others_lack() -> None:
    ops = ["all_gather", "reduce_scatter", "all_reduce"]
    comm = [SimpleNamespace(op=op, nbytes=400) for op in ops]
    assert report.sent_nbytes(comm, world=4) == 300 + 300 + 600


def run_main(flags: str = "", ranks: int | None = None) -> str:
    """Standard output of a tiny run of the main job."""
    sizes = "--layers 1 --dim 32 --heads 2 --seq 16 --batch 4 --steps 12 --heldout 2 --lr 1e-2"
    return run_script(ROOT / "examples" / "train_bytes.py", *f"{sizes} {flags}".split(), ranks=ranks)


def bits_per_byte(output: str) -> list[float]:
    """The GPT's and the bigram model's."""
    line = next(line for line in output.splitlines() if "bits per byte" in line)
    return [float(word) for word in line.split()[-2:]]


def test_main_job_learns_the_same_on_two_ranks_and_in_one_process() -> None:
    """With the variables of torchrun; test_docs.py has a script that torchrun starts itself."""
    two = run_main("--stage 3", ranks=2)
    assert "all-gather" in two and "peak memory" in two
    assert bits_per_byte(run_main()) == pytest.approx(bits_per_byte(two), abs=2e-3)  # printed to 3 digits
    assert bits_per_byte(two)[0] < 7.5  # a uniform guess has 8


def test_the_wrong_step_on_virtual_ranks_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    virtual_ranks.main()
    wrong, right = capsys.readouterr().out.splitlines()
    assert re.match(r"wrong step: 0\.v, step 1, rank 0: element 0 is [\d.-]+ sharded and [\d.-]+ unsharded", wrong)
    assert "'0.w': '" in right
    assert len((ROOT / "examples" / "virtual_ranks.py").read_text().splitlines()) < 40


# the small examples, on two ranks with few steps

SMALL = {
    bf16_accumulate: 8, distill: 12, fp16_overflow: 12, gan: 150, lora: 16, muon_vs_adamw: 20, qlora: 16,
}  # fmt: skip
"""Example -> steps after which what it asserts holds."""


def train(mesh: DeviceMesh, name: str, steps: int, folder: Path) -> tuple[str, list[str]]:
    """What an example prints, and the files that it writes."""
    os.chdir(folder)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        sys.modules[name].main(mesh, steps)
    return printed.getvalue(), [path.name for path in folder.iterdir()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    """Of each small example: one launch of two ranks serves all."""
    names = {module.__name__: steps for module, steps in SMALL.items()}
    folders = {name: tmp_path_factory.mktemp(name) for name in names}
    cases = {
        name: functools.partial(train, name=name, steps=steps, folder=folders[name]) for name, steps in names.items()
    }
    return run_cases(2, cases)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "bf16_accumulate",
            r"loss 5\.\d+ -> [\d.]+ in 8 steps of 4 microbatches\nmoves all_gather in torch.bfloat16, ",
        ),
        ("distill", r"teacher: loss .*\nstudent: divergence from the teacher "),
        ("fp16_overflow", r"step 3: overflow, skipped; scale 16384 -> 16384\nstep 6: .*; scale 16384 -> 8192\nloss "),
        ("gan", r"step 0: points are 1\.\d+ from the ring\n(.*\n)*at the end: 0\.\d+ "),
        ("lora", r"trained 9,472 of 146,432 parameters: loss "),
        ("qlora", r"585,728 bytes held as 191,488: loss 5\.\d+ -> 3\.\d+\n"),
        ("muon_vs_adamw", r"steps +Muon +AdamW\n +0 - 9 .*\n +10 - 19 "),
    ],
)
def test_an_example_shows_what_it_says(trained: dict[str, list[Outcome]], name: str, said: str) -> None:
    (printed, _), (other, _) = values(trained[name])
    assert re.match(said, printed), printed
    assert other == "", "ranks other than 0 are silent"


def test_muons_losses_are_plotted_or_the_way_to_a_plot_is_said(trained: dict[str, list[Outcome]]) -> None:
    printed, files = values(trained["muon_vs_adamw"])[0]
    if importlib.util.find_spec("matplotlib"):
        assert files == ["muon_vs_adamw.png"] and "wrote muon_vs_adamw.png" in printed
    else:
        assert files == [] and "matplotlib is not installed; pip install" in printed


def test_a_small_example_runs_in_one_process() -> None:
    printed = run_script(ROOT / "examples" / "lora.py", "--steps", "16")
    assert printed.startswith("trained 9,472 of 146,432 parameters: loss ")


@pytest.mark.parametrize("name", [module.__name__ for module in SMALL])
def test_a_small_example_is_short(name: str) -> None:
    assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) < 150


def test_run_clm_has_the_same_losses_with_both_trainers_also_when_it_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")  # without which transformers has no Trainer
    import run_clm

    def run(trainer: str, folder: str, flags: str = "") -> dict[str, Any]:
        named = f"--trainer {trainer} --output_dir {tmp_path / folder} {flags}"
        few = "--max_steps 4 --save_steps 2 --logging_steps 1 --per_device_train_batch_size 2 --block_size 16"
        few += " --config_overrides n_embd=16,n_layer=1,n_head=2,resid_pdrop=0.0,embd_pdrop=0.0,attn_pdrop=0.0"
        few += "  --max_train_samples 24 --max_eval_samples 5"
        few += " --do_train --do_eval"
        quiet = "--use_cpu --dataloader_pin_memory false --report_to none --disable_tqdm true --learning_rate 3e-3"
        return run_clm.main([*named.split(), *few.split(), *quiet.split()])

    def logs(outcome: dict[str, Any]) -> list[tuple[float, ...]]:
        updates = [entry for entry in outcome["log"] if "loss" in entry]
        return [tuple(entry[name] for name in ("step", "loss", "grad_norm", "learning_rate")) for entry in updates]

    expected, got = run("plain", "theirs", "--prompt def"), run("fzero", "ours", "--prompt def")
    shutil.rmtree(tmp_path / "ours" / "checkpoint-4")
    resumed = run("fzero", "ours", "--resume_from_checkpoint true")
    for outcome in (got, resumed):
        for ours, theirs in zip(logs(outcome), logs(expected), strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)
        for name in ("eval_loss", "eval_accuracy", "perplexity", "train_samples", "eval_samples"):
            assert outcome[name] == pytest.approx(expected[name], rel=1e-5), name
    assert got["text"] == expected["text"] and len(expected["text"]) > len("def")
    assert got["train_loss"] == pytest.approx(expected["train_loss"], abs=1e-5)
    written = [{path.name for path in (tmp_path / folder).iterdir()} for folder in ("ours", "theirs")]
    assert written[0] == written[1] >= {"README.md", "all_results.json", "model.safetensors", "tokenizer_config.json"}
