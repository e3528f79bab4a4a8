"""What the Python functions add to the operators: defaults, lengths, random numbers, ``supports`` and ``explain``."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_ext
from flash_ext import _plan, functional
from flash_ext.ops import DecodeOptions, ScoreOptions
from tests import reference
from tests.oracle import cumulative, int32, random, values_are_checked


def qkv(device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [random(*shape, dtype=dtype, device=device) for shape in [(2, 9, 4, 16), (2, 13, 2, 16), (2, 13, 2, 24)]]


def packed_qkv(device: str) -> list[Tensor]:
    return [random(*shape, device=device) for shape in [(9, 4, 16), (13, 2, 16), (13, 2, 24)]]


# ---- attention ------------------------------------------------------------------------------------------------------


def test_options_are_keywords() -> None:
    parameters = inspect.signature(flash_ext.attention).parameters.values()
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == ["q", "k", "v"]
    with pytest.raises(TypeError, match="is_causal"):
        flash_ext.attention(*qkv("cpu"), is_causal=True)  # type: ignore[call-arg]


def test_window_of_any_integers(device: str) -> None:
    tensors = qkv(device)
    expected = flash_ext.attention(*tensors, window_size=(3, 1))
    pair = torch.tensor([3, 1]).numpy()
    assert torch.equal(flash_ext.attention(*tensors, window_size=tuple(pair)), expected)


def test_causal_does_not_hide_a_wrong_window(device: str) -> None:
    """Its right side is 0 then, whatever was given; what was given is looked at all the same."""
    with pytest.raises(RuntimeError, match=r"window_size\[1\] must be >= -1"):
        flash_ext.attention(*qkv(device), causal=True, window_size=(3, -5))


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
def test_a_bound_on_lengths_belongs_to_packed_sequences(device: str, name: str) -> None:
    tensors = qkv(device)
    lengths = {"max_seqlen_q": 9, "max_seqlen_k": 13}
    flash_ext.attention(*tensors, **{name: lengths[name]})
    for wrong in (lengths[name] - 1, lengths[name] + 1):
        with pytest.raises(RuntimeError, match=f"{name} belongs to cu_seqlens_{name[-1]}.*got {wrong}"):
            flash_ext.attention(*tensors, **{name: wrong})


def tensor_or_number(name: str, device: str) -> Any:
    """A value of an option that is not its default."""
    if name in ("rotary_interleaved", "batch_invariant", "top_left"):
        return True
    if name in ("softmax_scale", "softcap", "dropout_p"):
        return 0.5
    if name in ("num_splits", "window_left", "window_right", "max_seqlen_q", "max_seqlen_k"):
        return 3
    return torch.ones(2, device=device)


def fields_of(options: type, without: set[str]) -> list[str]:
    return [name for name in options._fields if name not in without]  # type: ignore[attr-defined]


# Given in other words, or only beside other options; allow_tf32 is torch's own setting.
OF_ATTENTION = fields_of(ScoreOptions, {"window_left", "window_right", "max_seqlen_q", "max_seqlen_k", "allow_tf32"})
OF_ATTENTION = [name for name in OF_ATTENTION if not name.startswith("block_")]
OF_DECODE = fields_of(DecodeOptions, {"window_left", "window_right", "max_seqlen_q", "allow_tf32"})


@pytest.mark.parametrize(
    ("function", "name"),
    [*(("attention", name) for name in OF_ATTENTION), *(("decode", name) for name in OF_DECODE)],
    ids=str,
)
def test_an_option_alone_reaches_the_operator(
    function: str, name: str, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Options at the end of the list are left out where all of them have their defaults, and nowhere else."""
    sent: list[tuple[Any, ...]] = []

    def call(op: Any, *arguments: Any) -> tuple[None, None]:
        sent.append(arguments[3:])
        return None, None

    monkeypatch.setattr(functional, "call", call)
    value = tensor_or_number(name, device)
    q, k, v = qkv(device)
    getattr(flash_ext, function)(q, k, v, **{name: value})
    options = (ScoreOptions if function == "attention" else DecodeOptions)(*sent[0])
    assert getattr(options, name) is value


