"""Lowering against the module itself: the same names, memory, outputs and gradients, bit for bit."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vjp
from torch.fx.experimental.proxy_tensor import make_fx

import fzero
from fzero import tree
from fzero.base.errors import FzeroError
from fzero.values.lowering import lower, lower_stateful


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


class Mixed(nn.Module):
    """Nested lists and dicts, a shared layer, a bare parameter, submodules without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))
        self.grid = nn.ModuleList([nn.ModuleList([nn.Linear(4, 4), nn.GELU()]), nn.ModuleList([nn.Linear(4, 4)])])
        self.named = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "none": nn.Identity()})
        self.loose = nn.ParameterList([torch.randn(4), torch.randn(4)])
        self.words = nn.ParameterDict({"x": torch.randn(4)})
        self.again = self.named["a"]
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        for row in self.grid:
            for layer in row:
                x = layer(x)
        x = self.again(self.act(self.named["a"](x * self.scale)))
        return x + self.loose[0] * self.loose[1] + self.words["x"]


class Tied(nn.Module):
    """A token embedding that is also the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 11, bias=False)
        self.embed = nn.Embedding(11, 8)
        self.embed.weight = self.head.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens).tanh())


class Rotary(nn.Module):
    """Two constant buffers, one of them not persistent, inside of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.register_buffer("cos", torch.randn(3, 4), persistent=False)
        self.register_buffer("mask", torch.ones(3, 4).tril())

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x) * self.cos * self.mask


class Encoder(nn.TransformerEncoderLayer):
    def __init__(self) -> None:
        super().__init__(8, 2, 16, dropout=0.0, batch_first=True)


class SelfAttention(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x, x, x)  # type: ignore[return-value]


def floats(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(3, 5), floats(2, 3)),
    "sequential": (lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), nn.Softmax(-1)), floats(2, 3)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Flatten()), floats(2, 3, 5, 5)),
    "attention": (lambda: SelfAttention(8, 2, batch_first=True), floats(2, 3, 8)),
    "encoder": (Encoder, floats(2, 3, 8)),
    "lstm": (lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True), floats(5, 2, 3)),
    "gru": (lambda: nn.GRU(3, 4, bias=False), floats(5, 2, 3)),
    "mixed": (Mixed, floats(2, 4)),
    "tied": (Tied, lambda: torch.randint(11, (2, 6))),
    "rotary": (lambda: nn.Sequential(Rotary(), Rotary()), floats(3, 4)),
    "batch norm in eval mode": (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval(), floats(2, 3)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), floats(2, 3)),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor]:
    make_module, make_input = CASES[request.param]
    return make_module(), make_input()


def tensors(output: Any) -> list[Tensor]:
    return tree.leaves(output)


