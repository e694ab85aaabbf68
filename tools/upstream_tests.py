"""The trainer tests of TRL, peft and transformers, with the trainers of `fzero.hf` in the place of theirs.

    python tools/upstream_tests.py --trl FOLDER --peft FOLDER --transformers FOLDER --write

A folder is a checkout, or a source distribution, with `tests`. Nothing is downloaded: models of the Hub that the tests
name are made here, tiny, with a tokenizer of bytes, and data sets by the checkout's own scripts. First the tests run as
they are. Those that pass need no network, no GPU and no file of the Hub; they run again with our classes
(`tools/upstream_plugin.py`). `--write` writes docs/upstream_tests.md: how many pass, and each that does not with its
reason. Outcomes are kept in build/, and only tests without one run. Rows of files that have none stay.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import tiny_models
import torch
import transformers

ROOT = Path(__file__).parents[1]
BUILD, PAGE = ROOT / "build" / "upstream", ROOT / "docs" / "upstream_tests.md"
SECONDS = 600
"""A test that takes longer has no outcome."""
FILES = {
    "trl": tuple(f"tests/test_{name}_trainer.py" for name in ("reward", "dpo", "kto", "sft", "grpo", "rloo")),
    "peft": ("tests/test_*.py",),
    "transformers": ("tests/trainer/test_*.py",),
}
CALLS = re.compile(r"[Tt]rainer\(")
"""What a test that calls a trainer says."""
NAMED = re.compile(r"[\"']([\w-]+/tiny-(?:random-)?([A-Za-z0-9_]+For(?:CausalLM|SequenceClassification))[\w.-]*)[\"']")
NAMED_OTHERWISE = {
    "hf-internal-testing/tiny-random-gpt2": "GPT2LMHeadModel",
    "peft-internal-testing/tiny-random-GPT2LMHeadModel": "GPT2LMHeadModel",
    "peft-internal-testing/tiny-dummy-qwen2": "Qwen2ForCausalLM",
}
"""Models of the Hub whose names do not say a class as `NAMED` reads it."""
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY, LENGTH = 1024, 2048
REASONS = {
    "has no values: the model was given to": "by design: gives one model to two trainers; construct the model again",
    "requires_grad needs values": "by design: freezes a weight of a Trainer's model; freeze it before",
    "eq needs values": "by design: compares weights of a Trainer's model",
    r"expected=Spent|clone needs values": "by design: reads weights of trainer.ref_model, which are in slices",
    "a hook waits for this parameter's gradient": "refused by name: CPT, whose hook changes gradients",
    r"optim: is '\w+', which is not supported": "refused by name: an optimizer of bitsandbytes",
    "draws from the generator of": "by design: the model draws with Python or numpy; draw with torch",
    "changes this buffer": "by design: the model changes a buffer that is no running statistic",
    "auto_find_batch_size": "refused by name: auto_find_batch_size",
    "target_parameters": "refused by name: adapters by target_parameters",
    "use_reentrant=True trains nothing": "refused by name: use_reentrant=True where no input has a gradient",
    "relative_step": "refused by name: Adafactor with relative_step",
    "True is not false": "freezes the copy of the model that this command shows it; freeze it before",
    "expected call not found": "compares the copy of the model that this command shows it by identity",
}
"""What an error says -> why a test does not pass."""
OF_WORDS = ("test_accelerator_config_from_dict_grad_accum_num_steps", "test_can_resume_training")
"""The tests whose "False is not true" was read: they expect words of an error."""
OTHER_WORDS = "expects the words of an error of transformers; ours, that one or an earlier one, has others"
PAGE_TEXT = """# Tests of TRL, peft and transformers with our trainers

`python tools/upstream_tests.py --trl FOLDER ... --write` makes this page from the tests of checkouts:
{origin}. Installed are {versions}.

The tests run as they are, on one process, with models and data sets of the Hub made by the command. Those that pass
need no network, no GPU and no further package. They run again with the classes of `fzero.hf` in the place of theirs.
In both runs some tests are left out where `--first` (a case of each function), `-k` or time chose: "tests" are those
that ran. A test that looks at `trainer.model` sees a copy with the present values: ours has the structure alone.