@pytest.mark.parametrize("given", [(None, None), (5, 7)], ids=str)
def test_block_mask_of_packed_sequences(device: str, given: tuple[int | None, int | None]) -> None:
    q, k, v = packed_qkv(device)
    options: dict[str, Any] = dict(cu_seqlens_q=cumulative([4, 5], device), cu_seqlens_k=cumulative([6, 7], device))
    see = torch.rand(10, 40, device=device) < 0.7
    block_mask = flash_ext.BlockMask.from_dense(see[:, :20], (16, 32))
    expected = flash_ext.attention(q, k, v, **options, mask=see[None, None, :5, :7])
    options |= dict(max_seqlen_q=given[0], max_seqlen_k=given[1])
    torch.testing.assert_close(flash_ext.attention(q, k, v, **options, block_mask=block_mask), expected)


@pytest.mark.parametrize("lengths", [(4, 7), (5, 6), (40, 7)], ids=str)
def test_block_mask_that_does_not_cover_packed_sequences(device: str, lengths: tuple[int, int]) -> None:
    q, k, v = packed_qkv(device)
    options: dict[str, Any] = dict(cu_seqlens_q=cumulative([4, 5], device), cu_seqlens_k=cumulative([6, 7], device))
    block_mask = flash_ext.BlockMask.causal(*lengths, (16, 32), device=device)
    with pytest.raises(ValueError, match=r"^block_mask must cover max_seqlen_q = 5"):
        flash_ext.attention(q, k, v, **options, max_seqlen_q=5, max_seqlen_k=7, block_mask=block_mask)


def test_block_mask_of_another_batch_or_device_is_named(device: str) -> None:
    """And not one of its tensors."""
    q, k, v = qkv(device)
    for batch, heads, what in (
        (3, 1, "batch of q, 2, or 1 for all, got 3"),
        (1, 3, "heads of q, 4, or 1 for all, got 3"),
    ):
        mask = flash_ext.BlockMask.random(9, 13, 1, batch, heads, (16, 32), device=device)
        with pytest.raises(ValueError, match=f"^block_mask must have the {what}$"):
            flash_ext.attention(q, k, v, block_mask=mask)
        cu_seqlens = cumulative([9, 9], device), cumulative([13, 13], device)
        with pytest.raises(ValueError, match=f"^block_mask must have the {what}$"):
            flash_ext.attention(
                *(x.flatten(0, 1) for x in (q, k, v)), cu_seqlens_q=cu_seqlens[0], cu_seqlens_k=cu_seqlens[1],
                block_mask=mask,
            )  # fmt: skip
    with pytest.raises(ValueError, match=rf"^block_mask must be on the device of q, {device}.*, got one on meta"):
        flash_ext.attention(q, k, v, block_mask=flash_ext.BlockMask.causal(9, 13, device="meta"))


def test_returns_lse_on_request(device: str) -> None:
    tensors = qkv(device)
    out = flash_ext.attention(*tensors)
    with_lse = flash_ext.attention(*tensors, return_lse=True)
    assert isinstance(out, Tensor) and isinstance(with_lse, tuple)
    assert torch.equal(out, with_lse[0]) and with_lse[1].shape == (2, 4, 9)


def test_default_scale(device: str) -> None:
    tensors = qkv(device)
    assert torch.equal(flash_ext.attention(*tensors), flash_ext.attention(*tensors, softmax_scale=16**-0.5))


def test_causal_is_a_right_window_of_zero(device: str) -> None:
    tensors = qkv(device)
    expected = flash_ext.attention(*tensors, window_size=(5, 0))
    assert torch.equal(flash_ext.attention(*tensors, causal=True, window_size=(5, 3)), expected)


@pytest.mark.parametrize("bias_shape", [None, (1, 1, 1, 1), (1, 4, 5, 1), (2, 1, 5, 7)], ids=str)
def test_longest_sequence_may_be_left_out(device: str, bias_shape: tuple[int, ...] | None) -> None:
    q, k, v = packed_qkv(device)
    options: dict[str, Any] = dict(cu_seqlens_q=cumulative([4, 5], device), cu_seqlens_k=cumulative([6, 7], device))
    if bias_shape is not None:
        options["bias"] = random(*bias_shape, device=device)
    expected = flash_ext.attention(q, k, v, **options, max_seqlen_q=5, max_seqlen_k=7)
    assert torch.equal(flash_ext.attention(q, k, v, **options), expected)


