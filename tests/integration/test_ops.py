"""The operators inside of PyTorch: opcheck, compile, export, autocast, vmap, torch.func, and what has no derivative."""

from __future__ import annotations

import warnings
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.autograd import forward_ad

import flash_ext
from flash_ext import _vmap
from flash_ext.functional import checked_score_options
from flash_ext.ops import ScoreOptions
from tests import reference
from tests.oracle import cumulative, dtypes_of, int32, random, random_rng

OPS = torch.ops.flash_ext
VARLEN = {"cu_seqlens_q": cumulative([4, 0, 5]), "cu_seqlens_k": cumulative([6, 2, 5])}
SEE = torch.rand(1, 1, 9, 13) < 0.7


def qkv(device: str = "cpu", dtype: torch.dtype = torch.float32, packed: bool = False, batch: int = 2) -> list[Tensor]:
    shapes = [(batch, 9, 4, 16), (batch, 13, 2, 16), (batch, 13, 2, 24)]
    return [random(*shape[int(packed) :], dtype=dtype, device=device).requires_grad_() for shape in shapes]


def to_device(options: dict[str, Any], device: str) -> dict[str, Any]:
    return {name: value.to(device) if hasattr(value, "to") else value for name, value in options.items()}


MODES: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "causal": lambda: {"causal": True, "top_left": True, "softmax_scale": 0.3},
    "window_softcap_alibi": lambda: {"window_size": (3, 2), "softcap": 4.0, "alibi_slopes": torch.rand(2, 4)},
    "bias": lambda: {"bias": random(1, 4, 9, 13).requires_grad_()},
    "bias_bfloat16": lambda: {"bias": random(2, 1, 1, 13, dtype=torch.bfloat16).requires_grad_()},
    "mask": lambda: {"mask": SEE},
    "sink": lambda: {"sink": random(4).requires_grad_()},
    "dropout": lambda: {"dropout_p": 0.4, "rng_state": random_rng()},
    "seqused": lambda: {"seqused_q": int32([3, 9]), "seqused_k": int32([0, 7])},
    "varlen": lambda: {**VARLEN, "causal": True},
    "block_mask": lambda: {"block_mask": flash_ext.BlockMask.from_dense(SEE, (4, 32))},
}


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest, device: str) -> tuple[list[Tensor], dict[str, Any]]:
    options = to_device(MODES[request.param](), device)
    return qkv(device, packed=request.param == "varlen"), options


def option_values(q: Tensor, k: Tensor, options: dict[str, Any]) -> ScoreOptions:
    return ScoreOptions(*checked_score_options(q, k, **options))


def detached(values: ScoreOptions) -> ScoreOptions:
    return ScoreOptions(*(value.detach() if isinstance(value, Tensor) else value for value in values))


