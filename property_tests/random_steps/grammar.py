"""The grammar of random train steps: tables of source text with slots.

A slot is a name in angle brackets. `<N>` is the new variable of a statement, `<D>` the width of a row, and

    <R>  rows [n, D], each of one example           <W>  [D, D] of leaves     <S>  [] of leaves
    <X>  rows of any shape                          <B>  [D] of leaves        <U>  any value of leaves
    <T>  a 0-d value of this rank's examples        <C>  [1] of leaves        <L>  a leaf of the parameters
    <M>  rows [n, D] in a variable                  <E>  [5, D] of leaves     <Q>  [D, D], a product of leaves

`x` [n, D] and `t` [n] are the batch, `p` and `s` the parameters and the other state.
"""

from __future__ import annotations

from typing import NamedTuple


class Rule(NamedTuple):
    """A piece of source text, how often it is chosen, and the switch that it hangs on."""

    text: str
    weight: float = 1.0
    switch: str = ""
    is_linear: bool = True


def rules(text: str, switch: str = "", weight: float = 1.0, *, is_linear: bool = True) -> tuple[Rule, ...]:
    """A rule for each paragraph of `text`; a paragraph of lines that all begin in column 0 is a rule a line."""
    found: list[Rule] = []
    for block in text.strip("\n").split("\n\n"):
        lines = block.split("\n")
        pieces = [block] if any("<N>" in line for line in lines) else lines
        found += [Rule(piece, weight, switch, is_linear) for piece in pieces]
    return tuple(found)


WAITING: dict[str, str] = {
    "meets": "a leaf beside a value of this rank's examples of its own shape, or 0-d",
    "write a leaf": "plain_tensor.add_(leaf)",
    "write a copy of a leaf": "leaf.clone() written to",
    "plain state": "new state that is a plain tensor",
    "total norm": "nn.utils.get_total_norm of leaves",
    "power of lists": "_foreach_pow(2.0, leaves)",
    "function": "custom Functions of leaves",
    "cond": "torch.cond",
    "abs in place": "donate writes abs_, gelu_, threshold_",
    "context": "autocast, no_grad and inference_mode around a call",
}
"""Switch -> the cause that is still open. Steps with a rule of such a switch are not drawn."""

# ---- values of leaves