def test_longest_sequence_bounded_by_the_total_gives_the_same(device: str) -> None:
    q, k, v = packed_qkv(device)
    cu_q, cu_k = cumulative([4, 5], device), cumulative([6, 7], device)
    options: dict[str, Any] = dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True)
    options |= dict(dropout_p=0.3, rng_state=flash_ext.draw_rng_state(device))
    expected = flash_ext.attention(q, k, v, **options)
    assert torch.equal(flash_ext.attention(q, k, v, **options, max_seqlen_q=9, max_seqlen_k=13), expected)


def test_no_sequences(device: str) -> None:
    q, k, v = (t[:0] for t in packed_qkv(device))
    cu = cumulative([], device)
    out, lse = flash_ext.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, return_lse=True)
    assert out.shape == (0, 4, 24) and lse.shape == (4, 0)


def test_dropout_draws_from_torchs_generator(device: str) -> None:
    tensors = qkv(device)

    def drop() -> Tensor:
        return flash_ext.attention(*tensors, dropout_p=0.5)

    torch.manual_seed(11)
    first, second = drop(), drop()
    torch.manual_seed(11)
    assert torch.equal(drop(), first) and not torch.equal(first, second)
    torch.manual_seed(11)
    rng_state = flash_ext.draw_rng_state(device)
    assert rng_state.dtype == torch.int64 and rng_state.shape == (2,)
    assert torch.equal(flash_ext.attention(*tensors, dropout_p=0.5, rng_state=rng_state), first)


def test_no_dropout_draws_nothing(device: str) -> None:
    before = torch.get_rng_state()
    flash_ext.attention(*qkv("cpu"))
    torch.set_rng_state(before)
    tensors = qkv("cpu")
    after_inputs = torch.get_rng_state()
    flash_ext.attention(*tensors)
    assert torch.equal(torch.get_rng_state(), after_inputs)


def test_rng_state_without_dropout_raises(device: str) -> None:
    with pytest.raises(RuntimeError, match="dropout_p"):
        flash_ext.attention(*qkv(device), rng_state=flash_ext.draw_rng_state(device))


# ---- attention_weights ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_weights_with_the_lse_of_attention_have_torchs_gradient(
    device: str, dtype: torch.dtype, dropout_p: float
) -> None:
    q, k, v = (t.requires_grad_() for t in qkv(device, dtype))
    bias = random(1, 4, 9, 13, dtype=dtype, device=device).requires_grad_()
    options: dict[str, Any] = dict(causal=True, bias=bias, softcap=5.0)
    keep = None
    if dropout_p > 0:
        options |= dict(dropout_p=dropout_p, rng_state=flash_ext.draw_rng_state(device))
        keep = reference.dropout_keep(options["rng_state"], dropout_p, 2, 4, 9, 13)
    out, lse = flash_ext.attention(q, k, v, **options, return_lse=True)
    weights = flash_ext.attention_weights(q, k, lse, **options)
    expected_out, _, expected = reference.attention(
        q, k, v, reference.Options(causal=True, bias=bias, softcap=5.0, keep=keep, dropout_p=dropout_p)
    )
    found = torch.autograd.grad((weights**2).sum() + out.sum(), (q, k, v, bias))
    wanted = torch.autograd.grad((expected**2).sum() + expected_out.sum(), (q, k, v, bias))
    for got, want in zip((weights, *found), (expected, *wanted), strict=True):
        tolerance = {} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(got, want, **tolerance)


def test_weights_of_packed_sequences(device: str) -> None:
    q, k, v = packed_qkv(device)
    cu_q, cu_k = cumulative([4, 5], device), cumulative([6, 7], device)
    options: dict[str, Any] = dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=5, max_seqlen_k=7, causal=True)
    _, lse = flash_ext.attention(q, k, v, **options, return_lse=True)
    weights = flash_ext.attention_weights(q, k, lse, **options)
    assert weights.shape == (2, 4, 5, 7)
    expected = reference.attention(q[None, :4], k[None, :6], v[None, :6], reference.Options(causal=True))[2]
    torch.testing.assert_close(weights[:1, :, :4, :6], expected)
    assert not weights[0, :, 4:].any() and not weights[0, :, :, 6:].any()