| project | file | tests | pass as they are | of these ran with ours | and pass |
|---|---|---|---|---|---|
{lines}

Files that need packages which are not installed are left out. The three tests of test_trainer_seq2seq.py need files of
the Hub. What they do was done by hand with a tiny T5 and a tiny BERT to BERT, with each of the two Seq2SeqTrainers: a
bad GenerationConfig is refused, `num_return_sequences` of 3, 2 and 1 with five beams give as many rows, training with
`predict_with_generate` logs the same losses, norms and metrics to five digits, on one process.
Adapters of peft's tests, which train by hand: [adapters](adapters.md).

Each that does not pass with ours, and why:

| project | test | reason |
|---|---|---|
{failures}
"""


def make_tokenizer(texts: list[str]) -> Any:
    """Tokens are frequent parts of the texts, and bytes. It has a template of chats."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", bos_token="<|im_start|>"
    )
    made.chat_template = TEMPLATE
    return made


def make_model(folder: Path, class_name: str, tokenizer: Any) -> None:
    cls: Any = getattr(transformers, class_name)
    config = tiny_models.shrink(cls.config_class)
    config.vocab_size, config.max_position_embeddings, config.num_labels = VOCABULARY, LENGTH, 1
    config.pad_token_id, config.eos_token_id, config.bos_token_id = (
        tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id,
    )  # fmt: skip
    if getattr(config, "sliding_window", None):
        config.sliding_window = LENGTH
    torch.manual_seed(0)
    cls(config).save_pretrained(folder)


def make_hub(files: list[Path], home: Path) -> None:
    """A cache of the Hub with each model that the files name."""
    scripts = [file for each in {file.parents[1] for file in files} for file in each.glob("scripts/*.py")]
    tokenizer = make_tokenizer([file.read_text() for file in [*files, *scripts]])
    texts = [file.read_text() for file in files]
    named = {found for text in texts for found in NAMED.findall(text)}
    named |= {found for found in NAMED_OTHERWISE.items() if any(found[0] in text for text in texts)}
    for name, class_name in sorted(named):
        made = home / "hub" / f"models--{name.replace('/', '--')}"
        folder = made / "snapshots" / "0"
        if made.exists() or not hasattr(transformers, class_name):
            continue
        try:
            make_model(folder, class_name, tokenizer)
        except Exception as error:
            print(f"{name} is not made: {type(error).__name__} {str(error)[:200]}")
            continue
        tokenizer.save_pretrained(folder)
        (made / "refs").mkdir(parents=True)
        (made / "refs" / "main").write_text("0")


def find_files(project: str, checkout: Path) -> list[Path]:
    """Files with a test that calls a trainer."""
    files = sorted({file for pattern in FILES[project] for file in checkout.glob(pattern)})
    return [file for file in files if CALLS.search(file.read_text())]