UNIFORM = (
    *rules("""
torch.tanh(<U>)
torch.exp(-<U>.abs())
<U> * 0.5
2.0 / (2.0 + <U>.square())
1 - <U>
-<U>
<W> + <W>
<W> * <S>
<W> * <C>
<W> + <B>
<W> * torch.sigmoid(<W>)
<B> * <C> + <S>
(<W> + <W>.detach()) / 2
<U> - <U>.mean()
<U> / (1 + <U>.norm())
<U> / (1 + <U>.abs().max())
<U> * <U>.sum()
<U> + <U>.var()
<W> @ <W>
<W> @ <B>
<W>.T
<W>.t() @ <W>
<W>[0]
<W>[:, -1]
<W>[:1] * <W>
<E>[:1] + <B>
<E>[1:4].mean(0)
<W>.reshape(-1)[:<D>]
<W>.view(-1).flip(0).view(<D>, <D>)
torch.softmax(<W>, -1)
torch.cumsum(<W>, 0)
torch.triu(<W>)
torch.diag(<W>)
torch.outer(<B>, <B>)
torch.cat([<B>, <B>])[::2][:<D>]
torch.cat([<W>[1:], <B>[None]])
torch.stack([<B>] * <D>)
torch.stack([<S>, <S>]).sum()
torch.where(<W> > 0, <W>, 0.1 * <W>)
torch.where(<W> > <B>, <W>, <B>)
torch.lerp(<W>, <W>, 0.3)
torch.addcmul(<B>, <B>, <B>, value=0.5)
torch.maximum(<W>, <W>)
torch.maximum(<B>, <S>)
<W>.clamp(-0.4, 0.4)
<W>.pow(2)
2.0 ** <B>
<B>.expand(<D>, -1)
<B>[:, None] * <B>
<B>.unsqueeze(0)
<B>.roll(1)
<W>.sum(0)
<W>.mean(1)
<W>.amax(0)
<W>.norm(dim=1)
F.normalize(<W>, dim=0)
F.gelu(<W>)
F.leaky_relu(<B>)
F.layer_norm(<W>, (<D>,), <B>, <B>)
torch.einsum("ij,j->i", <W>, <B>)
torch.linalg.vector_norm(<U>)
torch._foreach_add([<W>, <B>], 1.0)[0]
torch._foreach_mul([<W>, <B>], [<W>, <B>])[1]
torch.logsumexp(<W>, 1)
<W>.masked_fill(<W> > 0, 0.3)
torch.sort(<B>).values
<B>.repeat(2)[:<D>]
<W>.movedim(0, 1).contiguous()
"""),
    *rules("""
torch.zeros_like(<W>) + <B>
torch.ones_like(<W>) * <S>
torch.full_like(<B>, 0.5) * <B>
<W>.new_zeros(<D>) + <B>
<W>.new_ones(<D>, <D>) * <W>
<B>.new_full((<D>,), 0.5) * <B>
<B>.new_tensor([0.5]) * <B>
torch.empty_like(<B>).fill_(0.5) * <B>
torch.zeros(<D>, <D>, dtype=torch.float64).copy_(<W>) * <S>
""", "factory"),
    *rules("""
TABLE[:<D>] * <B>
TABLE[:<D>]
table(<D>) * <B>
table(<D>)
CACHE.setdefault("table", torch.linspace(0.1, 1, <D>, dtype=torch.float64)) * <B>
torch.tensor(0.1, dtype=torch.float64) * <W>
torch.arange(<D>, dtype=torch.float64) * <B>
""", "table"),
    *rules("""
Straight.apply(<W>)
Straight.apply(<L>)
Straight.apply(<L>)
Scale.apply(<W>, <S>)
""", "function"),
    *rules("fzero.unpartition(<W>)\nfzero.unpartition(<L>)\npmean(<W>)\npmean(<L>)", "unpartition", 0.5),
    *rules("""
torch.func.grad(lambda q: q.square().sum())(<W>)
torch.func.vmap(lambda row: row * <S>)(<W>)
""", "functorch", 0.5),
    *rules("<W>.to(torch.float32).to(torch.float64)\n<W>.float()\n<B>.to(torch.float32)", "float32", 0.3),
    *rules("<W>.to(torch.bfloat16).to(torch.float64)\n<B>.bfloat16()", "bfloat16", 0.3),
    *rules("torch.cond(<S> > 0, lambda a: a * 2, lambda a: a.tanh(), (<W>,))", "cond", 0.5),
    *rules("""
<N> = <Q> * 1
<N>[0] = 0.2

<N> = <Q> * 1
<N>.view(-1)[::2].mul_(0.5)

<N> = <Q> + 0
<N>.masked_fill_(<Q> > 0, 0.1)

<N> = torch.zeros(3, dtype=torch.float64)
for i, leaf in enumerate((<L>, <L>, <L>)):
    <N>[i] = leaf.norm()

<N> = torch.zeros(2, dtype=torch.float64)
for i, leaf in enumerate((<L>, <L>)):
    <N>[i] += leaf.sum()
""", "write"),
    *rules("""
<N> = <Q>.clone()
<N>[1:] += <B>

<N> = <Q> * 0.5
<N>.index_put_((torch.tensor([0]),), <B>)

<N> = <Q> * 0.5
<N>.T[0].add_(<B>)

<N> = torch.zeros(<D>, <D>, dtype=torch.float64)
<N>[:, 0] = <B>

<N> = torch.zeros(<D>, <D>, dtype=torch.float64)
<N> += <W>

<N> = torch.zeros(<D>, <D>, dtype=torch.float64)
<N>.copy_(<W>)
""", "write a leaf"),
    *rules("<N> = <W>.clone()\n<N>[0] = 0.2\n\n<N> = <W> * 1\n<N> += <B>", "write a copy of a leaf", 0.1),
)
"""Values of leaves, the same on every rank."""

# ---- values of each example

