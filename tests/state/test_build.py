"""`build` against the plain constructor and `partition`: same trees, same layouts, same bits."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from processes import run, run_cases, values
from torch import Tensor, nn
from torch.nn import init
from torch.nn.utils import parametrizations

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import measure

from fzero import tree, unpartition
from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh
from fzero.state.build.build import build, build_stateful
from fzero.state.build.deferred import SMALL
from fzero.state.build.store import Allocation
from fzero.state.partition import partition
from fzero.state.quantize import quantize
from fzero.values.lowering import lower, lower_stateful

MESH = VirtualMesh(fsdp=3)
MIB = 1 << 20
SEED = 5


def plain(constructor: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(SEED)
    return constructor()


def check_equal(built: tree.Tree, expected: tree.Tree) -> None:
    """The same values on the same layouts, bit for bit."""
    assert tree.flatten(built)[1] == tree.flatten(expected)[1]
    for a, b in zip(tree.leaves(built), tree.leaves(expected)):
        assert (a.form.layout, a.index, a.dtype) == (b.form.layout, b.index, b.dtype)
        assert type(a.local) is Tensor
        assert torch.equal(a.local, b.local), a.path


def check(constructor: Callable[[], nn.Module], mesh: Any = MESH, **how: Any) -> None:
    """`build` returns the values of the plain constructor and `partition`, and leaves nothing behind."""
    before = torch.get_rng_state()
    params, _ = build(constructor, mesh, seed=SEED, **how)
    assert torch.equal(torch.get_rng_state(), before)
    assert not left()
    check_equal(params, partition(lower(plain(constructor))[0], mesh, **how))


def left() -> list[Allocation]:
    """Allocations that have memory. (Others may be alive: the class of a parametrized module keeps the module.)"""
    gc.collect()
    allocations = [allocation for allocation in gc.get_objects() if type(allocation) is Allocation]
    return [allocation for allocation in allocations if allocation.flat is not None or allocation.pieces is not None]


@pytest.fixture(autouse=True, scope="module")
def walk_new_objects_only() -> None:
    """`left` walks the objects that the collector knows, in each test. What earlier files left is not among them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert type(torch.empty(2 * SMALL)) is Tensor, "a mode is still active"


# ---- parity: torch.nn

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(70, 90),
    "linear of a long bias": lambda: nn.Linear(3, 2000),
    "bilinear": lambda: nn.Bilinear(30, 20, 10),
    "conv": lambda: nn.Conv2d(30, 40, 3),
    "transposed conv": lambda: nn.ConvTranspose2d(30, 40, 3),
    "embedding": lambda: nn.Embedding(100, 40, padding_idx=3),
    "embedding bag": lambda: nn.EmbeddingBag(100, 40, padding_idx=3),
    "layer norm": lambda: nn.LayerNorm(3000),
    "group norm": lambda: nn.GroupNorm(2, 3000),
    "prelu": lambda: nn.PReLU(2000),
    "lstm": lambda: nn.LSTM(70, 50, 2, bidirectional=True),
    "gru": lambda: nn.GRU(70, 50, 2),
    "attention": lambda: nn.MultiheadAttention(64, 4, kdim=48, vdim=40, add_bias_kv=True),
    "encoder layer": lambda: nn.TransformerEncoderLayer(64, 4, 128),
    "encoder, by deepcopy": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2),
    "transformer": lambda: nn.Transformer(48, 4, 1, 2, 96, batch_first=True),
    "parameter list": lambda: nn.ParameterList([torch.randn(60, 60) * 0.02, torch.ones(3)]),
    "adaptive softmax": lambda: nn.AdaptiveLogSoftmaxWithLoss(64, 300, [50, 150]),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(60, 100)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(60, 100)),
    "old weight norm": lambda: torch.nn.utils.weight_norm(nn.Linear(60, 100)),  # type: ignore[no-untyped-call]
    "half": lambda: nn.Sequential(nn.Linear(60, 100), nn.Linear(100, 60)).half(),
    "double": lambda: nn.Linear(60, 100, dtype=torch.float64),
    "complex": lambda: nn.Linear(60, 100, dtype=torch.complex64),
    "skip_init": lambda: both(nn.utils.skip_init(nn.Linear, 60, 100), init.normal_),
    "channels last": lambda: nn.Conv2d(30, 40, 3).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_torch(name: str) -> None:
    check(LAYERS[name])


