"""Tables of the grammar: what a step makes of `p`, `s`, the gradients `g` and the loss.

A step returns `new` (a tree as `p`), `out` (a dict as `s`) and `results` (a dict). A nonlinear rule is no linear
function of the gradients and the loss.
"""

from __future__ import annotations

from property_tests.random_steps import repeats
from property_tests.random_steps.grammar import rules

OPTIMIZERS = rules("""
new = fzero.tree.map(lambda a, b: a - 0.1 * b, p, g)
new = fzero.tree.map(lambda a, b: torch.add(a, b, alpha=-0.1), p, g)
new = fzero.tree.map(lambda a, b: a * 0.99 - 0.1 * b, p, g)
new = fzero.optim.apply_updates(p, fzero.tree.map(lambda b: -0.1 * b, g))
new = fzero.tree.map(lambda a, b: a - b * (0.1 / (1 + s["count"])), p, g)
new = fzero.tree.map(lambda a, b: torch.lerp(a, a - b, 0.1), p, g)
new = fzero.tree.map(lambda a, b: a.sub(b, alpha=0.1).detach(), p, g)

## blocks
out["m"] = fzero.tree.map(lambda m, b: 0.9 * m + b, s["m"], g)
new = fzero.tree.map(lambda a, m: a - 0.1 * m, p, out["m"])

out["m"] = fzero.tree.map(lambda m, b: torch.lerp(m, b, 0.2), s["m"], g)
new = fzero.tree.map(lambda a, m: a - 0.1 * m, p, out["m"])

leaves, treedef = fzero.tree.flatten(p)
new = fzero.tree.unflatten(treedef, list(torch._foreach_add(leaves, fzero.tree.leaves(g), alpha=-0.1)))

leaves, treedef = fzero.tree.flatten(p)
moments = torch._foreach_add(torch._foreach_mul(fzero.tree.leaves(s["m"]), 0.9), fzero.tree.leaves(g))
out["m"] = fzero.tree.unflatten(treedef, list(moments))
new = fzero.tree.unflatten(treedef, list(torch._foreach_sub(leaves, torch._foreach_mul(moments, 0.1))))

leaves, treedef = fzero.tree.flatten(p)
moments = torch._foreach_lerp(fzero.tree.leaves(s["m"]), fzero.tree.leaves(g), 0.3)
out["m"] = fzero.tree.unflatten(treedef, list(moments))
new = fzero.tree.unflatten(treedef, [a - 0.1 * m for a, m in zip(leaves, moments)])

## nonlinear blocks
scale = torch.clamp(0.3 / (fzero.optim.global_norm(g) + 1e-6), max=1.0)
new = fzero.tree.map(lambda a, b: a - scale * b, p, g)

norm = torch.stack([leaf.double().norm() for leaf in torch.utils._pytree.tree_leaves(g)]).norm()
new = fzero.tree.map(lambda a, b: a - 0.1 * b / (1 + norm), p, g)

norm = torch.stack([leaf.double().norm() for leaf in fzero.tree.leaves(g)]).norm()
new = fzero.tree.map(lambda a, b: a - 0.1 * b / (1 + norm), p, g)

norm = torch.stack(list(torch._foreach_norm(fzero.tree.leaves(g)))).norm()
new = fzero.tree.map(lambda a, b: a - 0.1 * b / (1 + norm), p, g)

out["m"] = fzero.tree.map(lambda m, b: 0.9 * m + 0.1 * b.square(), s["m"], g)
new = fzero.tree.map(lambda a, b, m: a - 0.1 * b / (m.abs().sqrt() + 0.1), p, g, out["m"])

leaves, treedef = fzero.tree.flatten(p)
squares = torch._foreach_add(fzero.tree.leaves(s["m"]), torch._foreach_pow(fzero.tree.leaves(g), 2))
out["m"] = fzero.tree.unflatten(treedef, list(squares))
roots = torch._foreach_add(torch._foreach_sqrt(torch._foreach_abs(squares)), 0.1)
new = fzero.tree.unflatten(treedef, list(torch._foreach_addcdiv(leaves, fzero.tree.leaves(g), roots, value=-0.1)))

leaves, treedef = fzero.tree.flatten(p)
new = fzero.tree.unflatten(treedef, list(torch._foreach_sub(leaves, torch._foreach_tanh(fzero.tree.leaves(g)))))

optimizer = fzero.optim.adamw(0.05, eps=1e-2, weight_decay=0.1)
updates, out["adam"] = optimizer.update(g, s["adam"], p)
new = fzero.optim.apply_updates(p, updates)

optimizer = fzero.optim.apply_if_finite(fzero.optim.adamw(0.05, eps=1e-2), 2)
updates, out["finite"] = optimizer.update(g, s["finite"], p)
new = fzero.optim.apply_updates(p, updates)

optimizer = fzero.optim.apply_if_finite(fzero.optim.adamw(0.05, eps=1e-2), 2)
updates, out["finite"] = optimizer.update(fzero.tree.map(lambda b: b / (s["count"] - 1), g), s["finite"], p)
new = fzero.optim.apply_updates(p, updates)

optimizer = fzero.optim.multi_transform(GROUPS, lambda path, leaf: leaf.ndim > 1)
updates, out["groups"] = optimizer.update(g, s["groups"], p)
new = fzero.optim.apply_updates(p, updates)

optimizer = fzero.optim.masked(fzero.optim.adamw(0.05, eps=1e-2), lambda path, leaf: leaf.ndim > 0)
updates, out["masked"] = optimizer.update(g, s["masked"], p)
new = fzero.optim.apply_updates(p, updates)

out["total"] = fzero.tree.map(torch.add, s["total"], g)
is_last = (s["count"] + 1) % 2 == 0
updates, stepped = fzero.optim.adamw(0.05, eps=1e-2).update(out["total"], s["adam"], p)
new = fzero.optim.select(is_last, fzero.optim.apply_updates(p, updates), p)
out["adam"] = fzero.optim.select(is_last, stepped, s["adam"])
out["total"] = fzero.tree.map(lambda a: torch.where(is_last, 0, a), out["total"])
out["count"] = s["count"] + 1

optimizer = fzero.optim.chain(fzero.optim.clip_by_global_norm(0.5), fzero.optim.adam(0.05, eps=1e-2))
updates, out["chain"] = optimizer.update(g, s["chain"], p)
new = fzero.optim.apply_updates(p, updates)

## nonlinear
new = fzero.tree.map(lambda a, b: a - 0.05 * b / (0.1 + b.abs().max()), p, g)
new = fzero.tree.map(lambda a, b: a - 0.05 * b / (1 + b.norm()) * (1 + a.norm()), p, g)

## write-a-copy-of-a-leaf 0.5 blocks
fresh, treedef = fzero.tree.flatten(fzero.tree.map(lambda a: a * 1, p))
torch._foreach_add_(fresh, fzero.tree.leaves(g), alpha=-0.1)
new = fzero.tree.unflatten(treedef, fresh)

fresh = list(torch._foreach_mul(fzero.tree.leaves(g), -0.1))
torch._foreach_add_(fresh, fzero.tree.leaves(p))
new = fzero.tree.unflatten(fzero.tree.flatten(p)[1], fresh)

fresh = fzero.tree.map(lambda b: b * 0.9, g)
new = fzero.tree.map(lambda a, b: b.mul_(-0.1).add_(a), p, fresh)

## constant blocks
buffer = torch.zeros((), dtype=torch.float64)
fresh = []
for leaf, grad in zip(fzero.tree.leaves(p), fzero.tree.leaves(g)):
    buffer.copy_(leaf.double().norm())
    fresh.append(leaf - 0.1 * grad / (1 + buffer))
new = fzero.tree.unflatten(fzero.tree.flatten(p)[1], fresh)

## constant nonlinear blocks
buffer = torch.zeros((), dtype=torch.float64)
fresh = []
for leaf, grad in zip(fzero.tree.leaves(p), fzero.tree.leaves(g)):
    buffer.fill_(0).add_(grad.double().square().sum())
    fresh.append(leaf - 0.1 * grad / (1 + buffer.sqrt()))
new = fzero.tree.unflatten(fzero.tree.flatten(p)[1], fresh)

## norms-in-a-loop nonlinear blocks
norms = torch.zeros(len(fzero.tree.leaves(g)), dtype=torch.float64)
for i, leaf in enumerate(fzero.tree.leaves(g)):
    norms[i] = leaf.norm()
new = fzero.tree.map(lambda a, b: a - 0.1 * b / (1 + norms.norm()), p, g)

## total-norm nonlinear blocks
norm = torch.nn.utils.get_total_norm(fzero.tree.leaves(g))
new = fzero.tree.map(lambda a, b: a - 0.1 * b / (1 + norm), p, g)

## power-of-lists nonlinear blocks
leaves, treedef = fzero.tree.flatten(p)
powers = torch._foreach_pow(2.0, fzero.tree.leaves(g))
new = fzero.tree.unflatten(treedef, [a - 0.01 * b for a, b in zip(leaves, powers)])
""")
"""New parameters."""