def check_equal(actual: Any, expected: Any) -> None:
    """The same structure, and the same tensors bit for bit."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def squared(output: Any) -> Tensor:
    return torch.stack([(part * part).sum() for part in tensors(output)]).sum()


def traced(fn: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """The graph of `fn`, traced with fake tensors and run on real ones."""
    return make_fx(fn, tracing_mode="fake", _allow_non_fake_inputs=True)(*args)


# ---- the tree


def test_paths_are_state_dict_keys_and_leaves_share_its_memory(case: tuple[nn.Module, Tensor]) -> None:
    module, _ = case
    params, _ = lower(module)
    named = dict(zip(tree.paths(params), tree.leaves(params)))
    assert named.keys() == dict(module.named_parameters()).keys() <= module.state_dict().keys()
    for name, param in module.named_parameters():
        assert named[name].data_ptr() == param.data_ptr()
        assert not named[name].requires_grad


def test_the_tree_mirrors_the_module() -> None:
    params, _ = lower(Mixed())
    shapes = tree.map(lambda leaf: list(leaf.shape), params)
    linear = {"weight": [4, 4], "bias": [4]}
    assert shapes == {
        "scale": [4],
        "grid": [[linear, {}], [linear]],
        "named": {"a": {"weight": [4, 4]}},
        "loose": [[4], [4]],
        "words": {"x": [4]},
    }


def test_list_positions_are_kept_where_layers_have_no_parameters() -> None:
    layers = nn.Sequential(nn.ReLU(), nn.Linear(2, 2), nn.Sequential(nn.ReLU()), nn.Linear(2, 2), nn.ReLU())
    params, _ = lower(layers)
    assert [sorted(entry) for entry in params] == [[], ["bias", "weight"], [], ["bias", "weight"], []]


def test_a_list_with_other_names_is_a_dict() -> None:
    layers = nn.Sequential()
    layers.add_module("first", nn.Linear(2, 2))
    layers.add_module("1", nn.Linear(2, 2))
    params, _ = lower(layers)
    assert sorted(tree.paths(params)) == ["1.bias", "1.weight", "first.bias", "first.weight"]


def test_tied_weights_are_one_leaf_at_their_first_name() -> None:
    params, _ = lower(Tied())
    assert tree.paths(params) == ["head.weight"]


def test_a_shared_layer_is_one_leaf_and_keeps_its_list_positions() -> None:
    layer = nn.Linear(3, 3)
    module = nn.Sequential(layer, nn.Tanh(), layer)
    params, apply = lower(module)
    x = torch.randn(2, 3)
    assert tree.paths(params) == ["0.bias", "0.weight"] and len(params) == 3
    check_equal(apply(params, x), module(x))


def test_a_module_on_the_meta_device_lowers_to_meta_leaves() -> None:
    with torch.device("meta"):
        params, apply = lower(Encoder())
    assert all(leaf.is_meta for leaf in tree.leaves(params))
    assert apply(params, torch.empty(2, 3, 8, device="meta")).shape == (2, 3, 8)


def test_the_module_can_be_freed() -> None:
    module = Mixed()
    x = torch.randn(2, 4)
    expected, alive = module(x).detach(), weakref.ref(module)
    params, apply = lower(module)
    del module
    gc.collect()
    assert alive() is None
    check_equal(apply(params, x), expected)


def test_apply_holds_no_parameter() -> None:
    params, apply = lower(Mixed())
    pointers = {leaf.data_ptr() for leaf in tree.leaves(params)}
    del params
    gc.collect()
    alive = [value for value in gc.get_objects() if type(value) in (Tensor, nn.Parameter) and not value.is_meta]
    assert apply is not None and not pointers & {pointer(tensor) for tensor in alive}


def pointer(tensor: Tensor) -> int | None:
    """The address of a tensor's memory; None for a wrapper of torch.func, which an earlier test may have left."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return None


def test_repr_counts_the_parameters() -> None:
    assert repr(lower(nn.Linear(30, 50))[1]) == "Apply(Linear, 1,550 parameters in 2 leaves)"
    stateful = lower_stateful(nn.BatchNorm1d(3))[2]
    assert repr(stateful) == "StatefulApply(BatchNorm1d, 6 parameters in 2 leaves, 3 buffers)"


# ---- the function


def test_outputs_and_gradients_are_the_module_s(case: tuple[nn.Module, Tensor]) -> None:
    """Bit for bit under plain autograd: leaves require gradients as the module's parameters do."""
    module, x = case
    params, apply = lower(module)
    params = tree.map(lambda leaf: leaf.requires_grad_(), params)
    output, expected = apply(params, x), module(x)
    check_equal(output, expected)
    squared(output).backward()
    squared(expected).backward()
    check_equal(tree.map(lambda leaf: leaf.grad, params), grads_of(module))


def grads_of(module: nn.Module) -> Any:
    """The tree of the `.grad` of the module's parameters."""
    named = dict(module.named_parameters())
    return tree.map_with_path(lambda path, _: named[path].grad, lower(module)[0])


def test_vjp_gives_the_gradients_of_backward(case: tuple[nn.Module, Tensor]) -> None:
    """In float64, to the default 1e-7: for a few layers (LSTM, conv) torch.func runs other kernels than autograd."""
    module, x = case[0].double(), case[1].double() if case[1].is_floating_point() else case[1]
    params, apply = lower(module)
    loss, pull = vjp(lambda params: squared(apply(params, x)), params)
    squared(module(x)).backward()
    torch.testing.assert_close(loss, squared(module(x)).detach())
    torch.testing.assert_close(pull(torch.ones_like(loss))[0], grads_of(module))


def test_a_traced_gradient_replays_bit_for_bit(case: tuple[nn.Module, Tensor]) -> None:
    module, x = case
    params, apply = lower(module)
    leaves, treedef = tree.flatten(params)

    def step(leaves: list[Tensor], x: Tensor) -> list[Tensor]:
        return tree.leaves(grad(lambda p: squared(apply(p, x)))(tree.unflatten(treedef, leaves)))

    check_equal(traced(step, leaves, x)(leaves, x), step(leaves, x))