def both(module: nn.Module, initialise: Callable[[Tensor], Any]) -> nn.Module:
    """`module` with all its parameters initialised anew."""
    for param in module.parameters():
        initialise(param)
    return module


INITS: dict[str, Callable[[Tensor], Any]] = {
    "normal": init.normal_,
    "trunc normal": partial(init.trunc_normal_, std=0.02),
    "xavier": init.xavier_uniform_,
    "kaiming": init.kaiming_normal_,
    "orthogonal": init.orthogonal_,
    "sparse": partial(init.sparse_, sparsity=0.3),
    "eye": init.eye_,
    "constant": partial(init.constant_, val=3.0),
    "copy of randn": lambda weight: weight.data.copy_(torch.randn(weight.shape) * 0.02),
    "randn_like": lambda weight: weight.data.add_(torch.randn_like(weight), alpha=0.1),
    "bernoulli": lambda weight: weight.data.bernoulli_(0.3),
    "columns": lambda weight: weight.data.t()[3:9].uniform_(),
    "scaled": lambda weight: weight.data.mul_(0.5).clamp_(-0.02, 0.02),
    "normalized": lambda weight: weight.data.div_(weight.data.norm(dim=1, keepdim=True)),
    "reversed": lambda weight: weight.data.copy_(weight.data.flip(0)),
    "masked": lambda weight: weight.data.masked_fill_(weight.data > 0, 1.0),
    "sorted, out=": lambda weight: torch.sort(
        weight.data.clone(), out=(weight.data, torch.empty(0, dtype=torch.int64))
    ),
    "int view": lambda weight: weight.data.view(torch.int32).bitwise_and_(-65536),
    "real view": lambda weight: torch.view_as_complex(weight.data.view(-1, 2)).mul_(1j),
    "data": lambda weight: setattr(weight, "data", torch.randn(weight.shape)),
    "item": lambda weight: weight.data.fill_(weight.data[3, 3].item()),
    "tolist": lambda weight: weight.data.fill_(sum(weight.data.tolist()[3])),
}


@pytest.mark.parametrize("name", INITS)
def test_a_parent_initialises_its_children_anew(name: str) -> None:
    check(lambda: both(nn.Sequential(nn.Linear(60, 100, bias=False), nn.Linear(100, 60, bias=False)), INITS[name]))


# ---- parity: what constructors do


class Model(nn.Module):
    """A model with tied weights, buffers, bare parameters and a pass over all submodules, as large models have."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(120, 48)
        self.position = nn.Parameter(torch.zeros(1, 64, 48))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(48, 4, 96, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(48, 120, bias=False)
        self.head.weight = self.embed.weight
        angle = torch.outer(torch.arange(64.0), 1 / 10000 ** (torch.arange(0, 48, 2) / 48))
        self.register_buffer("rotary", torch.cat([angle.cos(), angle.sin()], -1), persistent=False)
        self.register_buffer("causal", torch.full((64, 64), -torch.inf).triu(1))
        self.tables = [torch.arange(5000.0), {"x": torch.randn(40, 40)}]
        self.apply(self._init)
        with torch.no_grad():
            for block in self.blocks:
                block.linear2.weight.div_(2)

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0, 0.02)
            if module.bias is not None:
                module.bias.data.zero_()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + (self.position + self.rotary)[:, : tokens.shape[-1]]
        for block in self.blocks:
            x = block(x, src_mask=self.causal[: tokens.shape[-1], : tokens.shape[-1]])
        return self.head(x) + self.tables[0][0] + self.tables[1]["x"][3, 3]


def test_a_model_and_its_function() -> None:
    check(Model)
    params, apply = build(Model, MESH, seed=SEED)
    tokens = torch.arange(24).view(2, 12)
    assert torch.equal(apply(unpartition(params), tokens), lower(plain(Model))[1](lower(plain(Model))[0], tokens))
    assert not left()


class Views(nn.Module):
    """A module that keeps views of one tensor while it works on others."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(90, 40))
        q, k, v = self.a.data.chunk(3)
        row, column = self.a.data[35], self.a.data.t()[7]
        q.normal_()
        self.b = nn.Parameter(torch.randn(90, 40))
        k.copy_(self.b.data[30:60])
        self.c = nn.Parameter(self.b.data.clone())
        v.uniform_()
        self.b.data.zero_()
        row.zero_()
        self.c.data.copy_(self.a.data)
        column.fill_(2)
        self.d = nn.Parameter(self.c.data.t())
        self.c.data.add_(1)
        self.e = nn.Parameter(self.a.data[30:60])
        self.f = nn.Parameter(self.a.data.view(-1)[3:2000:2])
        self.e.data.neg_()


