"""Models of transformers train ten steps on ranks that share their layers, beside plain torch on one device.

    python tools/parallel_training.py                   # on (fsdp 1, tp 2) and (fsdp 2, tp 2), processes of gloo
    python tools/parallel_training.py llama gpt_oss --fsdp 2

AdamW with clipping, tiny configurations, double precision where a model's own code allows it. Then the weights are
exported and read by plain transformers. Prints how far losses are apart, and logits of the model that was read from
those of the model that plain torch trained, of the largest each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tiny_models
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh

import fzero
import fzero.hf
from fzero import checkpoint

FOLDERS = ("llama", "qwen3", "mixtral", "gpt_neox", "deepseek_v3", "gpt_oss")
STEPS, RATE, NORM = 10, 1e-3, 0.5


def make(folder: str) -> tuple[Any, dict[str, Any]]:
    made = tiny_models.make(folder, "tp_plan")
    assert made is not None
    model, batch = made
    return model.train(), {"input_ids": batch["input_ids"], "labels": batch["input_ids"]}


def train_plainly(model: Any, batch: dict[str, Any], halves: int) -> list[float]:
    """Losses, means over parts of the batch, as ranks along fsdp have them."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), RATE), []
    for _ in range(STEPS):
        parts = [{key: x.chunk(halves)[i] for key, x in batch.items()} for i in range(halves)]
        loss = sum(model(**part, use_cache=False).loss for part in parts) / halves
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(model: Any, batch: dict[str, Any], mesh: Any, folder: Path) -> list[float]:
    """Losses of a rank, which exports the weights with the others."""
    params, apply = fzero.hf.parallel(model, mesh)
    clip = fzero.optim.clip_by_global_norm(NORM)
    optimizer = fzero.optim.chain(clip, fzero.optim.adamw(RATE, b1=0.9, b2=0.999, weight_decay=0.01))

    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = fzero.value_and_grad(lambda p: apply(p, **batch, use_cache=False).loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return fzero.optim.apply_updates(params, updates), state, loss

    state, sharded, losses = optimizer.init(params), fzero.shard(step, mesh, data=("fsdp",)), []
    rank, ranks = mesh["fsdp"].get_local_rank(), mesh["fsdp"].size()
    own = {key: x.chunk(ranks)[rank] for key, x in batch.items()}
    for _ in range(STEPS):
        params, state, loss = sharded(params, state, own)
        losses.append(float(loss))
    checkpoint.export_hf(folder, params, model)
    return losses


def run_rank(folders: list[str], fsdp: int, out: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (fsdp, dist.get_world_size() // fsdp), mesh_dim_names=("fsdp", "tp"))
    found = {}
    for name in folders:
        model, batch = make(name)
        losses = train(model, batch, mesh, out.parent / name)
        dist.barrier()
        if dist.get_rank() == 0:
            expected = train_plainly(model, batch, fsdp)
            read = type(model).from_pretrained(out.parent / name, dtype=model.dtype)
            tiny_models.batch_experts(read)
            theirs, ours = (each.train()(input_ids=batch["input_ids"]).logits for each in (model, read))
            apart = max(abs(a - b) / abs(b) for a, b in zip(losses, expected))
            found[name] = [apart, ((theirs - ours).abs().max() / theirs.abs().max()).item(), losses[0], losses[-1]]
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.barrier()  # gloo aborts ranks whose peers leave early
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", default=list(FOLDERS), help="of transformers")
    parser.add_argument("--fsdp", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_of is not None:
        run_rank(given.folders, given.fsdp[0], given.rank_of)
        return
    print("| model | mesh | losses apart | logits apart | first loss | last loss |\n|---|---|---|---|---|---|")
    for fsdp in given.fsdp:
        with TemporaryDirectory() as folder:
            out = Path(folder) / "found.json"
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
            command += ["--nproc-per-node", str(2 * fsdp), __file__, *given.folders, "--fsdp", str(fsdp)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run([*command, "--rank-of", str(out)], check=True, env=environment, timeout=1800)
            for name, (losses, logits, first, last) in json.loads(out.read_text()).items():
                print(f"| {name} | fsdp {fsdp}, tp 2 | {losses:.1e} | {logits:.1e} | {first:.3f} | {last:.3f} |")


if __name__ == "__main__":
    main()
