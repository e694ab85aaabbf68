"""Tables of the grammar: one value given twice, loops, tiles and forward mode, in source text with slots (see
`grammar`). `cosine`, `dense`, `nested` and `swapped` are functions of a matrix and of rows, in the head of a script."""

from __future__ import annotations

from property_tests.random_steps.grammar import rules

UNIFORM = rules("""
## twice
torch._foreach_add([<W>, <W>], [<W>, <W>])[1]
torch.stack([<W>] * 2).mean(0)
torch.addcmul(<B>, <B>, <B>, value=0.1)

## scan blocks
<N> = <W>
(<N>, _), _ = fzero.scan(lambda c, _: ((c[0] * 0.5 + <B>, c[1] + c[0]), None), (<N>, <N>), length=2)

<N> = <W> * 0.5
(_, <N>), _ = fzero.scan(lambda c, _: ((c[1], c[0] @ <W>), None), (<N>, <N>), length=3)

## tiled 0.5
fzero.tiled(lambda w, h: torch.tanh(h @ w), <D>)(<W>, <W>)
""")
"""Values of leaves, the same on every rank."""

ROWS = rules("""
## twice
torch.stack([<M>] * 2).mean(0)
torch.addcmul(<M>, <M>, <M>, value=0.1)

## twice 2 blocks
<N> = torch._foreach_mul([<R>, <R>], 0.5)
<N> = torch._foreach_add(<N>, <N>[::-1])[0]

<N> = torch._foreach_mul([<R>, <R>, <R>], 0.5)
<N> = torch._foreach_lerp(<N>, [<N>[1]] * 3, 0.3)[2]

## scan 3 blocks
<N> = <R>
(<N>, _), _ = fzero.scan(lambda c, _: ((c[0] + <B>, c[1] * 0.5 + c[0]), None), (<N>, <N>), length=2)

<N> = <R>
(_, <N>), _ = fzero.scan(lambda c, _: ((c[0] + <B>, c[1] * 0.5 + c[0]), None), (<N>, <N> * 2), length=2)

<N> = <R> * 0.5
<N>, _ = fzero.scan(lambda c, _: ((c[1], c[0] * <S>, c[1].tanh()), None), (<N>, <N>, <N>), length=3)
<N> = <N>[0] + <N>[1] * <N>[2]

<N>, ys = fzero.scan(lambda c, _: (torch.tanh(c @ <W>), (c, c)), <R>, length=2)
<N> = <N> + ys[0].mean(0) * ys[1][0]

<N>, _ = fzero.scan(lambda c, w: ((c[1] @ w, c[0]), None), (<R>, <R>), torch.stack([<W>, <W>]))
<N> = <N>[0] * 0.5 + <N>[1]

<N>, _ = fzero.scan(lambda c, _: (fzero.remat(lambda h: torch.tanh(h @ <W> + <B>))(c) + c, None), <R>, length=2)

<N> = fzero.remat(lambda h: fzero.scan(lambda c, _: (torch.tanh(c @ <W>), None), h, length=2)[0] * h)(<R>)

<N>, _ = fzero.scan(lambda c, _: (fzero.scan(lambda e, _: (e * <B>, None), c, length=2)[0] + c, None), <R>, length=2)

## scan 4 blocks
<N> = <R>
(<N>, _), _ = fzero.scan(
    lambda c, _, l: ((c[0] + l["b"].double(), c[1] * 0.5 + c[0] @ l["w"].double()), None),
    (<N>, <N>),
    layers=p["layers"],
)

<N> = <R>
(_, <N>), _ = fzero.scan(
    lambda c, _, l: ((c[0] + l["b"].double(), c[1] * 0.5 + c[0].tanh()), None), (<N>, <N>), layers=p["layers"]
)

<N>, _ = fzero.scan(
    lambda c, _, l: (fzero.remat(lambda h, l: torch.tanh(h @ l["w"].double() + l["b"]))(c, l), None),
    <R>,
    layers=p["layers"],
)

<N>, ys = fzero.scan(
    lambda c, w, l: (torch.tanh(c @ l["w"].double()) * w, (c, w)),
    <R>,
    torch.stack([<B>] * len(p["layers"])),
    layers=p["layers"],
)
<N> = <N> + ys[0][0] * ys[1][-1]

<N>, _ = fzero.scan(
    lambda c, _, l: (fzero.tiled(lambda l, h: torch.tanh(h @ l["w"].double()), min(2, len(c)))(l, c), None),
    <R>,
    layers=p["layers"],
)

## tiled 2
fzero.tiled(dense, min(2, len(x)))(<W>, <R>)
fzero.tiled(lambda w, h, g: torch.tanh(h @ w[0] + g * w[1]), min(2, len(x)))((<W>, <B>), <R>, <R>)
fzero.tiled(lambda w, h: torch.tanh(h @ w[0] @ w[1]), <D>, 1)((<B>[:1], <B>[None, :1]), <R>[:, :, None])[..., 0]
fzero.tiled(lambda w, h: h + fzero.tiled(cosine, min(2, len(h)))(w, h), min(2, len(x)))(<W>, <R>)
fzero.tiled(lambda w, h: fzero.tiled(torch.mul, min(2, len(h)))(w, h.tanh()) * w, min(2, len(x)))(<B>, <R>)
fzero.tiled(swapped, min(2, len(x)))(<W>, <R>)
fzero.scan(lambda c, _: (fzero.tiled(dense, min(2, len(x)))(<W>, c), None), <R>, length=2)[0]
fzero.remat(lambda h: fzero.tiled(dense, min(2, len(x)))(<W>, h) * h)(<R>)

## forward 0.7
torch.func.jvp(lambda h: torch.tanh(h @ <W>), (<R>,), (<R>,))[1]
torch.func.jvp(lambda w: torch.tanh(<R> @ w), (<W>,), (<W>,))[1]
torch.func.jvp(lambda h: fzero.tiled(cosine, min(2, len(x)))(<W>, h), (<R>,), (<R>,))[1]
torch.func.jvp(lambda w: fzero.tiled(cosine, min(2, len(x)))(w, <R>), (<W>,), (<W>,))[1]
torch.func.jvp(lambda h: fzero.tiled(nested, min(2, len(x)))(<W>, h), (<R>,), (<R>,))[1]
torch.func.jvp(lambda w: fzero.tiled(nested, min(2, len(x)))(w, <R>), (<W>,), (<W>,))[1]
torch.func.jvp(functools.partial(swapped, <W>), (<R>,), (<R>,))[1]
torch.func.jvp(lambda h: fzero.remat(lambda h: torch.tanh(h @ <W>))(h), (<R>,), (<R>,))[1]
torch.func.vjp(lambda h: torch.tanh(h @ <W>), <R>)[1](<R>)[0]
torch.func.vjp(lambda h: fzero.tiled(cosine, min(2, len(x)))(<W>, h), <R>)[1](<R>)[0]
torch.func.vjp(functools.partial(swapped, <W>), <R>)[1](<R>)[0]
""")
"""Values of each example alone."""