def test_views_alias_through_cuts() -> None:
    check(Views)


def given_values() -> nn.Module:
    """A module whose parameters have values from outside of the constructor."""
    module = nn.Module()
    module.listed = nn.Parameter(torch.tensor([float(x) for x in range(3000)]))
    module.numpy = nn.Parameter(torch.from_numpy(numpy.arange(3000.0)))
    module.copied = nn.Parameter(torch.tensor(numpy.arange(3000.0)).float())
    return module


def test_values_from_outside() -> None:
    check(given_values)


def mapped() -> nn.Module:
    return nn.ParameterList([torch.vmap(lambda row: row / row.norm())(torch.randn(50, 60))])


def inferred() -> nn.Module:
    with torch.inference_mode():
        values = torch.randn(50, 60) * 3
    return nn.ParameterList([values.clone()])


def listwise() -> nn.Module:
    module = nn.Sequential(nn.Linear(50, 60), nn.Linear(60, 50))
    torch._foreach_mul_([param.data for param in module.parameters()], 0.5)
    return module


def loaded() -> nn.Module:
    first, second = nn.Linear(50, 60), nn.Linear(50, 60)
    first.load_state_dict({key: value * 2 for key, value in second.state_dict().items()})
    second.load_state_dict(nn.Linear(50, 60).state_dict(), assign=True)
    return nn.Sequential(first, second)


def sparse() -> nn.Module:
    module = nn.Linear(50, 60)
    module.weight.data.copy_(module.weight.data.relu().to_sparse().to_dense() @ torch.eye(50).to_sparse())
    return module


def printed() -> nn.Module:
    module = nn.Linear(50, 60)
    assert str(module.weight) == "Deferred(float32[60, 50])" and "Linear" in str(module)
    assert isinstance(module.weight, nn.Parameter) and module.weight.requires_grad and module.weight.is_leaf
    assert module.weight.numel() == 3000 and module.weight.stride() == (50, 1) and len(module.weight) == 60
    return module


@pytest.mark.parametrize("constructor", [mapped, inferred, listwise, loaded, sparse, printed])
def test_what_else_constructors_do(constructor: Callable[[], nn.Module]) -> None:
    if constructor is printed:
        build(printed, MESH)
    else:
        check(constructor)


def differentiated() -> nn.Module:
    """A module that takes a gradient step on a parameter in its constructor."""
    module = nn.Linear(60, 50)
    module.weight.square().sum().backward()
    with torch.no_grad():
        module.weight -= 0.1 * module.weight.grad
    module.weight.grad = None
    return module


def test_autograd_works_in_a_constructor() -> None:
    check(differentiated)


def test_empty_memory_counts_as_zeros() -> None:
    params, _ = build(lambda: nn.ParameterList([torch.empty(50, 50)]), MESH)
    assert not params[0].local.any()


@pytest.mark.parametrize("world", [1, 2, 7])
def test_any_number_of_ranks(world: int) -> None:
    check(Model, VirtualMesh(fsdp=world))
    check(Views, VirtualMesh(replica=2, fsdp=world))


def test_keywords_of_partition() -> None:
    check(Model, dtype=torch.bfloat16)
    check(Model, dtype=lambda path, leaf: torch.float64 if "bias" in path else None)
    check(Model, layers=lambda path: "all")
    check(Model, persist=5000, granularity=lambda path, shape: shape[-1])
    with pytest.raises(TypeError, match="sides"):
        build(failing, MESH, sides=3)
    with pytest.raises(FzeroError, match="source_rank: one rank alone"):
        build(failing, MESH, source_rank=0)
    check(Model, chunk=40)