STATE = (
    rules("""
out["count"] = s["count"] + 1
out["avg"] = 0.9 * s["avg"] + 0.1 * pmean(loss)
out["avg"] = torch.lerp(s["avg"], pmean(loss), 0.2)
out["ema"] = fzero.tree.map(lambda e, a: torch.lerp(e, a, 0.25), s["ema"], new)
out["ema"] = fzero.tree.map(lambda e, a: 0.9 * e + 0.1 * a, s["ema"], new)
out["ema"] = fzero.tree.map(lambda e, a: a.clone(), s["ema"], new)
out["ema"] = new
out["ema"] = p
out["mean"] = 0.9 * s["mean"] + 0.1 * pmean(x.double().mean(0))
out["mean"] = torch.zeros_like(s["mean"])
out["mean"], out["var"] = s["var"], s["mean"]
out["mean"], out["var"] = s["mean"] + s["var"], s["mean"] - s["var"]
out["mean"] = s["mean"] / (1 + s["mean"].norm())
out["var"] = s["var"].clamp(0.1, 1.0) * s["avg"]
out["var"] = torch.full_like(s["var"], 0.3)
out["var"] = torch.where(s["var"] > s["mean"], s["var"], s["mean"])
out["var"] = s["var"].masked_fill(s["mean"] > 0, 0.25)
new["w"] = p["w"] * 0 + torch.softmax(p["w"], -1)
new["w"] = torch.zeros_like(p["w"]) + torch.cumsum(p["w"], 0) * 0.5
new["w"] = torch.lerp(p["w"], torch.softmax(p["w"].double(), -1).to(p["w"].dtype), 0.5)
out["history"] = s["history"] * 0.5 + torch.softmax(s["history"], 0)
out["mean"] = torch.where(s["mean"] > 0, torch.cumsum(s["mean"], 0), s["var"])
new["w"] = F.hardtanh(p["w"])
new["w"] = p["w"] / (1 + p["w"].norm())
new["w"], new["v"] = p["v"].to(p["w"].dtype), p["w"].to(p["v"].dtype)
new["b"] = p["b"]
new["b"] = torch.zeros_like(p["b"])
new["w"] = p["w"].clone()

## larger-of-two
out["mean"] = torch.max(s["mean"], s["var"])
new["w"] = torch.max(p["w"], p["v"].to(p["w"].dtype))

## abs-in-place
out["mean"] = s["mean"].abs()
out["mean"] = F.gelu(s["mean"])
out["mean"] = F.threshold(s["mean"], 0.1, 0.0)
new["w"] = p["w"].abs()
new["w"] = F.gelu(p["w"])
new["w"] = F.threshold(p["w"], 0.1, 0.2)

## write blocks
history = torch.zeros(3, <D>, dtype=torch.float64)
for i in range(3):
    history[i].copy_(s["history"].double()[i] * i)
out["history"] = s["history"] * 0 + history

buffer = torch.zeros(<D>, dtype=torch.float64)
for i in range(3):
    buffer.add_(s["history"][i])
out["mean"] = s["mean"] * 0.5 + buffer / 3

pair = torch.zeros(2, <D>, dtype=torch.float64)
torch.cumsum(s["history"][0], 0, out=pair[1])
torch.mul(s["history"][0], 2.0, out=pair[0])
out["mean"] = s["mean"] + pair.mean(0)

flat = torch.cat([s["mean"], s["var"]])
flat.mul_(0.5)
out["mean"], out["var"] = s["mean"] * flat[:<D>], s["var"] + flat[<D>:]

old = p["b"].detach()
results["old"] = old

## transposed
new["w"] = p["w"].T

## plain-state 0.5
out["history"] = torch.cat([s["history"][1:], new["b"].double()[None]])
out["history"] = torch.roll(s["history"], 1, 0)
out["history"] = torch.stack([p["b"].double(), s["history"][0], s["history"][1]])
out["history"] = s["history"].flip(0) * 0.5
out["history"] = torch.cumsum(s["history"], 0) * 0.5
out["history"] = torch.softmax(s["history"], -1)
out["history"] = torch.sort(s["history"], 0).values
new["w"] = torch.softmax(p["w"], -1)
new["w"] = torch.cumsum(p["w"], 0) * 0.5
new["w"] = torch.addmm(p["w"], p["w"], p["w"]) * 0.5
new["w"] = p["w"].T.contiguous()
new["w"] = p["w"].flip(0)
new["w"] = torch.sort(p["w"], 0).values
new["w"] = p["w"] - p["w"].mean(0)
new["w"] = p["w"] @ p["v"].to(p["w"].dtype)
new["b"] = p["w"][0].to(p["b"].dtype)
out["history"] = s["history"] + s["history"].mean(0)

## plain-state 0.5 blocks
history = torch.zeros(3, <D>, dtype=torch.float64)
for i in range(3):
    history[i].copy_(s["history"][i] * i)
out["history"] = history

buffer = torch.zeros(<D>, dtype=torch.float64)
for i in range(3):
    buffer.add_(s["history"][i])
out["mean"] = buffer / 3

pair = torch.zeros(2, <D>, dtype=torch.float64)
torch.mul(torch.stack([s["mean"]])[0], 2.0, out=pair[0])
torch.cumsum(s["history"][0], 0, out=pair[1])
out["mean"] = pair.mean(0)

flat = torch.cat([s["mean"], s["var"]])
flat.mul_(0.5)
out["mean"], out["var"] = flat[:<D>], flat[<D>:]

flat = torch.cat([s["mean"], s["var"]])
out["mean"], out["var"] = flat.chunk(2)

flat = torch.cat([leaf.reshape(-1).double() for leaf in fzero.tree.leaves(p)])
out["mean"] = s["mean"] + flat.softmax(0)[:1] * 0.1

flat = torch.cat([leaf.reshape(-1).double() for leaf in fzero.tree.leaves(p)])
out["mean"] = flat[:1] * 0.1 + s["mean"]

## write-a-copy-of-a-leaf 0.5 blocks
history = s["history"] * 1
history[0] = p["b"]
out["history"] = history

history = torch.zeros_like(s["history"])
history[1:] = s["history"][:-1]
out["history"] = history

pair = torch.zeros(2, <D>, dtype=torch.float64)
torch.mul(s["mean"], 2.0, out=pair[0])
torch.add(s["var"], 1.0, out=pair[1])
out["mean"] = pair.mean(0)

fresh = s["mean"] * 0.9
fresh += 0.1 * s["var"]
out["mean"] = fresh

## nonlinear
out["avg"] = torch.minimum(s["avg"], pmean(loss))
out["var"] = 0.9 * s["var"] + 0.1 * (pmean(x.double().square().mean(0)) - pmean(x.double().mean(0)) ** 2)
new = fzero.tree.map(lambda a, b: torch.where(b.abs() > 1e-3, a, a * 0.5), new, g)
new = fzero.tree.map(lambda a: a / (1 + 0.1 * a.norm()), new)
new = fzero.tree.map(lambda a: a - 0.1 * a.mean(), new)
new = fzero.tree.map(lambda a: a.clamp(-0.5, 0.5), new)
new = fzero.tree.map(lambda a: torch.where(pmean(loss) < 100, a, a * 0.5), new)
""")
    + repeats.STATE
)
"""New state beside the optimizer's."""