def test_arguments_are_the_modules_own() -> None:
    class Named(nn.Linear):
        def forward(self, input: Tensor, *, params: float = 1.0, buffers: int = 0) -> tuple[Tensor, float]:
            return super().forward(input) * params + buffers, params

    module = Named(2, 2)
    params, apply = lower(module)
    params = tree.map(lambda leaf: leaf.requires_grad_(), params)
    x = torch.randn(2)
    check_equal(apply(params, input=x, params=3.0, buffers=2), module(x, params=3.0, buffers=2))


def test_dropout_is_that_of_the_mode_at_lowering() -> None:
    module = nn.Dropout(0.5)
    train, evaluate = lower(module.train())[1], lower(module.eval())[1]
    x = torch.ones(64)
    check_equal(evaluate({}, x), x)
    torch.manual_seed(1)
    expected = module.train()(x)
    torch.manual_seed(1)
    check_equal(train({}, x), expected)


class Slice:
    """A stand-in for `Sharded`."""

    def __init__(self, local: Tensor, shape: tuple[int, ...]) -> None:
        self.local, self.shape = local, torch.Size(shape)

    def full_tensor(self) -> Tensor:
        return self.local.reshape(self.shape)


def test_leaves_with_a_full_tensor_are_gathered() -> None:
    module = Mixed()
    params, apply = lower(module)
    slices = tree.map(lambda leaf: Slice(leaf.reshape(-1), leaf.shape), params)
    x = torch.randn(2, 4)
    with torch.no_grad():
        check_equal(apply(slices, x), module(x))


def test_frozen_leaves_are_split_off_and_merged() -> None:
    module = Mixed()
    params, apply = lower(module)
    trainable, frozen = tree.split(params, lambda path, leaf: path.startswith("grid.1"))
    x = torch.randn(2, 4)
    leaves, treedef = tree.flatten(trainable)
    grads = grad(lambda ls: squared(apply(tree.merge(tree.unflatten(treedef, ls), frozen), x)))(leaves)
    squared(module(x)).backward()
    check_equal(grads, [module.grid[1][0].bias.grad, module.grid[1][0].weight.grad])


# ---- constant buffers


def test_buffers_follow_the_parameters_to_their_device() -> None:
    params, apply = lower(Rotary())
    meta = tree.map(lambda leaf: leaf.to("meta"), params)
    assert apply(meta, torch.empty(3, 4, device="meta")).is_meta
    assert not apply(params, torch.randn(3, 4)).is_meta


def test_buffers_moved_inside_a_trace_are_of_no_trace() -> None:
    """Buffers that move under `vjp` under `make_fx` are plain tensors, and later calls get the same ones."""
    params, apply = lower(Rotary())
    meta, x = tree.map(lambda leaf: leaf.to("meta"), params), torch.empty(3, 4, device="meta")

    def step(weight: Tensor, x: Tensor) -> Tensor:
        return vjp(lambda w: apply({"proj": {**meta["proj"], "weight": w}}, x), weight)[0]

    traced(step, meta["proj"]["weight"], x)
    moved = apply._constants.on_device_of(tree.leaves(meta))
    assert {type(buffer) for buffer in moved.values()} == {Tensor}
    assert all(not torch._C._functorch.is_functorch_wrapped_tensor(buffer) for buffer in moved.values())
    assert moved is apply._constants.on_device_of(tree.leaves(meta))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="moves buffers to a GPU")
def test_buffers_follow_the_parameters_to_a_gpu_inside_a_trace() -> None:
    module = Rotary()
    params, apply = lower(module)
    leaves, treedef = tree.flatten(tree.map(lambda leaf: leaf.cuda(), params))
    x = torch.randn(3, 4, device="cuda")
    graph = traced(lambda leaves, x: apply(tree.unflatten(treedef, leaves), x), leaves, x)
    check_equal(graph(leaves, x), module.cuda()(x).detach())


def test_a_buffer_without_data_is_refused() -> None:
    with torch.device("meta"):
        _, apply = lower(Rotary())
    params, _ = lower(Rotary())
    with pytest.raises(FzeroError, match=r"^cos: this buffer is on the meta device, the parameters are on cpu; give"):
        apply(params, torch.randn(3, 4))


