"""FlexAttention in a step. torch has its gradient on GPUs; below its checks also on CPU, where the tests run it."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from functools import partial
from typing import Any

import fake_cuda
import pytest
import torch
from programs import names
from torch import Tensor, fx
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import flop_registry

import fzero
from fzero import optim, tree
from fzero.base.errors import FzeroError
from fzero.base.torch_private import FakeTensorMode
from fzero.base.torch_private_operators import flex_attention as operator
from fzero.base.torch_private_operators import flex_attention_backward
from fzero.program import ops
from fzero.program.operation import values_of
from fzero.program.ops import attention
from fzero.program.work import work

MESH = fzero.VirtualMesh(fsdp=2)
ROWS, HEADS, LENGTH, WIDTH = 4, 2, 8, 4
SIZE = HEADS * WIDTH
draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
PARAMS = {name: draw(SIZE, SIZE) / 2 for name in ("q", "k", "v")} | {"bias": draw(HEADS, 2 * LENGTH)}
X = draw(ROWS, LENGTH, SIZE)
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2]]).repeat(ROWS, 1) + torch.arange(ROWS)[:, None] // 2
BATCH = {"x": X, "documents": DOCUMENTS}
OPTIONS = {
    "BACKEND": "AUTO", "PRESCALE_QK": False, "ROWS_GUARANTEED_SAFE": False, "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True, "OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": False,
}  # fmt: skip


def whole(params: Any) -> dict[str, Tensor]:
    return {name: getattr(leaf, "full_tensor", lambda leaf=leaf: leaf)() for name, leaf in params.items()}


def make_heads(p: dict[str, Tensor], x: Tensor) -> list[Tensor]:
    return [(x @ p[name]).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for name in "qkv"]


def make_mask(documents: Tensor) -> BlockMask:
    def is_seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (documents[b, i] == documents[b, j])

    return create_block_mask(is_seen, len(documents), None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=4)


def attend(params: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """By torch's operator, below the check that refuses a gradient on CPU."""
    p = whole(params)
    bias = params["bias"]  # a leaf, not whole
    mask = make_mask(batch["documents"]).as_tuple()
    query, key, value = make_heads(p, batch["x"])

    def change(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return 2 * torch.tanh(score / 2) + bias[None][0][h, i - j + LENGTH]

    out, lse, _ = operator(query, key, value, change, mask, WIDTH**-0.5, dict(OPTIONS))
    return out, lse * math.log(2)


def attend_plainly(params: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """By matrices of all pairs."""
    p, at, documents = whole(params), torch.arange(LENGTH), batch["documents"]
    query, key, value = make_heads(p, batch["x"])
    scores = 2 * torch.tanh(query @ key.mT * WIDTH**-0.5 / 2) + p["bias"][:, at[:, None] - at + LENGTH]
    seen = (at[:, None] >= at) & (documents[:, :, None] == documents[:, None])
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def loss_of(attention: Any, params: Any, batch: Any) -> Tensor:
    out, lse = attention(params, batch)
    return out.square().mean() + lse.sin().mean()


@pytest.mark.parametrize(
    "options",
    [{"stage": 3}, {"stage": 1, "wrap": fzero.remat}, {"stage": 3, "wrap": partial(fzero.remat, policy="dots")}],
    ids=["stage 3", "remat", "dots"],
)
def test_value_and_gradient_are_those_of_plain_attention(options: Any) -> None:
    wrap = options.pop("wrap", lambda fn: fn)
    step = fzero.simulate(fzero.value_and_grad(lambda p, b: loss_of(wrap(attend), p, b)), MESH, **options)
    params = fzero.partition(PARAMS, MESH)
    value, grads = step(params, BATCH)
    plain = {name: leaf.clone().requires_grad_() for name, leaf in PARAMS.items()}
    expected = loss_of(attend_plainly, plain, BATCH)
    expected.backward()
    torch.testing.assert_close(value.mean(), expected.detach())
    for name, grad in fzero.unpartition(grads).items():
        torch.testing.assert_close(grad, plain[name].grad, rtol=1e-4, atol=1e-6)
    counted = Counter(names(step.trace(params, BATCH)))
    assert counted["flex_attention"] == 1 + (wrap is fzero.remat)
    assert counted["flex_attention_backward"] == 1


def test_each_of_two_attentions_has_the_gradients_that_it_is_asked_for() -> None:
    """The second one captures a bias without a gradient, of the form of the first one's."""

    def loss(params: Any, batch: Any) -> Tensor:
        frozen = params | {"bias": whole(params)["bias"].detach()}
        return loss_of(attend, params, batch) + loss_of(attend, frozen, batch)

    grads = fzero.simulate(fzero.grad(loss), MESH)(fzero.partition(PARAMS, MESH), BATCH)
    plain = {name: leaf.clone().requires_grad_() for name, leaf in PARAMS.items()}
    frozen = plain | {"bias": PARAMS["bias"]}
    (loss_of(attend_plainly, plain, BATCH) + loss_of(attend_plainly, frozen, BATCH)).backward()
    for name, grad in fzero.unpartition(grads).items():
        torch.testing.assert_close(grad, plain[name].grad, rtol=1e-4, atol=1e-6)


def test_policies_are_asked_about_the_operator_of_torch() -> None:
    """As those of torchtitan name it."""
    for policy, runs in ([operator], 1), ([], 2):
        fn = fzero.remat(attend, policy)
        step = fzero.simulate(fzero.grad(lambda p, b, fn=fn: loss_of(fn, p, b)), MESH)
        assert names(step.trace(fzero.partition(PARAMS, MESH), BATCH)).count("flex_attention") == runs


def test_without_a_gradient_it_is_what_torch_computes_uncompiled() -> None:
    def see(params: Any, batch: Any) -> Tensor:
        return flex_attention(*make_heads(whole(params), batch["x"]), block_mask=make_mask(batch["documents"]))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's advice to compile it
        got = fzero.simulate(see, MESH)(fzero.partition(PARAMS, MESH), BATCH)
        assert torch.equal(got, see(PARAMS, BATCH))
        compiled = fzero.simulate(torch.compile(see), MESH)(fzero.partition(PARAMS, MESH), BATCH)
    assert torch.equal(got, compiled)


def test_a_mask_made_outside_of_the_step_is_a_constant() -> None:
    mask = make_mask(DOCUMENTS[:2])
    other = {**BATCH, "documents": DOCUMENTS[:2].repeat(2, 1)}

    def see(params: Any, batch: Any, mask: Any) -> Tensor:
        return flex_attention(*make_heads(whole(params), batch["x"]), block_mask=mask or make_mask(batch["documents"]))

    params = fzero.partition(PARAMS, MESH)
    expected = fzero.simulate(lambda p, b: see(p, b, None), MESH)(params, other)
    assert torch.equal(fzero.simulate(lambda p, b: see(p, b, mask), MESH)(params, other), expected)


def test_mistakes_are_named() -> None:
    heads = partial(make_heads, PARAMS)
    plain = partial(flex_attention, return_aux=AuxRequest(lse=True))
    values = torch.tensor
    cases: dict[str, tuple[Any, str]] = {
        "a gradient on CPU": (
            fzero.grad(lambda p, b: flex_attention(*make_heads(whole(p), b["x"])).sum()),
            "no gradient of flex_attention on this device.*sdpa",
        ),
        "a random score": (
            lambda p, b: plain(*heads(b["x"]), score_mod=lambda s, *_: s + torch.rand_like(s))[0],
            "score_mod that draws random numbers, by rand",
        ),
        "a write": (
            lambda p, b: plain(*heads(b["x"]), score_mod=lambda s, b, h, i, j: X[0, 0, 0].add_(1) * s)[0],
            "score_mod that writes into a tensor, by add_",
        ),
        "a tensor of values": (
            lambda p, b: plain(*heads(b["x"]), score_mod=lambda s, b, h, i, j: s + values([0.0, 1.0])[h])[0],
            "score_mod that makes a tensor of values",
        ),
        "a second derivative": (
            lambda p, b: torch.func.grad(
                lambda p: tree.leaves(torch.func.grad(lambda p: loss_of(attend, p, b))(p))[0].square().sum()
            )(whole(p)),
            "flex_attention has no second derivative",
        ),
        "a tangent": (
            lambda p, b: torch.func.jvp(lambda p: loss_of(attend, p, b), (whole(p),), (whole(p),)),
            "no forward-mode derivative",
        ),
        "vmap": (lambda p, b: torch.func.vmap(lambda x: plain(*heads(x[None]))[0])(b["x"]), "mapped by vmap"),
    }
    failed = []
    for name, (step, words) in cases.items():
        with warnings.catch_warnings(), pytest.raises(FzeroError) as caught:
            warnings.simplefilter("ignore")
            fzero.simulate(step, MESH)(fzero.partition(PARAMS, MESH), BATCH)
        said = str(caught.value)
        words = words.replace(".*", "\0").split("\0")
        if not all(word in said for word in words) or __file__ not in said:
            failed.append(f"{name}: {said}")
    assert not failed, "\n".join(failed)


def find(program: Any, target: Any) -> fx.Node:
    return next(node for node in program.graph.nodes if node.target is target)


def test_flops_are_those_of_torch() -> None:
    if operator not in flop_registry:
        pytest.skip("torch 2.11 does not count the flops of flex_attention")
    step = fzero.simulate(fzero.grad(lambda p, b: loss_of(attend, p, b)), MESH)
    program = step.trace(fzero.partition(PARAMS, MESH), BATCH)
    for target, theirs in (ops.flex_attention, operator), (ops.flex_attention_backward, flex_attention_backward):
        node = find(program, target)
        assert work(node).flops == flop_registry[theirs](*values_of(node.args)[:6], out_val=node.meta["val"]) > 0


def test_a_graph_for_inductor_computes_what_the_node_does() -> None:
    """`inductor` gets it where the node runs on a GPU. Here it runs as it is."""
    step = fzero.simulate(fzero.grad(lambda p, b: loss_of(attend, p, b)), MESH)
    program = step.trace(fzero.partition(PARAMS, MESH), BATCH)
    for target, call, run in (
        (ops.flex_attention, attention._call, attention._run),
        (ops.flex_attention_backward, attention._call_backward, attention._run_backward),
    ):
        node = find(program, target)
        given = fx.map_arg(node.args, lambda x: make_values(x.meta["val"]))
        module, _ = attention.make_graph(call, node.args[-1], attention.describe(node), (0, 1, 2))
        made, expected = module(*attention.flatten(given[:-1])), run(*given)
        torch.testing.assert_close(list(made), list(expected)[:3], equal_nan=True)


def make_values(like: Tensor) -> Tensor:
    shape, strides = tuple(like.shape), like.stride()
    made = torch.empty_strided(shape, strides, dtype=like.dtype)
    return made.copy_(draw(shape)) if like.is_floating_point() else made.zero_()


# a Llama of transformers, on fake CUDA


def trace_llama(is_padded: bool) -> tuple[str, list[str], int, list[int]]:
    """The listing of a training step, the names of its nodes, how many different attentions it has, and the bytes that
    they need beside their results."""
    warnings.simplefilter("ignore")
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, attn_implementation="flex_attention", use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    if is_padded:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    params, buffers, apply = fzero.lower_stateful(model)
    optimizer, mode = optim.adamw(1e-3), FakeTensorMode()

    def loss_fn(params: Any, buffers: Any, tokens: Tensor, seen: Tensor) -> Tensor:
        mask = {"attention_mask": seen} if is_padded else {}
        return apply(params, buffers, input_ids=tokens, labels=tokens, **mask)[0].loss

    def train_step(params: Any, state: Any, buffers: Any, tokens: Tensor, seen: Tensor) -> Any:
        loss, grads = fzero.value_and_grad(loss_fn)(params, buffers, tokens, seen)
        updates, state = optimizer.update(grads, state, params)
        return optim.apply_updates(params, updates), state, loss

    def put(leaf: Any) -> Any:
        with mode:
            return type(leaf)(torch.empty(leaf.local.shape, dtype=leaf.dtype, device="cuda:0"), *leaf.form[:3])

    params, buffers = (tree.map(put, fzero.partition(x, MESH, device="meta")) for x in (params, buffers))
    with mode:
        tokens, seen = (torch.zeros(4, 128, dtype=torch.int64, device="cuda:0") for _ in range(2))
        state = optimizer.init(params)
    program = fzero.simulate(train_step, MESH).trace(params, state, buffers, tokens, seen)
    program.memory()
    nodes = [node for node in program.graph.nodes if node.target in (ops.flex_attention, ops.flex_attention_backward)]
    return str(program), names(program), len({node.args[-1] for node in nodes}), [work(node).flops for node in nodes]


def trace_llamas() -> dict[bool, tuple[str, list[str], int, list[int]]]:
    return {is_padded: trace_llama(is_padded) for is_padded in (False, True)}


@pytest.fixture(scope="module")
def llamas() -> dict[bool, tuple[str, list[str], int, list[int]]]:
    return fake_cuda.run(trace_llamas)


@pytest.mark.parametrize("is_padded", [False, True], ids=["plain", "padded, checkpointed"])
def test_a_llama_of_transformers_is_traced_for_cuda(llamas: dict[bool, Any], is_padded: bool) -> None:
    listing, called, different, flops = llamas[is_padded]
    assert listing.count("attention       flex_attention\n") == (4 if is_padded else 2)
    assert listing.count("attention       flex_attention_backward\n") == 2
    assert called.count("flex_attention") == (4 if is_padded else 2)
    assert different == 1  # all layers have equal ones
    pairs, width = 2 * 4 * 128 * 128, 8
    assert flops[0] == 4 * pairs * width and flops[-1] == 10 * pairs * width
    assert not any("softmax" in name and "log" not in name for name in called)


def test_scores_of_all_pairs_count_where_torch_makes_them() -> None:
    def see(params: Any, batch: Any) -> Tensor:
        return flex_attention(*make_heads(whole(params), batch["x"]))

    def see_fused(params: Any, batch: Any) -> Tensor:
        return scaled_dot_product_attention(*make_heads(whole(params), batch["x"]))

    long = {"x": draw(2, 256, SIZE)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peaks = [
            fzero.simulate(fn, MESH).trace(fzero.partition(PARAMS, MESH), long).memory().peak for fn in (see, see_fused)
        ]
    assert peaks[0] - peaks[1] > attention.SCORES * 4 * HEADS * 256 * 256