METRICS = rules("""
p["w"].norm()
p["b"].mean()
p["w"].var()
p["w"].max()
p["w"].abs().min()
p["b"].sum()
p["w"].norm(1)
p["w"].norm(float("inf"))
p["s"]
p["b"]
p["w"][0]
p["w"].T
p["w"].argmax()
torch.mul(p["w"].double(), 2.0, out=torch.zeros(p["w"].shape, dtype=torch.float64))
torch.cumsum(p["w"].double(), 0, out=torch.zeros(p["w"].shape, dtype=torch.float64))
torch.zeros_like(p["w"]).copy_(p["w"])
torch.zeros(p["w"].shape, dtype=torch.float64).add_(p["w"]).mul_(2.0)
(p["w"] > 0).sum()
(p["w"] > 0).any()
p["w"].double().std()
p["w"].numel() * p["s"]
torch.stack([leaf.double().norm() for leaf in fzero.tree.leaves(p)])
torch.stack(list(torch._foreach_norm([p["w"], p["b"]])))
torch.linalg.vector_norm(p["w"], 3)
torch.linalg.matrix_norm(p["w"].double())
torch.quantile(p["w"].double(), 0.5)
torch.count_nonzero(p["w"] > 0)
new["w"].mean()
new["b"].sum()
g["w"].sum()
g["b"]
g
g["w"].mean()
g["w"][0]
loss * 2
s["count"]
s["scale"] * 2
s["history"][0]
s["avg"] - s["avg"].mean()
torch.cat([leaf.reshape(-1)[:1].double() for leaf in fzero.tree.leaves(p)])

## narrow-norms 2
p["h"].norm()
p["h"].mean()
p["h"].sum()
p["h"].var()
torch.stack(list(torch._foreach_norm([p["h"], p["w"]])))
fzero.optim.global_norm({"h": p["h"]})

## twice
[loss, loss]
(new["b"], new["b"])
[p["b"], p["b"]]
(g["b"], g["b"] * 1)

## meets
loss / s["scale"]
loss + p["s"]
loss * s["count"]
loss * p["b"].norm()

## nonlinear
new["w"].norm()
new["w"].max()
new["b"].var()
g["w"].norm()
g["b"].abs().max()
fzero.optim.global_norm(g)
fzero.optim.global_norm(new)
torch.stack(list(torch._foreach_norm(fzero.tree.leaves(g))))
g["w"] @ p["w"].to(g["w"].dtype).T
g["w"].square().sum() / p["w"].square().sum()
pmean(loss).exp()
pmean(loss) ** 2 * p["b"]
""")
"""Results that are no state."""

HELD = rules("""
.detach()
.double()
.to(p["w"].dtype)
.clone()
.full_tensor()
.view_as(p["w"])
* 1
""")
"""What a user may make of a leaf before a step, and hold."""
