"""Files of the Trainer: what is saved is read, also where a process was killed while it saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")  # without which transformers has no Trainer

import torch
import transformers
from hf_models import make_arguments, make_dataset, make_model, read_logs

import fzero.hf
from fzero import FzeroError, lower
from fzero.checkpoint import export_hf
from fzero.hf import files


def make_trainer(folder: Path, **changed: Any) -> Any:
    return fzero.hf.Trainer(make_model(), make_arguments(folder, **changed), train_dataset=make_dataset())


def test_what_is_saved_is_read_by_from_pretrained_and_a_later_save_replaces_it(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    (tmp_path / "saved.weights").mkdir()  # of a save that was killed
    trainer = make_trainer(tmp_path)
    trainer.save_model(str(folder))
    trainer.save_model(str(folder))
    assert not (tmp_path / "saved.weights").exists()
    read = transformers.GPT2LMHeadModel.from_pretrained(folder)
    for (name, ours), (_, theirs) in zip(read.named_parameters(), make_model().named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    transformers.Trainer(make_model(), trainer.args).save_model(str(tmp_path / "theirs"))
    for file in (tmp_path / "theirs").iterdir():
        assert (folder / file.name).read_bytes() == file.read_bytes(), file.name


class Killed(BaseException):
    """The end of a process, which no code catches."""


SIZES = {"one file": "1MB", "several files": "5KB"}


@pytest.mark.parametrize("new", SIZES)
@pytest.mark.parametrize("old", SIZES)
def test_a_save_killed_anywhere_leaves_one_model_or_a_folder_that_is_refused(
    old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, begun, seen = make_model(), list[int](), set[float]()

    def write(folder: Path, value: float, size: str) -> None:
        params = fzero.tree.map(lambda x: torch.full_like(x, value), lower(model)[0])
        export_hf(folder, params, model, max_shard_size=SIZES[size])

    def count(act: Any) -> Any:
        def counted(*args: Any, **named: Any) -> Any:
            begun.append(1)
            if len(begun) > death:
                raise Killed
            return act(*args, **named)

        return counted

    for death in range(40):
        folder, beside = tmp_path / f"{death}", tmp_path / f"{death}.weights"
        write(folder, 1.0, old)
        write(beside, 2.0, new)
        begun.clear()
        with monkeypatch.context() as patched:
            for name in ("replace", "unlink", "rmdir"):
                patched.setattr(Path, name, count(getattr(Path, name)))
            try:
                files.move_model(beside, folder)
                is_done = True
            except Killed:
                is_done = False
        try:
            read = transformers.AutoModelForCausalLM.from_pretrained(folder)
        except (OSError, ValueError) as error:
            assert "config.json" in str(error)
            assert not is_done
        else:
            values = {float(value) for x in map(torch.detach, read.parameters()) for value in (x.min(), x.max())}
            assert len(values) == 1 and (values == {2.0} or not is_done)
            seen |= values
        if is_done:
            break
    assert is_done and seen == {1.0, 2.0}


def test_a_checkpoint_whose_save_did_not_end_is_refused_by_name(tmp_path: Path) -> None:
    changed = {"max_steps": 1, "gradient_accumulation_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer(tmp_path, **changed)
    trainer.train()
    trainer.save_model(str(tmp_path / "checkpoint-1"), _internal_call=True)  # and no further: as a killed one
    with pytest.raises(FzeroError, match=r"checkpoint-1: has no trainer_state\.json.*resume from another"):
        trainer.train(resume_from_checkpoint=True)
    (tmp_path / "checkpoint-1" / "config.json").unlink()
    with pytest.raises(FzeroError, match=r"checkpoint-1: has no config\.json"):
        trainer.train(resume_from_checkpoint=True)


def test_the_newest_complete_checkpoint_is_resumed_and_others_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changed = {"max_steps": 3, "gradient_accumulation_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer(tmp_path, **changed)
    trainer.train()
    logs = read_logs(trainer)
    (tmp_path / "checkpoint-10").mkdir()  # of a save that was killed at once
    (tmp_path / "checkpoint-3" / "trainer_state.json").unlink()
    trainer = make_trainer(tmp_path, **changed)
    with caplog.at_level("WARNING", "fzero"):
        trainer.train(resume_from_checkpoint=True)
    assert read_logs(trainer)[-1] == pytest.approx(logs[-1]) and trainer.state.global_step == 3
    told = [record.getMessage() for record in caplog.records if "is skipped" in record.getMessage()]
    assert (
        len(told) == 2 and "checkpoint-10" in told[0] and "checkpoint-3 is skipped: it has no trainer_state" in told[1]
    )


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(FzeroError, match=r"taken: rank 0 could not write files: FileExistsError"):
        make_trainer(tmp_path).save_model(str(tmp_path / "taken"))