ROWS = (
    *rules("""
<R> + <C>
""", "meets"),
    *rules("""
torch.tanh(<R> @ <W> + <B>)
torch.tanh(F.linear(<R>, <W>, <B>))
torch.tanh(<R> @ <W>.T)
torch.tanh(torch.addmm(<B>, <R>, <W>))
torch.einsum("ni,ij->nj", <R>, <W>).sin()
<R> * <B>
<R> + <S>
<R> * <W>[0]
<R> - <E>[0]
<R> / (1 + <S>.square())
<R> * <U>.mean()
<R> * torch.sigmoid(<R>)
(<R> + <R>) / 2
torch.where(<R> > 0, <R>, <B>)
torch.where(<R> > <B>, <R>, 0.1)
torch.lerp(<R>, <B>.expand_as(<R>), 0.3)
torch.addcmul(<R>, <R>, <B>, value=0.5)
torch.maximum(<R>, <B>)
F.layer_norm(<R>, (<D>,), <B>, <B>, 0.1)
F.rms_norm(<R>, (<D>,), <B>, 0.1)
F.embedding(t, <E>) + <B>
F.embedding(t, <E>) * <R>
<E>[t] + <R>
torch.softmax(<R> @ <W>, -1) * <R>
F.dropout(<R>, 0.5, training=False)
<R>.reshape(len(<R>), 1, -1).transpose(1, 2).flip(1).reshape(len(<R>), -1)
torch.roll(<R>, 1, 1)
<R>.cumsum(1) / <D>
F.gelu(<R>)
F.one_hot(t % <D>, <D>) * <R>
<B>.expand(len(x), -1) * <R>
<B>.repeat(len(x), 1) + <R>
torch.cat([<R>, <B>.expand(len(x), -1)], 1)[:, ::2]
torch.cat([<R>, <R>], 1)[:, 1:<D> + 1]
<R>[:, :, None] * <W>
(<R>[:, None, :] * <W>).sum(-1)
torch.bmm(<R>[:, None], <W>.expand(len(x), -1, -1))[:, 0]
(<R> @ <W>)[:, :1] + <B>
<R>.gather(1, (t % <D>)[:, None]) * <B>
F.conv1d(<R>[:, None], <W>[None, :1], padding=<D>)[:, 0, :<D>]
F.scaled_dot_product_attention(<R>[:, :, None], <R>[:, :, None], <R>[:, :, None])[..., 0]
"""),
    *rules("torch.stack([<W> @ row + <B> for row in <R>])", "meets"),
    *rules("""
torch.stack([row * <B> for row in <R>])
torch.stack([row.sum() * <S> for row in <R>])
torch.func.vmap(lambda row: <W> @ row + <B>)(<R>)
torch.cat([<R>[i : i + 1] * <B> for i in range(len(x))])

<N> = torch.zeros(len(x), <D>, dtype=torch.float64)
for i in range(len(x)):
    <N>[i] = <W> @ <R>[i] + <B>
""", "one example"),
    *rules("""
<W>.new_zeros(len(x), <D>) + <R>
<B>.new_ones(<R>.shape) * <R>
torch.zeros_like(<R>) + <B>
torch.full_like(<R>, 0.5) * <B>
<R>.new_zeros(<R>.shape) + <W>[0]
<B>.new_zeros(len(x), <D>) + <R> @ <W>
torch.ones(len(x), 1, dtype=torch.float64) * <B>
""", "factory"),
    *rules("<R> * table(<D>)\n<R> + TABLE[:<D>]\n<R> * torch.linspace(0, 1, <D>, dtype=torch.float64)\n"
           "CACHE.setdefault('rows', torch.linspace(0.1, 1, <D>, dtype=torch.float64)) * <R>", "table"),
    *rules("<R> * torch.tensor(0.5)\n<R> + torch.tensor([0.5] * <D>, dtype=torch.float64) * <B>", "table"),
    *rules("Straight.apply(<R>)\nScale.apply(<R>, <S>)\nScale.apply(<R>, <L>.mean())\n"
           "<R> @ Straight.apply(<L>).reshape(-1)[:1].expand(<D>, <D>)", "function"),
    *rules("<R> - pmean(<R>.mean(0))\n<R> / (1 + pmean(<R>.square().mean()))\n"
           "<R> * pmean(<R>.mean() * <S>)\n<R> + pmean(<R>.mean(0)) @ <W>", "pmean"),
    *rules("<R>.to(torch.float32) @ <W>.to(torch.float32)\n<R>.float() * <B>.float()", "float32", 0.3),
    *rules("(<R>.to(torch.bfloat16) @ <W>.to(torch.bfloat16)).to(torch.float64)\n<R>.bfloat16() * <B>", "bfloat16", 0.3),
    *rules("<N> = <R>\nwith torch.autocast('cpu', torch.bfloat16):\n    <N> = (<N>.float() @ <W>.float()).double()",
           "autocast", 0.5),
    *rules("torch.cond(<S> > 0, lambda a: a * 2, lambda a: a.tanh(), (<R>,))", "cond", 0.5),
    *rules("torch.cond(<S> > 0, lambda a, b: a * b, lambda a, b: a + b, (<R>, <B>))", "cond", 0.5),
    *rules("fzero.remat(lambda h: torch.tanh(h @ <W> + <B>))(<R>)\nfzero.remat(lambda h, w: (h @ w).sin())(<R>, <W>)\n"
           "fzero.remat(lambda h: h * <W>.norm() / (1 + <S>.square()))(<R>)", "remat", 2),
    *rules("""
<N> = <R> + 0
<N>.masked_fill_(<R> > 0, 0.5)

<N> = <R> + 0
<N>.index_put_((torch.arange(len(x)), t % <D>), <R>[:, 0])

<N> = torch.zeros_like(<R>)
<N>.copy_(<R>)

<N> = torch.zeros(len(x), <D>, dtype=torch.float64)
for i in range(2):
    <N> += <R> * <B>

buffer, <N> = torch.zeros_like(<R>), 0
for i in range(3):
    buffer.copy_(<R> * i)
    <N> = <N> + buffer

buffer, <N> = torch.zeros_like(<R>), []
for value in (<B>, <W>[0]):
    buffer.copy_(value.expand_as(buffer))
    <N>.append(buffer + <R>)
<N> = <N>[0] * <N>[1]

<N> = <R> * 1
view = <N>[:, 1:].T
view.mul_(0.5)

<N> = F.relu(<R> + 0, inplace=True)
""", "write", 0.7),
    *rules("""
<N> = <R> * 1
<N> += <B>

<N> = <R>.clone()
<N>[:, 1:] += <B>[1:]

<N> = <R>.clone()
<N>[:, 0] = <S>

<N> = <R> + 0
<N>.mul_(<B>)

<N> = <R> + 0
<N>.view(-1, <D>)[:, :1].add_(<C>)

<N> = torch.zeros_like(<R>)
<N>.copy_(<B>)

<N> = torch.empty(len(x), 2, dtype=torch.float64)
<N>[:, 0], <N>[:, 1] = <R>.sum(1), <S>
""", "write a leaf", 0.7),
    *rules("<N> = <M>\n<N>.mul_(0.9)\n\n<N> = <M>\n<N>[:, :1] *= 0.5\n\n<N> = <M>[:, 1:]",
           "write", 0.5),
    *rules("""
<N> = <R>
for layer in p["layers"]:
    <N> = torch.tanh(<N> @ layer["w"].double() + layer["b"])

<N> = <R>
for layer in p["layers"]:
    <N> = fzero.remat(lambda h, layer: torch.tanh(h @ layer["w"].double() + layer["b"]))(<N>, layer)

<N> = x
for layer in p["layers"]:
    <N> = <N> + F.linear(<N>, layer["w"].double(), layer["b"].double())
""", "layers", 3),
    *rules("F.batch_norm(<R>, s['mean'], 1 + s['var'].abs(), <B>, <B>, False)", "batch norm"),
)
"""Values of each example alone, or of means over all ranks."""