def test_a_table_kept_in_an_attribute_does_not_outlive_the_call() -> None:
    class Caching(nn.Linear):
        table: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.table is None:
                self.table = x.new_ones(x.shape) * 2
                self.register_buffer("late", self.table)
            return super().forward(x) * self.table

    module, x = Caching(3, 3), torch.randn(2, 3)
    params, apply = lower(module)
    for _ in range(2):
        graph = traced(lambda weight, x: apply({**params, "weight": weight}, x), params["weight"], x)
        check_equal(graph(params["weight"], x), module(x).detach())
    check_equal(apply(params, x), module(x).detach())


def test_hooks_that_a_forward_registers_once_run_once_in_each_call() -> None:
    """As transformers does to return hidden states."""

    class Recording(nn.Module):
        is_recording = False

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            if not self.is_recording:
                self.inner.register_forward_pre_hook(lambda _, args: (args[0] + 1,))
                self.inner.register_forward_hook(lambda _, args, kwargs, output: 2 * output, with_kwargs=True)
                self.is_recording = True
            return self.inner(x)

    x = torch.randn(2, 3)
    params, apply = lower(Recording())
    for _ in range(3):
        torch.testing.assert_close(
            apply(params, x), 2 * nn.functional.linear(x + 1, params["inner"]["weight"], params["inner"]["bias"])
        )


# ---- buffers that change


class Counter(nn.Module):
    """Changes one buffer in place and assigns another; a third stays."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.register_buffer("calls", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("fixed", torch.ones(3))
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        self.inner.calls.add_(1)
        self.mean = 0.9 * self.mean + 0.1 * x.detach()
        return self.weight * x * self.mean * self.inner.calls + self.fixed


class Assigning(Counter):
    def forward(self, x: Tensor) -> Tensor:
        self.mean = x.detach()
        return self.weight * x


class InPlace(Counter):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.inner.calls += 1
        return self.weight * x


@pytest.mark.parametrize(
    ("layer", "path"),
    [
        (nn.BatchNorm1d(3), "running_mean"),
        (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), "1.running_mean"),
        (nn.InstanceNorm1d(3, track_running_stats=True), "running_mean"),
    ],
)
def test_layers_with_running_statistics_are_refused_at_once(layer: nn.Module, path: str) -> None:
    with pytest.raises(FzeroError, match=rf"^{path}: .* changes this buffer; use fzero.lower_stateful"):
        lower(layer)


def eagerly(fn: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    return fn(x)


def differentiated(fn: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    return vjp(fn, x)[0]


def traced_once(fn: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    return traced(fn, x)


def traced_gradient(fn: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    return traced(grad(lambda x: fn(x).sum()), x)


@pytest.mark.parametrize("how", [eagerly, differentiated, traced_once, traced_gradient])
@pytest.mark.parametrize(("kind", "path"), [(InPlace, "inner.calls"), (Assigning, "mean")])
def test_a_changed_constant_is_refused_by_name(kind: type[nn.Module], path: str, how: Callable[..., Any]) -> None:
    params, apply = lower(kind())
    with pytest.raises(
        FzeroError, match=rf"^{path}: the forward of {kind.__name__} changes this buffer; use fzero.lower"
    ):
        how(lambda x: apply(params, x), torch.randn(3))


class Moved(nn.Module):
    """A forward that moves its buffer to where the input is, as CTRL's does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.shift = nn.Linear(3, 3), nn.Buffer(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        self.shift = self.shift.to(x.device, x.dtype)
        return self.linear(x) + self.shift


def test_a_buffer_that_is_moved_to_where_it_is_stays_a_constant_in_a_gradient() -> None:
    torch.manual_seed(0)
    module, x = Moved(), torch.randn(2, 3)
    params, apply = lower(module)
    gradient = torch.func.grad(lambda params: apply(params, x).square().mean())(params)
    module(x).square().mean().backward()
    assert torch.equal(gradient["linear"]["weight"], module.linear.weight.grad)


