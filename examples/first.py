import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

import fzero

torch.manual_seed(0)
params, apply = fzero.lower(nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 256)))
optimizer = fzero.optim.adamw(3e-3, weight_decay=0.1)
batch = torch.randint(256, (16, 33))  # of all ranks


def loss_fn(params, tokens):
    return cross_entropy(apply(params, tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train_step(params, opt_state, tokens):
    loss, grads = fzero.value_and_grad(loss_fn)(params, tokens)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return fzero.optim.apply_updates(params, updates), opt_state, loss


if dist.is_torchelastic_launched():  # torchrun --nproc-per-node 2 first.py
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    step = fzero.shard(train_step, mesh)  # the only distributed line
    batch = batch.chunk(mesh.size())[mesh.get_rank()]
else:  # python first.py: two virtual ranks in one process
    mesh = fzero.VirtualMesh(fsdp=2)
    step = fzero.simulate(train_step, mesh)

params = fzero.partition(params, mesh)  # each rank keeps one slice of each leaf
opt_state = optimizer.init(params)
print(step.trace(params, opt_state, batch))
for _ in range(20):
    params, opt_state, loss = step(params, opt_state, batch)
print(f"loss {loss.item():.3f}")
if dist.is_initialized():
    dist.barrier()
    dist.destroy_process_group()