def run(checkout: Path, files: list[Path], trainers: str, out: Path, chosen: Path | None, more: list[str]) -> None:
    environment = {
        **os.environ, "UPSTREAM_ROOT": str(checkout), "UPSTREAM_TRAINERS": trainers, "UPSTREAM_OUT": str(out),
        "HF_HOME": str(BUILD / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    if chosen is not None:
        environment["UPSTREAM_CHOSEN"] = str(chosen)
    named = [str(file.relative_to(checkout)) for file in files]
    command = [sys.executable, "-m", "pytest", "-p", "upstream_plugin", "-q", "--tb=short", "--timeout", str(SECONDS)]
    command += ["-o", "addopts=", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    subprocess.run([*command, *named, *more], cwd=checkout, env=environment)


def take(project: str, given: Path) -> Path:
    """A copy of the tests of a checkout, without the library beside them: the installed one counts."""
    made = BUILD / project
    for name in ("tests", "scripts"):
        if (given / name).is_dir():
            shutil.copytree(given / name, made / name, dirs_exist_ok=True)
    (made / "tests" / "__init__.py").touch()  # source distributions lack it
    return made


def read(out: Path) -> dict[str, dict[str, str]]:
    """Test -> its last outcome; an error of a fixture counts as a failure."""
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    found = dict[str, dict[str, str]]()
    for line in lines:
        is_late = line["why"].startswith("Failed: Timeout")
        if (line["when"] == "call" or line["outcome"] != "passed") and not is_late:
            found[line["test"]] = line
    return found


def compare(project: str, given: Path, more: list[str]) -> None:
    checkout = take(project, given)
    files = find_files(project, checkout)
    make_hub(files, BUILD / "home")
    plain, ours = BUILD / f"{project}-plain.jsonl", BUILD / f"{project}-fzero.jsonl"
    run(checkout, files, "plain", plain, None, more)
    passed = {name for name, x in read(plain).items() if x["outcome"] == "passed"}
    chosen = BUILD / "chosen.json"
    chosen.write_text(json.dumps(sorted(passed)))
    run(checkout, files, "fzero", ours, chosen, more)


def classify(name: str, why: str) -> str:
    """The reason for a failure of a test: of `REASONS`, or the error itself."""
    first = " ".join(why.split())
    if name.endswith(OF_WORDS) and "False is not true" in first:
        return OTHER_WORDS
    return next((reason for rule, reason in REASONS.items() if re.search(rule, first)), first[:160])


Rows = dict[tuple[str, str], str]
"""A project, and a file or a test of it -> the row of a table."""


def read_page() -> tuple[Rows, Rows]:
    """The rows of both tables of the page."""
    files, failures = Rows(), Rows()
    for line in PAGE.read_text().splitlines() if PAGE.exists() else []:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] in FILES:
            (files if len(cells) == 6 else failures)[cells[0], cells[1].strip("`")] = line
    return files, failures


def write_page(origin: str) -> str:
    """How many tests pass, and each that does not. Rows of what has no outcome in build/ are those of the page."""
    files, failures = read_page()
    for project in FILES:
        plain, ours = (read(BUILD / f"{project}-{trainers}.jsonl") for trainers in ("plain", "fzero"))
        for file in sorted({name.partition("::")[0] for name in plain}):
            named = [name for name in plain if name.startswith(f"{file}::")]
            runs = [name for name in named if plain[name]["outcome"] == "passed"]
            tried = [name for name in runs if name in ours]
            same = [name for name in runs if ours.get(name, {}).get("outcome") == "passed"]
            short = file.rpartition("/")[2]
            counts = f"{len(named)} | {len(runs)} | {len(tried)} | {len(same)}"
            files[project, short] = f"| {project} | {short} | {counts} |"
            for name in tried:
                test = name.partition("::")[2]
                failures.pop((project, test), None)
                if name not in same:
                    why = classify(name, ours[name]["why"]).replace("|", "/")
                    failures[project, test] = f"| {project} | `{test}` | {why} |"
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in FILES)
    lines, failed = ("\n".join(rows[key] for key in sorted(rows, key=_place)) for rows in (files, failures))
    return PAGE_TEXT.format(origin=origin, versions=versions, lines=lines, failures=failed)


def _place(key: tuple[str, str]) -> tuple[int, str]:
    return list(FILES).index(key[0]), key[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for project in FILES:
        parser.add_argument(f"--{project}", type=Path, help="the folder of a checkout")
    parser.add_argument("--first", action="store_true", help="the first case of each function alone")
    parser.add_argument("--write", action="store_true", help=f"{PAGE.relative_to(ROOT)}")
    parser.add_argument("--origin", default="the given folders", help="whose tests these are, for the page")
    given, more = parser.parse_known_args()  # more is for pytest
    if given.first:
        os.environ["UPSTREAM_FIRST"] = "1"
    for project in FILES:
        folder = getattr(given, project)
        if folder is not None:
            compare(project, folder.resolve(), more)
    if given.write:
        PAGE.write_text(write_page(given.origin))


if __name__ == "__main__":
    main()