@pytest.mark.parametrize("how", [eagerly, differentiated, traced_once, traced_gradient])
def test_a_changed_parameter_is_refused_by_name(how: Callable[..., Any]) -> None:
    class Clamped(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.clamp_(-1, 1)
            return super().forward(x)

    params, apply = lower(Clamped(3, 3))
    with pytest.raises(FzeroError, match="^weight: the forward of Clamped changes this parameter; compute"):
        how(lambda x: apply(params, x), torch.randn(3))
    params, buffers, stateful = lower_stateful(Clamped(3, 3))
    with pytest.raises(FzeroError, match="^weight: the forward of Clamped changes this parameter; compute"):
        how(lambda x: stateful(params, buffers, x)[0], torch.randn(3))


def test_other_errors_in_a_forward_pass_through() -> None:
    params, apply = lower(nn.Linear(3, 3))
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):
        apply(params, torch.randn(2, 4))


@pytest.fixture(params=["batch norm", "counter", "spectral norm"])
def stateful(request: pytest.FixtureRequest) -> Iterator[nn.Module]:
    yield {
        "batch norm": lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU()),
        "counter": Counter,
        "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
    }[request.param]()


def example(module: nn.Module) -> Tensor:
    return torch.randn(3) if isinstance(module, Counter) else torch.randn(5, 3)


def test_several_steps_leave_the_module_s_own_buffers(stateful: nn.Module) -> None:
    params, buffers, apply = lower_stateful(stateful)
    buffers = tree.map(torch.clone, buffers)
    for _ in range(3):
        x = example(stateful)
        output, buffers = apply(params, buffers, x)
        check_equal(output, stateful(x).detach())
        check_equal(dict(zip(tree.paths(buffers), tree.leaves(buffers))), dict(stateful.named_buffers()))


def test_inputs_are_never_changed(stateful: nn.Module) -> None:
    params, buffers, apply = lower_stateful(stateful)
    before = tree.map(torch.clone, (params, buffers))
    apply(params, buffers, example(stateful))
    check_equal((params, buffers), before)


