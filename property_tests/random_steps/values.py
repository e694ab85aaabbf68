"""Tables of the grammar: values in the loss, in source text with slots (see `grammar`)."""

from __future__ import annotations

from property_tests.random_steps import repeats
from property_tests.random_steps.grammar import rules

UNIFORM = (
    rules("""
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
torch.fft.rfft(<B>).abs()
torch.complex(<B>, <B>).abs()
torch.addmm(<W>, <W>, <W>)
<B>.repeat(2)[:<D>]
<W>.movedim(0, 1).contiguous()

## factory
torch.zeros_like(<W>) + <B>
torch.ones_like(<W>) * <S>
torch.full_like(<B>, 0.5) * <B>
<W>.new_zeros(<D>) + <B>
<W>.new_ones(<D>, <D>) * <W>
<B>.new_full((<D>,), 0.5) * <B>
<B>.new_tensor([0.5]) * <B>
torch.empty_like(<B>).fill_(0.5) * <B>
torch.zeros(<D>, <D>, dtype=torch.float64).copy_(<W>) * <S>

## table
TABLE[:<D>] * <B>
TABLE[:<D>]
torch.tensor(0.1, dtype=torch.float64) * <W>
torch.arange(<D>, dtype=torch.float64) * <B>

## cache
table(<D>) * <B>
table(<D>)
CACHE.setdefault("table", torch.linspace(0.1, 1, <D>, dtype=torch.float64)) * <B>

## function
Straight.apply(<W>)
Straight.apply(<L>)
Straight.apply(<L>)
Scale.apply(<W>, <S>)
Clip.apply(<W>, 0.5)
Clip.apply(<L>, 0.5)
Parts.apply(<W>, <S>)[0]

## unpartition 0.5
fzero.unpartition(<W>)
fzero.unpartition(<L>)
pmean(<W>)
pmean(<L>)

## functorch 0.5
torch.func.grad(lambda q: q.square().sum())(<W>)

## float32 0.3
<W>.to(torch.float32).to(torch.float64)
<W>.float()
<B>.to(torch.float32)

## bfloat16 0.3
<W>.to(torch.bfloat16).to(torch.float64)
<B>.bfloat16()

## cond 0.1
torch.cond(<S> > 0, lambda a: a * 2, lambda a: a.tanh(), (<W>,))

## write blocks
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

## write-a-leaf blocks
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

## write-a-copy-of-a-leaf 0.5 blocks
<N> = <W>.clone()
<N>[0] = 0.2

<N> = <W> * 1
<N> += <B>
""")
    + repeats.UNIFORM
)
"""Values of leaves, the same on every rank."""

ROWS = (
    rules("""
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
F.rrelu(<R>, training=False)
torch.distributions.Normal(<R>, 0.5 + <S>.square()).log_prob(x)
torch.distributions.Normal(<R>, 0.5 + <B>.square()).log_prob(x)
x.as_strided(x.shape, x.stride()) * <B>
torch.fft.rfft(<R>).abs() * <S>
torch.func.functional_call(linear, {"weight": <W>, "bias": <B>}, (<R>,))
lowered({"weight": <W>, "bias": <B>}, <R>)
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

## meets
<R> + <C>
torch.stack([<W> @ row + <B> for row in <R>])

## one-example
torch.stack([row * <B> for row in <R>])
torch.stack([row.sum() * <S> for row in <R>])
torch.func.vmap(lambda row: <W> @ row + <B>)(<R>)
torch.cat([<R>[i : i + 1] * <B> for i in range(len(x))])

## one-example blocks
<N> = torch.zeros(len(x), <D>, dtype=torch.float64)
for i in range(len(x)):
    <N>[i] = <W> @ <R>[i] + <B>

## factory
<W>.new_zeros(len(x), <D>) + <R>
<B>.new_ones(<R>.shape) * <R>
torch.zeros_like(<R>) + <B>
torch.full_like(<R>, 0.5) * <B>
<R>.new_zeros(<R>.shape) + <W>[0]
<B>.new_zeros(len(x), <D>) + <R> @ <W>
torch.ones(len(x), 1, dtype=torch.float64) * <B>

## table
<R> + TABLE[:<D>]
<R> * torch.linspace(0, 1, <D>, dtype=torch.float64)
<R> * torch.tensor(0.5)
<R> + torch.tensor([0.5] * <D>, dtype=torch.float64) * <B>

## cache
<R> * table(<D>)
CACHE.setdefault('rows', torch.linspace(0.1, 1, <D>, dtype=torch.float64)) * <R>

## function
Straight.apply(<R>)
Scale.apply(<R>, <S>)
Scale.apply(<R>, <L>.mean())
Clip.apply(<R>, 0.5)
Parts.apply(<R>, <S>)[0] * Parts.apply(<R>, <L>.mean())[1]
Parts.apply(<R>, <S>)[2]
<R> @ Straight.apply(<L>).reshape(-1)[:1].expand(<D>, <D>)

## pmean
<R> - pmean(<R>.mean(0))
<R> / (1 + pmean(<R>.square().mean()))
<R> * pmean(<R>.mean() * <S>)
<R> + pmean(<R>.mean(0)) @ <W>

## float32 0.3
<R>.to(torch.float32) @ <W>.to(torch.float32)
<R>.float() * <B>.float()

## bfloat16 0.3
(<R>.to(torch.bfloat16) @ <W>.to(torch.bfloat16)).to(torch.float64)
<R>.bfloat16() * <B>

## autocast 0.5 blocks
<N> = <R>
with torch.autocast('cpu', torch.bfloat16):
    <N> = (<N>.float() @ <W>.float()).double()

## cond 0.1
torch.cond(<S> > 0, lambda a: a * 2, lambda a: a.tanh(), (<R>,))
torch.cond(<S> > 0, lambda a, b: a * b, lambda a, b: a + b, (<R>, <B>))

## remat 2
fzero.remat(lambda h, m: F.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None], m[:1, :1])[:, 0])(<R>, <W>)
fzero.remat(lambda h: torch.tanh(h @ <W> + <B>))(<R>)
fzero.remat(lambda h, w: (h @ w).sin())(<R>, <W>)
fzero.remat(lambda h: (h * 1).mul_(<B>).tanh())(<R>)
fzero.remat(lambda h: fzero.remat(torch.tanh)(h @ <W>) + h)(<R>)
fzero.remat(lambda h: h * <W>.norm() / (1 + <S>.square()))(<R>)

## write 0.7 blocks
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

## write 0.7
<N> = F.relu(<R> + 0, inplace=True)

## write-a-leaf 0.7 blocks
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

## write 0.5 blocks
<N> = <M>
<N>.mul_(0.9)

<N> = <M>
<N>[:, :1] *= 0.5

## write 0.5
<N> = <M>[:, 1:]

## layers 3 blocks
<N> = <R>
for layer in p["layers"]:
    <N> = torch.tanh(<N> @ layer["w"].double() + layer["b"])

<N> = <R>
for layer in p["layers"]:
    <N> = fzero.remat(lambda h, layer: torch.tanh(h @ layer["w"].double() + layer["b"]))(<N>, layer)

<N> = x
for layer in p["layers"]:
    <N> = <N> + F.linear(<N>, layer["w"].double(), layer["b"].double())

## batch-norm
F.batch_norm(<R>, s['mean'], 1 + s['var'].abs(), <B>, <B>, False)
""")
    + repeats.ROWS
)
"""Values of each example alone, or of means over all ranks."""