def opcheck(op: Any, *args: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.library.opcheck(op, args)


# ---- opcheck --------------------------------------------------------------------------------------------------------


def test_opcheck_forward_and_backward(mode: tuple[list[Tensor], dict[str, Any]]) -> None:
    (q, k, v), options = mode
    values = option_values(q, k, options)
    opcheck(OPS.attention_forward.default, q, k, v, *values, False)
    opcheck(OPS.attention_forward.default, q, k, v, *checked_score_options(q, k, **options))
    opcheck(OPS.attention_forward_max_logit.default, q, k, v, *values, False)
    opcheck(OPS.attention_check.default, q, k, v, *values)
    if values[4:] == ScoreOptions(0.0)[4:]:
        opcheck(OPS.attention_forward_plain.default, q, k, v, *values[:4])
    out, lse = (t.detach() for t in OPS.attention_forward(q, k, v, *values))
    tensors = [t.detach() for t in (torch.randn_like(out), torch.randn_like(lse), q, k, v, out, lse)]
    values = detached(values)
    for needed in ([True] * 3, [False, True, False]):
        of_options = [values.bias is not None, values.sink is not None]
        opcheck(OPS.attention_backward.default, *tensors, True, *needed, *of_options, *values)


def test_fake_results_of_every_dtype(device: str) -> None:
    """lse is float64 beside float64, and float32 beside all others."""
    for dtype in dtypes_of(device):
        q, k, v = (t.detach() for t in qkv(device, dtype))
        values = option_values(q, k, {})
        out, lse = OPS.attention_forward(q, k, v, *values)
        assert (out.dtype, lse.dtype) == (dtype, torch.float64 if dtype == torch.float64 else torch.float32)
        backward = (out, lse, q, k, v, out, lse, True, True, True, True, False, False, *values)
        for op, args in (
            (OPS.attention_forward, (q, k, v, *values)),
            (OPS.attention_forward_max_logit, (q, k, v, *values)),
            (OPS.attention_backward, backward),
            (OPS.attention_weights, (q, k, lse, 0, *values)),
            (OPS.attention_decode, (q, k, v, *decode_arguments(device))),
            (OPS.merge, (torch.stack([out, out]), torch.stack([lse, lse]))),
        ):
            torch.library.opcheck(op.default, args, test_utils="test_faketensor")


def test_opcheck_weights(mode: tuple[list[Tensor], dict[str, Any]]) -> None:
    (q, k, v), options = mode
    values = option_values(q, k, options)
    lse = OPS.attention_forward(q, k, v, *values)[1].detach()
    values = option_values(q, k, {**options, "sink": None})
    for dropout_mode in (0, 1, 2) if options.get("dropout_p") else (0,):
        opcheck(OPS.attention_weights.default, q, k, lse.requires_grad_(), dropout_mode, *values)
        weights = OPS.attention_weights(q, k, lse, dropout_mode, *values).detach()
        tensors = [t.detach() for t in (torch.randn_like(weights), q, k, lse)]
        needed = [True, True, False, values.bias is not None]
        opcheck(OPS.attention_weights_backward.default, *tensors, dropout_mode, *needed, *detached(values))


def decode_arguments(device: str, **given: Any) -> tuple[Any, ...]:
    names = [argument.name for argument in OPS.attention_decode.default._schema.arguments][3:]
    defaults = dict.fromkeys(names) | dict(
        max_seqlen_q=0, softmax_scale=0.3, softcap=0.0, window_left=-1, window_right=0, rotary_interleaved=False
    )
    defaults |= dict(num_splits=2, batch_invariant=False, allow_tf32=False)
    return tuple(to_device(defaults | given, device)[name] for name in names)


@pytest.mark.op("attention_decode")
@pytest.mark.parametrize("paged", [False, True])
def test_opcheck_decode(device: str, paged: bool) -> None:
    q, k_cache, v_cache = (random(*shape, device=device) for shape in [(2, 3, 4, 16), (4, 64, 2, 16), (4, 64, 2, 24)])
    where = {"block_table": int32([[0, 2], [3, 1]])} if paged else {"cache_batch_idx": int32([3, 0])}
    values = decode_arguments(device, cache_seqlens=int32([40, 7]), **where)
    for op in (OPS.attention_decode, OPS.attention_decode_check):
        opcheck(op.default, q, k_cache, v_cache, *values)


@pytest.mark.op("attention_decode_append")
def test_opcheck_decode_append(device: str) -> None:
    q, k_cache, v_cache = (random(*shape, device=device) for shape in [(2, 3, 4, 16), (2, 64, 2, 16), (2, 64, 2, 24)])
    k, v = random(2, 3, 2, 16, device=device), random(2, 3, 2, 24, device=device)
    options = {"cache_seqlens": int32([40, 7]), "rotary_cos": random(64, 8), "rotary_sin": random(64, 8)}
    opcheck(OPS.attention_decode_append.default, q, k_cache, v_cache, k, v, *decode_arguments(device, **options))


@pytest.mark.op("merge")
@pytest.mark.parametrize("shape", [(3, 2, 7, 4, 16), (3, 7, 4, 16)], ids=["dense", "varlen"])
def test_opcheck_merge(device: str, shape: tuple[int, ...]) -> None:
    outs = random(*shape, device=device).requires_grad_()
    lses = random(*shape[:-3], shape[-2], shape[-3], device=device).requires_grad_()
    opcheck(OPS.merge.default, outs, lses)
    out, lse = (t.detach() for t in OPS.merge(outs, lses))
    opcheck(OPS.merge_backward.default, out, lse, outs.detach(), lses.detach(), out, lse)
    opcheck(OPS.merge_backward.default, None, lse, outs.detach(), lses.detach(), out, lse)


@pytest.mark.op("dropout_mask")
def test_opcheck_dropout_mask(device: str) -> None:
    opcheck(OPS.dropout_mask.default, random_rng(device), 0.3, 2, 3, 9, 11)


@pytest.mark.op("add_layer_norm")
def test_opcheck_add_layer_norm(device: str) -> None:
    x, residual, weight, bias = (random(*shape, device=device) for shape in [(4, 64), (4, 64), (64,), (64,)])
    opcheck(OPS.add_layer_norm.default, x, residual, weight, bias, 1e-5, True)
    opcheck(OPS.add_layer_norm.default, x, residual, None, None, 1e-5, False)


@pytest.mark.op("interval_block_lists")
@pytest.mark.parametrize("rule", ["window", "documents", "prefix", "spans"])
def test_opcheck_interval_block_lists(device: str, rule: str) -> None:
    values = {"window": [], "documents": [0, 100, 170], "prefix": [3, 150], "spans": [[[10, 60]], [[90, 180]]]}
    bounds = torch.tensor(values[rule], dtype=torch.int32, device=device)
    opcheck(OPS.interval_block_lists.default, bounds, rule, 200, 200, 64, 32, 0, -1, 0, 0, True, 60, 8)


@pytest.mark.op("block_lists_transposed")
def test_opcheck_block_lists_transposed(device: str) -> None:
    tensors = reference.block_mask_tensors(torch.rand(2, 3, 100, 70, device=device) < 0.7, 32, 32)
    opcheck(OPS.block_lists_transposed.default, *tensors, 3, 80)


def test_every_operator_is_checked() -> None:
    """A new operator needs a fake, an autograd rule, and a test above; one that answers in words is never traced."""
    in_words = {"attention_describe", "attention_decode_describe"}
    names = in_words | {
        "attention_forward",
        "attention_forward_max_logit",
        "attention_forward_plain",
        "attention_backward",
        "attention_weights",
        "attention_weights_backward",
        "attention_decode",
        "attention_decode_append",
        "attention_check",
        "attention_decode_check",
        "merge",
        "merge_backward",
        "dropout_mask",
        "add_layer_norm",
        "interval_block_lists",
        "block_lists_transposed",
    }
    # Those without tensors: a switch, and those of the SDPA provider.
    names |= {"use_own_kernels"}
    names |= {
        f"{name}_by_{device}"
        for name in ("override_aten", "restore_aten", "fill_fused_attention", "aten_calls")
        for device in ("cpu", "cuda")
    }
    registered = torch._C._dispatch_get_all_op_names()
    assert {name.removeprefix("flash_ext::") for name in registered if name.startswith("flash_ext::")} == names


def test_plain_operator_called_directly_is_attention_forward(device: str) -> None:
    q, k, v = qkv(device)
    values = (0.3, 2, 0, True)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return OPS.attention_forward_plain(q, k, v, *values)

    def full(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return OPS.attention_forward(q, k, v, *values)

    def of(function: Callable[..., Any]) -> list[Tensor]:
        out, lse = function(q, k, v)
        weights = torch.linspace(0.5, 1.5, out.numel(), device=device).view_as(out)
        finite = torch.where(lse.isinf(), 0, lse)
        return [out, lse, *torch.autograd.grad((out * weights).sum() + finite.sum(), (q, k, v))]

    assert_all_equal(of(plain), of(full))
    stacked = [torch.stack([t, -t]).detach() for t in (q, k, v)]
    assert_all_equal(torch.vmap(plain)(*stacked), torch.vmap(full)(*stacked))
    with torch.no_grad():
        assert not plain(q, k, v)[0].requires_grad
    with torch.autocast(device, dtype=torch.bfloat16):
        assert plain(q, k, v)[0].dtype == torch.bfloat16


# ---- compile and export ---------------------------------------------------------------------------------------------


def loss(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    out, lse = flash_ext.attention(q, k, v, return_lse=True, **options)
    return (out**2).sum() + torch.where(lse.isinf(), 0, lse).sum()


def gradients(
    function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
) -> list[Tensor]:
    leaves = [q, k, v, *(t for t in options.values() if isinstance(t, Tensor) and t.requires_grad)]
    value = function(q, k, v, options)
    return [value.detach(), *torch.autograd.grad(value, leaves)]


def assert_all_equal(got: Any, expected: Any, **tolerance: float) -> None:
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiles_in_one_graph(mode: tuple[list[Tensor], dict[str, Any]], dynamic: bool) -> None:
    (q, k, v), options = mode
    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    assert_all_equal(gradients(compiled, q, k, v, options), gradients(loss, q, k, v, options))


@pytest.mark.usefixtures("fresh_dynamo")
def test_dynamic_shapes_compile_once(device: str) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=counter)
    counts = []
    for batch, seqlen_q, seqlen_k in [(3, 9, 13), (5, 17, 20), (6, 40, 14)]:
        q = random(batch, seqlen_q, 4, 16, device=device).requires_grad_()
        k, v = (random(batch, seqlen_k, 2, 16, device=device).requires_grad_() for _ in range(2))
        assert_all_equal(gradients(compiled, q, k, v, {}), gradients(loss, q, k, v, {}))
        counts.append(counter.frame_count)
    assert counts == counts[:1] * 3  # tracing the first may start over, the others find it compiled


@pytest.mark.usefixtures("fresh_dynamo", "inductor")
def test_compiles_by_inductor(device: str) -> None:
    q, k, v = qkv(device)

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_ext.attention(torch.sin(q), k * 2, v, causal=True).relu()

    compiled = torch.compile(block, fullgraph=True)
    expected = torch.autograd.grad(block(q, k, v).sum(), (q, k, v))
    assert_all_equal(torch.autograd.grad(compiled(q, k, v).sum(), (q, k, v)), expected)


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiles_with_dropout_drawn_inside(device: str) -> None:
    q, k, v = (t.detach() for t in qkv(device))
    compiled = torch.compile(flash_ext.attention, fullgraph=True, backend="aot_eager")
    first, second = (compiled(q, k, v, dropout_p=0.5) for _ in range(2))
    assert not torch.equal(first, second)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.op("attention_decode_append")
def test_append_compiles_in_one_graph(device: str) -> None:
    q, k, v = (random(2, 1, 4, 16, device=device) for _ in range(3))
    caches = [random(2, 32, 4, 16, device=device) for _ in range(2)]
    expected_caches = [cache.clone() for cache in caches]
    lengths = int32([5, 31], device)

    def step(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_ext.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)

    expected = step(q, *expected_caches, k, v)
    torch.testing.assert_close(torch.compile(step, fullgraph=True, backend="aot_eager")(q, *caches, k, v), expected)
    assert_all_equal(caches, expected_caches)


@pytest.mark.parametrize("strict", [False, True])
def test_exports(device: str, strict: bool) -> None:
    class Attention(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flash_ext.attention(q, k, v, causal=True)

    inputs = tuple(t.detach() for t in qkv(device))
    seqlen = torch.export.Dim("seqlen", min=2, max=512)
    program = torch.export.export(Attention(), inputs, dynamic_shapes=({1: seqlen}, None, None), strict=strict)
    longer = (random(2, 30, 4, 16, device=device), *inputs[1:])
    torch.testing.assert_close(program.module()(*longer), Attention()(*longer))


# ---- autocast -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_only_what_is_multiplied(device: str, dtype: torch.dtype) -> None:
    q, k, v = qkv(device)
    bias, sink = (random(*shape, device=device).requires_grad_() for shape in [(1, 4, 9, 13), (4,)])
    slopes = torch.rand(4, device=device)
    with torch.autocast(device, dtype=dtype):
        out, lse = flash_ext.attention(q, k, v, bias=bias, sink=sink, alibi_slopes=slopes, return_lse=True)
        weights = flash_ext.attention_weights(q, k, lse, bias=bias, alibi_slopes=slopes)
    low = (t.to(dtype) for t in (q, k, v))
    expected = flash_ext.attention(*low, bias=bias, sink=sink, alibi_slopes=slopes)
    assert out.dtype == weights.dtype == dtype and lse.dtype == torch.float32
    assert torch.equal(out, expected)
    found = torch.autograd.grad(out.float().sum(), (q, k, v, bias, sink))
    wanted = torch.autograd.grad(expected.float().sum(), (q, k, v, bias, sink))
    assert all(gradient.dtype == torch.float32 for gradient in found)
    assert_all_equal(found, wanted)


def test_autocast_unites_dtypes_and_leaves_float64(device: str) -> None:
    q, k, v = (t.detach() for t in qkv(device))
    with torch.autocast(device, dtype=torch.bfloat16):
        assert flash_ext.attention(q.half(), k, v.bfloat16()).dtype == torch.bfloat16
        if device == "cpu":
            assert flash_ext.attention(q.double(), k.double(), v.double()).dtype == torch.float64


@pytest.mark.op("attention_decode")
def test_autocast_follows_the_cache(device: str) -> None:
    caches = [random(2, 32, 4, 16, dtype=torch.bfloat16, device=device) for _ in range(2)]
    q, k, v = (random(2, 1, 4, 16, device=device) for _ in range(3))
    with torch.autocast(device, dtype=torch.float16):
        assert flash_ext.decode(q, *caches).dtype == torch.bfloat16
        assert flash_ext.decode(q, *caches, k=k, v=v, cache_seqlens=int32([3, 4], device)).dtype == torch.bfloat16
    assert torch.equal(caches[0][0, 3], k[0, 0].bfloat16())


@pytest.mark.usefixtures("fresh_dynamo")
def test_autocast_of_rotary_tables(device: str) -> None:
    """They follow the cache, as q does, whatever autocast would make of them."""
    caches = [torch.randn(2, 32, 4, 16, device=device).bfloat16() for _ in "kv"]
    q, k, v = (torch.randn(2, 1, 4, 16, device=device) for _ in "qkv")
    angles = torch.rand(40, 8, device=device)
    tables = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    with torch.autocast(device, dtype=torch.float16):
        out = flash_ext.decode(q, *caches, k=k, v=v, cache_seqlens=int32([3, 4], device), **tables)
    assert out.dtype == torch.bfloat16


def test_autocast_in_a_compiled_function(device: str) -> None:
    q, k, v = qkv(device)

    def under_autocast(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            return loss(q, k, v, options).float()

    compiled = torch.compile(under_autocast, fullgraph=True, backend="aot_eager")
    assert_all_equal(gradients(compiled, q, k, v, {}), gradients(under_autocast, q, k, v, {}), rtol=1e-2, atol=1e-2)


# ---- vmap and torch.func --------------------------------------------------------------------------------------------


def by_loop(function: Callable[..., Any], in_dims: tuple[int | None, ...], *args: Any) -> Any:
    size = next(arg.shape[dim] for arg, dim in zip(args, in_dims, strict=True) if dim is not None)
    results = [
        function(*(arg if dim is None else arg.select(dim, i) for arg, dim in zip(args, in_dims, strict=True)))
        for i in range(size)
    ]
    return [torch.stack(parts) for parts in zip(*results, strict=True)]


def attention_with(name: str | None, **options: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    def function(q: Tensor, k: Tensor, v: Tensor, *extra: Tensor) -> tuple[Tensor, Tensor]:
        named = {} if name is None else {name: extra[0]}
        result = flash_ext.attention(q, k, v, **named, **options, return_lse=True)
        assert isinstance(result, tuple)
        return result

    return function


VMAPPED_OPTIONS: dict[str, tuple[Callable[[], Tensor], dict[str, Any]]] = {
    "bias": (lambda: random(3, 1, 4, 9, 13), {}),
    "mask": (lambda: torch.rand(3, 2, 1, 9, 13) < 0.7, {}),
    "alibi_slopes": (lambda: torch.rand(3, 4), {}),
    "sink": (lambda: random(3, 4), {}),
    "seqused_k": (lambda: torch.randint(0, 13, (3, 2), dtype=torch.int32), {}),
    "rng_state": (lambda: torch.randint(2**40, (3, 2)), {"dropout_p": 0.5}),
}


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (2, 1, 4), (0, None, None), (None, 0, 0), (None, None, 0)], ids=str)
def test_vmap_folds_into_the_batch(device: str, in_dims: tuple[int | None, ...]) -> None:
    inputs = [t.detach() for t in qkv(device)]
    args = [t if dim is None else torch.stack([t, -t, t * 2], dim) for t, dim in zip(inputs, in_dims, strict=True)]
    args = [
        t if dim != 4 else t.transpose(3, 4).contiguous().transpose(3, 4) for t, dim in zip(args, in_dims, strict=True)
    ]
    function = attention_with(None, causal=True)
    assert_all_equal(torch.vmap(function, in_dims)(*args), by_loop(function, in_dims, *args))


@pytest.mark.parametrize("shared_qkv", [False, True], ids=["qkv", "shared_qkv"])
@pytest.mark.parametrize("name", VMAPPED_OPTIONS)
def test_vmap_over_an_option(device: str, name: str, shared_qkv: bool) -> None:
    make, options = VMAPPED_OPTIONS[name]
    inputs = [t.detach() for t in qkv(device)]
    args = [*(inputs if shared_qkv else (torch.stack([t, -t, t * 2]) for t in inputs)), make().to(device)]
    in_dims = (None if shared_qkv else 0,) * 3 + (0,)
    function = attention_with(name, **options)
    assert_all_equal(torch.vmap(function, in_dims)(*args), by_loop(function, in_dims, *args))


def test_vmap_leaves_options_shared(mode: tuple[list[Tensor], dict[str, Any]]) -> None:
    inputs, options = mode
    args = [torch.stack([t, -t, t * 2]).detach() for t in inputs]
    function = attention_with(None, **options)
    in_dims = (0, 0, 0)
    assert_all_equal(torch.vmap(function)(*args), by_loop(function, in_dims, *args))


@pytest.mark.parametrize("randomness", ["same", "different", "error"])
def test_vmap_of_dropout_follows_randomness(device: str, randomness: str) -> None:
    q, k, v = (torch.stack([t.detach()] * 3) for t in qkv(device))

    def run() -> Tensor:
        return torch.vmap(lambda *t: flash_ext.attention(*t, dropout_p=0.5), randomness=randomness)(q, k, v)

    if randomness == "error":
        with pytest.raises(RuntimeError, match="randomness"):
            run()
    else:
        assert torch.equal(*run()[:2]) == (randomness == "same")


def test_grad_and_vmap_in_either_order(mode: tuple[list[Tensor], dict[str, Any]]) -> None:
    inputs, options = mode
    options = {name: value.detach() if isinstance(value, Tensor) else value for name, value in options.items()}
    args = [torch.stack([t, -t, t * 2]).detach() for t in inputs]

    def scalar(*qkv: Tensor) -> Tensor:
        return loss(*qkv, options)

    def one(*qkv: Tensor) -> list[Tensor]:
        return gradients(loss, *(t.clone().requires_grad_() for t in qkv), options)[1:]

    expected = by_loop(one, (0, 0, 0), *args)
    of_vmap = torch.func.grad(lambda *qkv: torch.vmap(scalar)(*qkv).sum(), (0, 1, 2))(*args)
    assert_all_equal(torch.vmap(torch.func.grad(scalar, (0, 1, 2)))(*args), expected, rtol=1e-4, atol=1e-4)
    assert_all_equal(of_vmap, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["bias", "sink"])
def test_gradient_of_a_shared_option_per_sample(device: str, name: str) -> None:
    args = [torch.stack([t, -t, t * 2]).detach() for t in qkv(device)]
    shared = random(*{"bias": (1, 4, 1, 13), "sink": (4,)}[name], device=device)

    def scalar(shared: Tensor, *qkv: Tensor) -> Tensor:
        return loss(*qkv, {name: shared})

    per_sample = torch.vmap(torch.func.grad(scalar), (None, 0, 0, 0))(shared, *args)
    expected = [torch.func.grad(scalar)(shared, *(t[i] for t in args)) for i in range(3)]
    torch.testing.assert_close(per_sample, torch.stack(expected))


def test_vmap_loops_over_what_it_does_not_know() -> None:
    """An option that is added later, of each sample or of all, is not folded into the batch."""
    fields = [*ScoreOptions._fields, "clip"]
    added = namedtuple("added", fields, defaults=[None] * len(fields))  # type: ignore[misc]
    assert _vmap.can_fold(added(bias=torch.zeros(1), sink=torch.zeros(1)), added(bias=0))
    assert not _vmap.can_fold(added(clip=torch.zeros(1)), added())
    assert not _vmap.can_fold(added(sink=torch.zeros(1)), added(sink=0))


def test_vmap_beside_a_block_mask_per_entry(device: str) -> None:
    """The mask has a list of its own for each entry of the inner batch, which vmap folds with the outer one."""
    see = torch.rand(2, 4, 9, 13, device=device) < 0.6
    block_mask = flash_ext.BlockMask.from_dense(see, (4, 32))
    q, k, v = (torch.randn(3, 2, *shape, device=device) for shape in [(9, 4, 16), (13, 2, 16), (13, 2, 24)])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_ext.attention(q, k, v, block_mask=block_mask)

    mapped = torch.vmap(attend)(q, k, v)
    for entry, out in enumerate(mapped):
        expected, _, _ = reference.attention(q[entry], k[entry], v[entry], reference.Options(mask=see))
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_vmap_of_weights_and_merge(device: str) -> None:
    q, k, v = (torch.stack([t, -t, t * 2]).detach() for t in qkv(device))

    def weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = flash_ext.attention(q, k, v, return_lse=True)
        out, lse = flash_ext.merge([out, -out], [lse, lse + 1])
        return (flash_ext.attention_weights(q, k, lse) ** 2).sum() + out.sum()

    def one(*qkv: Tensor) -> tuple[Tensor, ...]:
        return torch.func.grad(weights, (0, 1, 2))(*qkv)

    assert_all_equal(torch.vmap(one)(q, k, v), by_loop(one, (0, 0, 0), q, k, v), rtol=1e-4, atol=1e-5)


@pytest.mark.op("attention_decode")
def test_vmap_of_decode(device: str) -> None:
    q, k, v = (random(3, 2, 1, 4, 16, device=device) for _ in range(3))
    caches = [random(3, 2, 32, 4, 16, device=device) for _ in range(2)]
    lengths = int32([5, 9], device)
    expected = [flash_ext.decode(q[i], *(c[i] for c in caches), cache_seqlens=lengths) for i in range(3)]
    run = torch.vmap(lambda q, *kv: flash_ext.decode(q, *kv, cache_seqlens=lengths))
    torch.testing.assert_close(run(q, *caches), torch.stack(expected))

    def append(q: Tensor, k: Tensor, v: Tensor, *kv: Tensor) -> Tensor:
        return flash_ext.decode(q, *kv, k=k, v=v, cache_seqlens=lengths)

    torch.vmap(append)(q, k, v, *caches)
    assert torch.equal(caches[0][:, 1, 9], k[:, 1, 0])
    with pytest.raises(RuntimeError, match="k_cache and v_cache are written to"):
        torch.vmap(append, (0, 0, 0, None, None))(q, k, v, *(c[0] for c in caches))


def test_jacobian(device: str) -> None:
    q, k, v = (t.detach() for t in qkv(device, batch=1))
    got = torch.func.jacrev(lambda q: flash_ext.attention(q, k, v))(q)
    expected = torch.func.jacrev(lambda q: reference.attention(q, k, v)[0])(q)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_forward_mode_raises(device: str) -> None:
    q, k, v = (t.detach() for t in qkv(device))
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda q: flash_ext.attention(q, k, v), (q,), (q,))
    with pytest.raises(NotImplementedError, match="forward-mode"), forward_ad.dual_level():
        flash_ext.attention(forward_ad.make_dual(q, q), k, v)
    with forward_ad.dual_level():
        flash_ext.attention(q, k, v)


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiles_torch_func(device: str) -> None:
    q, k, v = (torch.stack([t, -t]).detach() for t in qkv(device))
    function = torch.vmap(torch.func.grad(lambda *qkv: loss(*qkv, {}), (0, 1, 2)))
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_all_equal(compiled(q, k, v), function(q, k, v))


@pytest.mark.parametrize("looped", [False, True])
def test_vmap_over_nothing(device: str, looped: bool) -> None:
    """As torch's operators give, for calls that are folded into the batch and for others."""
    q, k, v = (x.detach() for x in qkv(device))
    options: dict[str, Any] = dict(return_lse=True)
    if looped:
        options |= dict(dropout_p=0.5, rng_state=random_rng(device))
    none = q.new_empty(2, 0, *q.shape[1:], requires_grad=True)

    def attend(q: Tensor) -> Any:
        return flash_ext.attention(q, k, v, **options)

    out, lse = torch.vmap(attend, in_dims=1)(none)
    expected = attend(q)
    assert out.shape == (0, *expected[0].shape) and lse.shape == (0, *expected[1].shape)
    assert (out.dtype, lse.dtype, out.device) == (q.dtype, expected[1].dtype, q.device)
    outs, lses = (x.new_empty(0, 3, *x.shape) for x in expected)
    out, lse = torch.vmap(flash_ext.merge)(outs, lses)
    assert out.shape == (0, *expected[0].shape) and lse.shape == (0, *expected[1].shape)
    with pytest.raises(RuntimeError, match=r"k\.size\(0\) must equal q\.size\(0\)"):
        torch.vmap(lambda q: flash_ext.attention(q, k[:1], v[:1], **options), in_dims=1)(none)
    if not looped:
        (grad,) = torch.autograd.grad(torch.vmap(attend, in_dims=1)(none)[0].sum(), none)
        assert grad.shape == none.shape
        grads = torch.vmap(torch.func.grad(lambda q: attend(q)[0].sum()), in_dims=1)(none)
        assert grads.shape == (0, *q.shape)