def test_buffers_under_a_traced_gradient(stateful: nn.Module) -> None:
    params, buffers, apply = lower_stateful(stateful)
    buffers = tree.map(torch.clone, buffers)
    x = example(stateful)
    leaves, treedef = tree.flatten((params, buffers))

    def step(leaves: list[Tensor], x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        params, buffers = tree.unflatten(treedef, leaves)

        def loss(params: Any) -> tuple[Tensor, Any]:
            output, new = apply(params, buffers, x)
            return squared(output), new

        grads, new = grad(loss, has_aux=True)(params)
        return tree.leaves(grads), tree.leaves(new)

    results = [step(leaves, x), traced(step, leaves, x)(leaves, x)]
    squared(stateful(x)).backward()
    for grads, new in results:
        check_equal(grads, [param.grad for _, param in sorted(stateful.named_parameters())])
        check_equal(new, [buffer for _, buffer in sorted(stateful.named_buffers())])


def test_vjp_with_aux_gives_plain_buffers() -> None:
    module = nn.BatchNorm1d(3)
    params, buffers, apply = lower_stateful(module)
    x = torch.randn(5, 3)
    before = tree.map(torch.clone, buffers)
    output, pull, new = vjp(lambda params: apply(params, buffers, x), params, has_aux=True)
    check_equal(buffers, before)
    check_equal(output, module(x).detach())
    check_equal(new, dict(module.named_buffers()))
    assert pull(torch.ones_like(output))[0].keys() == {"weight", "bias"}


# ---- refusals


def test_bad_trees_are_refused_by_path() -> None:
    params, apply = lower(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    x = torch.randn(2, 3)
    wrong_shape = tree.map_with_path(lambda path, leaf: leaf.T if path == "2.weight" else leaf, params)
    with pytest.raises(FzeroError, match=r"^2.weight: shape is \[4, 2\], the module has \[2, 4\]"):
        apply(wrong_shape, x)
    with pytest.raises(FzeroError, match=r"^0.bias: this leaf is missing \(4 leaves expected, 3 given\)"):
        apply([{"weight": params[0]["weight"]}, {}, params[2]], x)
    with pytest.raises(FzeroError, match=r"^1.extra: this leaf was not expected \(4 leaves expected, 5 given\)"):
        apply([params[0], {"extra": x}, params[2]], x)
    with pytest.raises(FzeroError, match=r"^0.bias: this leaf is a float, not a tensor"):
        apply([{**params[0], "bias": 1.0}, {}, params[2]], x)


def test_bad_buffers_are_refused_by_path() -> None:
    params, buffers, apply = lower_stateful(nn.BatchNorm1d(3))
    with pytest.raises(FzeroError, match=r"^running_var: this leaf is missing"):
        apply(params, {key: buffers[key] for key in ("running_mean", "num_batches_tracked")}, torch.randn(5, 3))


@pytest.mark.parametrize("lowering", [lower, lower_stateful])
def test_what_is_no_module_is_refused(lowering: Callable[..., Any]) -> None:
    with pytest.raises(FzeroError, match="takes an nn.Module, got a dict"):
        lowering({"weight": torch.ones(3)})
    with pytest.raises(FzeroError, match="takes an nn.Module, got a type"):
        lowering(nn.Linear)
    with pytest.raises(FzeroError, match=r"^1.weight: this lazy parameter has no shape yet; run the module once"):
        lowering(nn.Sequential(nn.ReLU(), nn.LazyLinear(3)))


def test_inference_tensors_are_taken() -> None:
    module, x = Rotary(), torch.randn(3, 4)
    params, apply = lower(module)
    with torch.inference_mode():
        check_equal(apply(tree.map(lambda leaf: leaf * 1, params), x), module(x))
    check_equal(apply(params, x), module(x).detach())


def test_the_module_itself_is_left_alone() -> None:
    module = Mixed()
    before = {name: (id(param), param.requires_grad) for name, param in module.named_parameters()}
    params, apply = lower(module)
    apply(params, torch.randn(2, 4))
    assert {name: (id(param), param.requires_grad) for name, param in module.named_parameters()} == before


# hooks


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def scale_gradient_of_output(module: nn.Module, args: Any, output: Tensor) -> None:
    output.register_hook(lambda gradient: gradient * 3)


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda module: module.register_forward_hook(lambda module, args, output: output * 3),
    "forward pre": lambda module: module.register_forward_pre_hook(lambda module, args: (args[0] * 3,)),
    "of an output": lambda module: module.register_forward_hook(scale_gradient_of_output),
    "backward": lambda module: module.register_backward_hook(
        lambda module, inputs, outputs: tuple(None if g is None else g * 3 for g in inputs)
    ),
}


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("sharded", [False, True], ids=["one device", "sharded"])
def test_hooks_of_modules_run_as_in_the_module(name: str, sharded: bool) -> None:
    module, x = Hooked(), torch.randn(6, 4)
    HOOKS[name](module.first)
    module(x).mean().backward()
    params, apply = lower(module)
    differentiated = fzero.grad(lambda params, x: apply(params, x).mean())
    mesh = fzero.VirtualMesh(fsdp=3)
    if sharded:
        gradient = fzero.simulate(differentiated, mesh)(fzero.partition(params, mesh), x)
    else:
        gradient = differentiated(params, x)
    expected = {name: param.grad for name, param in module.named_parameters()}
    for path, leaf in zip(tree.paths(gradient), tree.leaves(fzero.unpartition(gradient))):
        # sums over 2 rows a rank in place of 6
        torch.testing.assert_close(leaf, expected[path], rtol=1e-5, atol=1e-6)


REFUSED_HOOKS: dict[str, tuple[Callable[[Hooked], Any], str]] = {
    "of a parameter": (lambda m: m.first.weight.register_hook(lambda g: g * 2), r"^first\.weight: a hook waits for"),
    "behind its accumulation": (
        lambda m: m.second.bias.register_post_accumulate_grad_hook(lambda p: None),
        r"^second\.bias: a hook waits for this parameter's gradient.*fzero\.value_and_grad returns",
    ),
    "full backward": (
        lambda m: m.first.register_full_backward_hook(lambda module, gi, go: None),
        r"^first: this module has a full backward hook.*output\.register_hook",
    ),
    "full backward pre": (
        lambda m: m.register_full_backward_pre_hook(lambda module, go: None),
        r"^Hooked: this module has a full backward hook",
    ),
}


@pytest.mark.parametrize("name", REFUSED_HOOKS)
@pytest.mark.parametrize("lowered", [lower, lower_stateful])
def test_hooks_that_would_vanish_are_refused(name: str, lowered: Callable[..., Any]) -> None:
    module = Hooked()
    register, message = REFUSED_HOOKS[name]
    handle = register(module)
    with pytest.raises(FzeroError, match=message):
        lowered(module)
    handle.remove()
    lowered(module)