def test_buffers_of_a_module_with_state() -> None:
    params, buffers, apply = build_stateful(lambda: nn.BatchNorm1d(3000), MESH, seed=SEED)
    expected, state, _ = lower_stateful(plain(lambda: nn.BatchNorm1d(3000)))
    check_equal(params, partition(expected, MESH))
    assert all(type(buffer) is Tensor for buffer in tree.leaves(buffers))
    assert all(map(torch.equal, tree.leaves(buffers), tree.leaves(state)))
    _, after = apply(unpartition(params), buffers, torch.randn(4, 3000))
    assert after["num_batches_tracked"] == 1
    spectral = lambda: parametrizations.spectral_norm(nn.Linear(60, 1500))  # noqa: E731
    check_equal(build_stateful(spectral, MESH, seed=SEED)[0], partition(lower_stateful(plain(spectral))[0], MESH))


# ---- parity: transformers

SIZES = {
    **{"vocab_size": 200, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2},
}
GPT2 = {
    "vocab_size": 200,
    "n_positions": 64,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TRANSFORMERS = {
    "LlamaForCausalLM": ("LlamaConfig", {**SIZES, "num_key_value_heads": 2}),
    "GPT2LMHeadModel": ("GPT2Config", GPT2),
    "BertModel": ("BertConfig", SIZES),
    "MixtralForCausalLM": ("MixtralConfig", {**SIZES, "num_key_value_heads": 2, "num_local_experts": 4}),
    "T5ForConditionalGeneration": (
        "T5Config",
        {"vocab_size": 200, "d_model": 48, "d_kv": 12, "d_ff": 96, "num_heads": 4},
    ),
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_models_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[test]'")
    config, sizes = TRANSFORMERS[name]
    check(lambda: getattr(transformers, name)(getattr(transformers, config)(**sizes)))


# ---- refusals


class Failed(Exception):
    pass


def failing() -> nn.Module:
    module = nn.Linear(100, 100)
    assert left()
    raise Failed(module)


def test_a_constructor_that_raises_leaves_nothing_behind() -> None:
    before = torch.get_rng_state()
    with pytest.raises(Failed) as failed:
        build(failing, MESH)
    assert "float32[100, 100]" in repr(failed.value.args[0].weight)
    assert torch.equal(torch.get_rng_state(), before)
    assert not left()


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda weight: weight.detach().numpy(),
    "data_ptr": lambda weight: weight.data_ptr(),
    "untyped_storage": lambda weight: weight.untyped_storage(),
    "__array__": lambda weight: numpy.asarray(weight.detach()),
    ".data =": lambda weight: setattr(weight, "data", torch.empty(0)),
    "resize_": lambda weight: weight.data.resize_(3),
    "set_": lambda weight: weight.data.set_(torch.zeros(3)),
    "plain set_": lambda weight: torch.empty(0).set_(weight.data),
    "resized out=": lambda weight: torch.add(torch.ones(70, 60), 1, out=weight.data),
    "conj": lambda weight: weight.data.to(torch.complex64).conj(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_memory_of_its_own_is_refused(name: str) -> None:
    with pytest.raises(
        FzeroError, match=r"fzero.build: the constructor calls .* on a .*\[.*\], .*; build the module pl"
    ):
        build(lambda: both(nn.Linear(50, 60, bias=False), REFUSED[name]), MESH)
    assert not left()


def test_what_the_constructor_left_elsewhere_is_unusable() -> None:
    kept = []
    build(lambda: kept.append(nn.Linear(50, 60)) or kept[0], MESH)
    with pytest.raises(FzeroError, match=r"this float32\[60, 50\] is of a module that was built already"):
        kept[0](torch.ones(50))
    assert "float32[60, 50]" in repr(kept[0].weight)


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(FzeroError, match="takes an nn.Module, got a Tensor"):
        build(lambda: torch.ones(3), MESH)  # type: ignore[arg-type, return-value]
    with pytest.raises(FzeroError, match=r"running_mean: the forward of BatchNorm1d changes this buffer"):
        build(lambda: nn.BatchNorm1d(3), MESH)
    with pytest.raises(FzeroError, match="meta device"):
        build(lambda: nn.Linear(50, 60, device="meta"), MESH)


def test_a_chunk_of_nothing_is_refused() -> None:
    with pytest.raises(FzeroError, match="chunk: is 0 bytes"):
        build(lambda: nn.Linear(50, 60), MESH, chunk=0)


def test_a_constructor_that_builds_is_refused() -> None:
    with pytest.raises(FzeroError, match="is called inside of a constructor"):
        build(lambda: build(lambda: nn.Linear(3, 3), MESH) and nn.Linear(3, 3), MESH)


def test_a_module_made_before_is_taken() -> None:
    module = nn.Linear(50, 60)
    params, _ = build(lambda: module, MESH)
    check_equal(params, partition(lower(module)[0], MESH))


# ---- ranks


def big(reset: bool) -> nn.Module:
    """Four layers of 16 MiB. With `reset` they are initialised again, and one row of each is written."""
    layers = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4)))
    if reset:
        for layer in layers:
            init.normal_(layer.weight)  # type: ignore[arg-type]
        for layer in layers:
            layer.weight.data[17].zero_()  # type: ignore[operator, index, union-attr]
    return layers


