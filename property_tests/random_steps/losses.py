"""Tables of the grammar: what a loss makes of values, and the values of a rank's examples together."""

from __future__ import annotations

from property_tests.random_steps.grammar import rules

LOCAL = rules("""
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

## meets
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

## write blocks
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

## write-a-leaf blocks
<N> = <R> + 0
<N>[0] = <B>

<N> = <R> + 0
<N>.index_put_((torch.tensor([0]),), <B>)

## cond 0.2
torch.cond(<T> > 0, lambda a: a * 2, lambda a: a.tanh(), (<R>,))

## function
Straight.apply(<W> * <T>)[0] * <R>
<R> * Scale.apply(<S>, <T>)
<R> * Parts.apply(<S>, <T>)[0]
Clip.apply(<W> * <T>, 0.5)[0] * <R>

## batch-norm 3
<N> = F.batch_norm(<R>, mean, var, <B>, <B>, True, 0.2)
<N>, buffers = norm(p['norm'], buffers, <R>)

## batch-norm
<N>, buffers = fzero.remat(norm)(p['norm'], buffers, <R>)
""")
"""Values of this rank's examples together."""

OWN = rules("""
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
torch.add(<R>.detach(), <B>.detach(), out=torch.zeros(len(x), <D>, dtype=torch.float64))
torch.sum(<R>.detach(), 0, out=torch.zeros(<D>, dtype=torch.float64))

## meets
<X>.sum() * <S>
<X>.mean() * <W>
<W> * <X>.amax() + <B>
<R>[0] @ <W> + <B>
<W>.new_zeros(3) + <X>.sum()
torch.where(<X>.sum() > 0, <S>, <S> + 1)
<X>.norm() / (1 + <B>.norm())
""")
"""Values of this rank's examples together that the step returns and nothing else depends on."""

TERMS = rules("""
<X>.square().mean()
<X>.mean()
<X>.double().cos().mean()
F.mse_loss(<R>, x)
F.cross_entropy(<R>, t % <D>)
F.nll_loss(F.log_softmax(<R> * <B>, -1), t % <D>)
F.binary_cross_entropy_with_logits(<R> + <B>, (x > 0).double())
<X>.square().sum() / len(x)
(<R>.mean(0) @ <W>).sum()
torch.stack([row.square().mean() for row in <X>]).mean()
sum(row.square().sum() for row in <R>) / len(x)
torch.einsum("ni,ij,nj->n", <R>, <W>, <R>).mean()
torch.dot(<R>.mean(0), <B>)

## checks-of-values 0.2
F.gaussian_nll_loss(<R>, x, <R>.square() + 0.5)

## meets
(<B> * <R>.mean(0)).sum()
(<W> * <X>.mean()).sum()
(<L> * <X>.mean()).mean()
(<W> + <X>.mean()).mean()
<S> * <X>.mean()
<C>[0] * <X>.mean()
<X>.mean() / (1 + <S>.square())
(<W> @ <R>.mean(0) + <B>).sum()
F.smooth_l1_loss(<R>, x) * <S>
""")
"""Means over examples, and linear functions of such means."""

LOCAL_TERMS = rules("""
<X>.square().sum()
<X>.double().logsumexp(0).mean()
<X>.max()
<X>.norm()
<X>.mean().square()

## meets
<T> * <S>
(<W> * <T>).square().mean()
(<W> + <T>).square().mean()
(<T> - <B>).square().sum()
(<S> - <T>).square()
(<W> @ <R>[0] + <B>).square().sum()
""")
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

## total-norm
0.1 * torch.nn.utils.get_total_norm([<L>, <L>])
""")
"""Numbers of leaves."""

NUMBERS = rules("""
<X>.mean()
<X>.max()
<X>.sum() / <D>
x[0, 0]
<R>[0].mean()
x.mean()
x.mean().tanh()
""")
"""What `<T>` may be."""