STATE = rules("""
## twice
out["ema"], out["m"] = new, new
out["mean"], out["var"] = s["mean"] * 0.5, s["mean"] * 0.5
out["mean"] = out["var"] = s["mean"] * 0.5 + s["var"]
out["mean"], out["var"] = torch._foreach_add([s["mean"], s["var"]], [s["var"], s["mean"]], alpha=0.5)
out["mean"] = torch.addcmul(s["mean"], s["mean"], s["mean"], value=-0.1)
new["b"] = torch.lerp(p["b"], p["b"], 0.3)

## twice blocks
leaves, others = fzero.tree.leaves(s["m"]), fzero.tree.leaves(s["ema"])
fresh = torch._foreach_lerp([*leaves, *others], [*others, *leaves], 0.3)
out["m"] = fzero.tree.unflatten(fzero.tree.flatten(p)[1], fresh[: len(leaves)])
out["ema"] = fzero.tree.unflatten(fzero.tree.flatten(p)[1], fresh[len(leaves) :])

fresh = torch._foreach_mul([s["mean"], s["mean"]], [0.5, 0.25])
out["mean"], out["var"] = fresh[0], fresh[1] + fresh[0]

## scan
(out["mean"], out["var"]), _ = fzero.scan(lambda c, _: ((c[0] / 2 + c[1], c[0]), None), (s["mean"],) * 2, length=2)
(out["mean"], _), _ = fzero.scan(lambda c, _: ((c[1] * 0.5, c[0] * 0.9), None), (s["mean"], s["mean"] * 1), length=3)
(out["ema"], _), _ = fzero.scan(lambda c, _: ((c[1], fzero.tree.map(torch.neg, c[0])), None), (new, new), length=2)

## accumulate blocks
sums = lambda p, b: ((b[0].double() @ p["w"].double()).square().sum(), torch.tensor(float(len(b[0]))))
results["sums"], more = fzero.accumulate(sums, len(x))(p, (x, t))
new = fzero.tree.map(lambda a, b: a - 0.01 * b, new, more)

sums = lambda p, b: (((b[0].double() + 1) * p["b"].double()).sum(), torch.tensor(float(len(b[0]))))
results["sums"], more = fzero.accumulate(sums, 1, sync="once")(p, (x, t))
new = fzero.tree.map(lambda a, b: a - 0.01 * b, new, more)
""")
"""New state beside the optimizer's."""