def test_weights_refuse_what_they_would_ignore(device: str) -> None:
    q, k, v = qkv(device)
    _, lse = flash_ext.attention(q, k, v, return_lse=True)
    with pytest.raises(TypeError, match="sink"):
        flash_ext.attention_weights(q, k, lse, sink=random(4, device=device))
    with pytest.raises(TypeError, match=r"attention_weights\(\) .* 'deterministic'"):
        flash_ext.attention_weights(q, k, lse, deterministic=True)
    assert torch.equal(flash_ext.attention_weights(q, k, lse, sink=None), flash_ext.attention_weights(q, k, lse))
    with pytest.raises(RuntimeError, match="rng_state"):
        flash_ext.attention_weights(q, k, lse, dropout_p=0.5)


# ---- merge and decode -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_list", [False, True])
def test_merge_of_parts_is_the_whole(device: str, as_list: bool) -> None:
    q, k, v = qkv(device)
    parts = [flash_ext.attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(5), slice(5, 6), slice(6, None))]
    outs, lses = ([part[i] for part in parts] for i in range(2))
    out, lse = flash_ext.merge(outs, lses) if as_list else flash_ext.merge(torch.stack(outs), torch.stack(lses))
    expected, expected_lse = flash_ext.attention(q, k, v, return_lse=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


def test_merge_of_parts_that_do_not_fit(device: str) -> None:
    out, lse = flash_ext.attention(*qkv(device), return_lse=True)
    with pytest.raises(ValueError, match="outs must hold at least one part"):
        flash_ext.merge([], [])
    with pytest.raises(RuntimeError, match=r"outs\[1\] must have the shape and dtype of outs\[0\].*float16"):
        flash_ext.merge([out, out.half()], [lse, lse])
    with pytest.raises(RuntimeError, match=r"lses\[1\] must have the shape"):
        flash_ext.merge([out, out], [lse, lse[:1]])
    with pytest.raises(RuntimeError, match=rf"outs\[1\] must be on the device of outs\[0\], {device}.*, got meta"):
        flash_ext.merge([out, out.to("meta")], [lse, lse])
    with pytest.raises(TypeError, match=r"outs\[0\] must be a Tensor, got None"):
        flash_ext.merge([None], [lse])  # type: ignore[list-item]


@pytest.mark.op("attention_decode")
@pytest.mark.parametrize("given", ["k", "v"])
def test_decode_appends_keys_and_values_together(device: str, given: str) -> None:
    q, k, v = qkv(device)
    missing = "v" if given == "k" else "k"
    with pytest.raises(ValueError, match=f"must be given together, got only {given}"):
        flash_ext.decode(q[:, :1], k, v, **{given: (k if given == "k" else v)[:, :1]}, **{missing: None})


def test_decode_of_packed_queries(device: str) -> None:
    q = random(5, 4, 16, device=device)
    caches = [random(2, 32, 2, 16, device=device) for _ in range(2)]
    options: dict[str, Any] = dict(causal=True, cache_seqlens=int32([20, 7], device))
    out, lse = flash_ext.decode(q, *caches, cu_seqlens_q=cumulative([2, 3], device), return_lse=True, **options)
    assert out.shape == (5, 4, 16) and lse.shape == (4, 5)
    expected = flash_ext.attention(q[None, 2:], *(cache[1:, :7] for cache in caches), causal=True)
    torch.testing.assert_close(out[2:], expected[0])


# ---- supports and explain -------------------------------------------------------------------------------------------


def test_supports_what_runs(device: str) -> None:
    q, k, v = qkv(device)
    for operation in ("forward", "backward", "weights", "weights_backward", "decode"):
        assert flash_ext.supports(q, k, v, operation=operation) == (True, "")
    assert flash_ext.supports(q, k, v, causal=True, bias=random(1, 1, 9, 13, device=device), deterministic=True) == (
        True,
        "",
    )


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "softcap": ({"softcap": -1.0}, "softcap"),
    "softcap_nan": ({"softcap": float("nan")}, "softcap"),
    "scale": ({"softmax_scale": float("inf")}, "softmax_scale"),
    "dropout": ({"dropout_p": 1.5}, "dropout_p"),
    "window": ({"window_size": (-2, 0)}, "window_size"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_supports_and_the_call_give_the_same_reason(device: str, name: str) -> None:
    options, match = REFUSED[name]
    q, k, v = qkv(device)
    ok, reason = flash_ext.supports(q, k, v, **options)
    assert not ok and match in reason
    with pytest.raises(RuntimeError) as error:
        flash_ext.attention(q, k, v, **options)
    assert reason in str(error.value)
    with pytest.raises(ValueError, match=match):
        flash_ext.explain(q, k, v, **options)


def test_supports_reads_shapes_and_dtypes(device: str) -> None:
    q, k, v = qkv(device)
    for tensors in ((q[..., :5], k[..., :5], v), (q[:, :, :3], k, v), (q, k, v[..., :0])):
        ok, reason = flash_ext.supports(*tensors)
        assert not ok and reason
        with pytest.raises(RuntimeError):
            flash_ext.attention(*tensors)
    ok, reason = flash_ext.supports(q.int(), k.int(), v.int())
    assert not ok and "int32" in reason


def fits_not(device: str) -> dict[str, tuple[list[Any], dict[str, Any]]]:
    """Calls that the planner alone has nothing against."""
    q, k, v = qkv(device)
    return {
        "batch": ([q, k[:1], v], {}),
        "dtype": ([q, k.half(), v], {}),
        "integer": ([q.int(), k.int(), v.int()], {}),
        "dimensions": ([q[0], k[0], v[0]], {}),
        "head_dim": ([q, k[..., :8], v], {}),
        "bias": ([q, k, v], {"bias": random(7, device=device)}),
        "rng_state": ([q, k, v], {"rng_state": flash_ext.draw_rng_state(device)}),
        "seqused_k": ([q, k, v], {"seqused_k": int32([3, 14], device)}),
        "block_mask": ([q, k, v], {"block_mask": flash_ext.BlockMask.causal(9, 14, device=device)}),
        "window_size": ([q, k, v], {"window_size": (0.5, 1)}),
        "no_tensor": ([q, k, None], {}),
    }


@pytest.mark.parametrize("name", fits_not("cpu"))
@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_supports_runs_the_checks_of_the_call(device: str, name: str, operation: str) -> None:
    if name == "seqused_k" and not values_are_checked(device):
        pytest.skip("a wrong value, which nobody reads")
    tensors, options = fits_not(device)[name]
    ok, reason = flash_ext.supports(*tensors, operation=operation, **options)
    assert not ok
    with pytest.raises((RuntimeError, ValueError, TypeError)) as error:
        flash_ext.attention(*tensors, **options)
    assert str(error.value).removeprefix("flash_ext: ") == reason


def test_supports_leaves_no_trace(device: str) -> None:
    q, k, v = (t.requires_grad_() for t in qkv(device))
    before = torch.get_rng_state()
    assert flash_ext.supports(q, k, v, dropout_p=0.5) == (True, "")
    assert torch.equal(torch.get_rng_state(), before)
    ok, reason = flash_ext.supports(q, k, v, operation="weights", dropout_p=0.5)
    assert not ok and "rng_state must be given" in reason


def test_supports_of_weights_does_not_read_v(device: str) -> None:
    q, k, v = qkv(device)
    assert flash_ext.supports(q, k, v[:1, ..., :3], operation="weights") == (True, "")


@pytest.mark.op("attention_decode")
def test_supports_of_decode_runs_the_checks_of_the_call(device: str) -> None:
    q, caches = random(2, 1, 4, 16, device=device), [random(2, 32, 2, 16, device=device) for _ in range(2)]
    good: dict[str, Any] = dict(cache_seqlens=int32([3, 32], device), num_splits=2, causal=True, return_lse=True)
    assert flash_ext.supports(q, *caches, operation="decode", **good) == (True, "")
    wrong: list[dict[str, Any]] = [
        dict(rotary_cos=caches[0][0, :, 0, :4]),
        dict(num_splits=-1),
        dict(softcap=None),
    ]
    if values_are_checked(device):
        wrong += [dict(cache_seqlens=int32([3, 33], device)), dict(cache_batch_idx=int32([2, 0], device))]
    for bad in wrong:
        ok, reason = flash_ext.supports(q, *caches, operation="decode", **bad)
        with pytest.raises((RuntimeError, TypeError)) as error:
            flash_ext.decode(q, *caches, **bad)
        assert not ok and str(error.value).removeprefix("flash_ext: ") == reason


@pytest.mark.parametrize(
    ("operation", "option"),
    [
        ("forward", "num_splits"),
        ("forward", "block_table"),
        ("backward", "batch_invariant"),
        ("weights", "sink"),
        ("weights", "deterministic"),
        ("decode", "bias"),
        ("decode", "mask"),
        ("decode", "dropout_p"),
        ("decode", "top_left"),
        ("decode", "seqused_k"),
    ],
)
def test_options_of_another_operation_raise(device: str, operation: str, option: str) -> None:
    for function in (flash_ext.supports, flash_ext.explain):
        with pytest.raises(TypeError, match=rf"{operation} got an unexpected keyword argument '{option}'"):
            function(*qkv(device), operation=operation, **{option: None})


def test_unknown_options_raise(device: str) -> None:
    for function in (flash_ext.supports, flash_ext.explain):
        with pytest.raises(TypeError, match="is_causal"):
            function(*qkv(device), is_causal=True)


def test_explain_shows_the_plan(device: str) -> None:
    q, k, v = qkv(device)
    explanation = flash_ext.explain(q, k, v, causal=True)
    assert explanation.plan.mask_class == "causal"
    text = str(explanation)
    assert repr(explanation) == text
    for part in ("forward", device, "float32", "(2, 9, 4, 16)", "(2, 13, 2, 16)", *explanation.plan.reasons):
        assert part in text


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_explain_knows_the_dtype_of_a_bias(device: str, dtype: torch.dtype) -> None:
    q, k, v = qkv(device)
    problem = flash_ext.explain(q, k, v, bias=torch.zeros(1, 1, 9, 13, dtype=dtype, device=device)).problem
    assert problem.has_bias and problem.bias_dtype == str(dtype).removeprefix("torch.")


def test_explain_knows_the_operation(device: str) -> None:
    q = random(1, 1, 8, 64, device=device)
    caches = [random(1, 8192, 1, 64, device=device) for _ in range(2)]
    fixed = flash_ext.explain(q, *caches, operation="decode", batch_invariant=True)
    assert fixed.plan.split_size == _plan.BATCH_INVARIANT_SPLIT_SIZE
    assert flash_ext.explain(q, *caches, operation="decode", num_splits=4).plan.num_splits == 4
    assert flash_ext.explain(q, *caches, operation="backward").plan.kernel.split("/")[1].startswith("backward")
    for function in (flash_ext.supports, flash_ext.explain):
        with pytest.raises(ValueError, match=r"operation must be one of .* got 'sideways'"):
            function(q, *caches, operation="sideways")


def test_explain_of_packed_sequences_and_pages(device: str) -> None:
    q, k, v = packed_qkv(device)
    cu_q, cu_k = cumulative([4, 5], device), cumulative([6, 7], device)
    problem = flash_ext.explain(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=5, max_seqlen_k=7).problem
    assert (problem.batch, problem.seqlen_q, problem.seqlen_k, problem.varlen) == (2, 5, 7, True)
    pages = [random(9, 16, 2, 16, device=device) for _ in range(2)]
    table = torch.zeros(2, 6, dtype=torch.int32, device=device)
    problem = flash_ext.explain(
        random(2, 1, 4, 16, device=device), *pages, operation="decode", block_table=table
    ).problem
    assert (problem.seqlen_k, problem.paged) == (96, True)


# ---- the package ----------------------------------------------------------------------------------------------------


def test_public_names() -> None:
    for name in flash_ext.__all__:
        assert hasattr(flash_ext, name), name
    assert flash_ext.__version__ == flash_ext.build_info()["version"]