def grown(mesh: Any, reset: bool) -> int | None:
    return measure.growth(lambda: GROWN.append(build(partial(big, reset), mesh)), torch.device("cpu"))


GROWN: list[Any] = []  # keeps the built parameters alive, so that they count


def different(mesh: Any) -> str:
    with pytest.raises(FzeroError) as error:
        build(lambda: both(nn.Linear(50, 60), init.normal_ if mesh.get_local_rank() else init.zeros_), mesh)
    return str(error.value)


def check_layers(mesh: Any) -> None:
    for name in ("encoder, by deepcopy", "orthogonal", "half", "lstm"):
        check(LAYERS[name], mesh)


def check_codes(mesh: Any) -> None:
    """What ranks built is quantized where it lies, as whole leaves are."""
    built, _ = build(Views, mesh, seed=0)
    whole = unpartition(built)
    held, expected = (quantize(each, bits=4, block=16, where="") for each in (built, whole))
    for got, leaf in zip(tree.leaves(unpartition(held)), tree.leaves(expected), strict=True):
        assert torch.equal(got, leaf)


CASES: dict[str, Callable[[Any], Any]] = {
    "model": partial(check, Model),
    "views": partial(check, Views),
    "layers": check_layers,
    "persist": partial(check, Model, persist=5000, dtype=torch.bfloat16),
    "grown": partial(grown, reset=False),
    "grown, reset": partial(grown, reset=True),
    "different": different,
    "codes": check_codes,
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    return run_cases(2, CASES)


@pytest.mark.parametrize("name", ["model", "views", "layers", "persist", "codes"])
def test_on_two_ranks(outcomes: dict[str, Any], name: str) -> None:
    values(outcomes[name])


@pytest.mark.skipif(measure.malloc_in_use() is None, reason="needs mallinfo2 of glibc 2.33")
@pytest.mark.parametrize("name", ["grown", "grown, reset"])
def test_a_rank_holds_its_shards_and_one_parameter(outcomes: dict[str, Any], name: str) -> None:
    for growth in values(outcomes[name]):
        print(f"{name}: {growth / MIB:.1f} MiB")
        assert 32 * MIB < growth < (32 + 16 + 3) * MIB


def test_ranks_that_build_differently_are_named(outcomes: dict[str, Any]) -> None:
    for message in values(outcomes["different"]):
        assert "random state" in message and "rank 0 has" in message and "rank 1 has" in message


def alone(mesh: Any) -> str:
    """Rank 1's constructor fails."""
    try:
        build(lambda: failing() if mesh.get_local_rank() else Views(), mesh)
    except (Failed, FzeroError) as error:
        return f"{type(error).__name__}: {error}"
    return "built"


def test_ranks_that_go_on_hear_of_the_one_that_failed() -> None:
    said, own = run(2, alone)
    assert own.startswith("Failed: Linear(")
    assert said == f"FzeroError: rank 1: could not go on: {own}; mend it there; this rank is fine"