LOCAL = (
    *rules("""
<R> + <W>[0] * <T>
<R> @ (<W> * <T>)
<R> @ (<W> + <T>)
<R> * (<B> + <T>)
<R> * (<S> + <T>)
<R> * (<S> * <T>)
<R> / (1 + (<S> * <T>).abs())
<R> * torch.maximum(<S>, <T>)
<R> * torch.where(<T> > 0, <B>, 0.1)
<R> @ (<W> / (2 + <T>.tanh()))
<R> * torch.stack([<S>, <T>]).sum()
<R> + (<W> @ <R>[0] + <B>)
""", "meets"),
    *rules("""
<R> - <R>.mean(0)
<R> / (1 + <R>.norm())
torch.softmax(<R>, 0)
<R>.cumsum(0) / len(x)
<R>.flip(0)
<R> @ (<R>.T @ <R>)
<R> * <R>.max()
<R> * <T>
<R> + <R>[-1:] * <B>
torch.sort(<R>, 0).values
<R>[torch.argsort(t)]
F.batch_norm(<R>, None, None, <B>, <B>, True)
F.instance_norm(<R>[None])[0] * <B>
"""),
    *rules("""
<N> = <R>.clone()
<N>[1:] += <R>[:-1]

<N> = <R>.clone()
<N>[:-1].mul_(<T>)

<N> = <Q> * 1
<N> += <T>
<N> = <R> @ <N>

<N> = torch.zeros(<D>, dtype=torch.float64)
<N> += <R>[0]
<N> = <R> + <N> * <B>

<N> = torch.zeros(<D>, <D>, dtype=torch.float64)
<N>[0] = <R>[0]
<N> = <R> @ (<N> + <W>)

<N> = <W>.new_zeros(<D>)
<N>[:] = <R>[0]
<N> = <R> * <N> * <B>
""", "write"),
    *rules("""
<N> = <R> + 0
<N>[0] = <B>

<N> = <R> + 0
<N>.index_put_((torch.tensor([0]),), <B>)
""", "write a leaf"),
    *rules("torch.cond(<T> > 0, lambda a: a * 2, lambda a: a.tanh(), (<R>,))", "cond"),
    *rules("Straight.apply(<W> * <T>)[0] * <R>\n<R> * Scale.apply(<S>, <T>)", "function"),
    *rules("<N> = F.batch_norm(<R>, mean, var, <B>, <B>, True, 0.2)", "batch norm", 3),
    *rules("<N>, buffers = norm(p['norm'], buffers, <R>)", "batch norm", 3),
    *rules("<N>, buffers = fzero.remat(norm)(p['norm'], buffers, <R>)", "batch norm", 1),
)
"""Values of this rank's examples together."""

OWN = (
    *rules("""
<X>.sum() * <S>
<X>.mean() * <W>
<W> * <X>.amax() + <B>
<R>[0] @ <W> + <B>
<W>.new_zeros(3) + <X>.sum()
torch.where(<X>.sum() > 0, <S>, <S> + 1)
<X>.norm() / (1 + <B>.norm())
""", "meets"),
    *rules("""
<X>[0]
<X>.sum()
<X>.sum(0)
<X>.mean()
<X>.max()
<X>.argmax()
(<X> > 0).sum()
(<X> > 0).any()
<R>.T @ <R>
t.sum()
t
t.float().mean()
len(x) * <S>
"""),
)
"""Values of this rank's examples together that the step returns and nothing else depends on."""

# ---- the loss

TERMS = (
    *rules("""
(<B> * <R>.mean(0)).sum()
(<W> * <X>.mean()).sum()
(<L> * <X>.mean()).mean()
(<W> + <X>.mean()).mean()
<S> * <X>.mean()
<C>[0] * <X>.mean()
<X>.mean() / (1 + <S>.square())
(<W> @ <R>.mean(0) + <B>).sum()
F.smooth_l1_loss(<R>, x) * <S>
""", "meets"),
    *rules("""
<X>.square().mean()
<X>.mean()
<X>.double().cos().mean()
F.mse_loss(<R>, x)
F.cross_entropy(<R>, t % <D>)
<X>.square().sum() / len(x)
(<R>.mean(0) @ <W>).sum()
torch.stack([row.square().mean() for row in <X>]).mean()
sum(row.square().sum() for row in <R>) / len(x)
torch.einsum("ni,ij,nj->n", <R>, <W>, <R>).mean()
torch.dot(<R>.mean(0), <B>)
"""),
)
"""Means over examples, and linear functions of such means."""

LOCAL_TERMS = (
    *rules("""
<T> * <S>
(<W> * <T>).square().mean()
(<W> + <T>).square().mean()
(<T> - <B>).square().sum()
(<S> - <T>).square()
(<W> @ <R>[0] + <B>).square().sum()
""", "meets"),
    *rules("""
<X>.square().sum()
<X>.double().logsumexp(0).mean()
<X>.max()
<X>.norm()
<X>.mean().square()
"""),
)
"""Numbers of this rank's examples together."""

PENALTIES = rules("""
0.1 * <U>.square().sum()
0.1 * <L>.norm()
0.1 * <L>.mean()
0.1 * <L>.var()
0.1 * <L>.max()
0.1 * <L>.abs().sum()
0.1 * <U>.max()
0.1 * torch.logsumexp(<U>.double().reshape(-1), 0)
0.01 * sum(leaf.double().square().sum() for leaf in fzero.tree.leaves(p))
0.1 * torch.stack([leaf.double().norm() for leaf in fzero.tree.leaves(p)]).sum()
0.1 * sum(torch._foreach_norm([<W>, <B>]))
0.1 * (<U> * TABLE[0]).sum()
""") + rules("0.1 * torch.nn.utils.get_total_norm([<L>, <L>])", "total norm")
"""Numbers of leaves."""

NUMBERS = rules("<X>.mean()\n<X>.max()\n<X>.sum() / <D>\nx[0, 0]\n<R>[0].mean()\nx.mean()\nx.mean().tanh()")
"""What `<T>` may be."""
