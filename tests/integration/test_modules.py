"""``MultiheadAttention`` against ``nn.MultiheadAttention``: results, gradients, masks and errors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flash_ext
from tests.integration.module_twins import (
    BATCH,
    EMBED_DIM,
    LAYOUTS,
    NUM_HEADS,
    SEQLEN_K,
    SEQLEN_Q,
    WITHOUT_TORCHS_WARNINGS,
    assert_equal,
    make_inputs,
    make_masks,
    run,
    twins,
)
from tests.oracle import ROUNDING

pytestmark = WITHOUT_TORCHS_WARNINGS


def assert_within_oracle_bound(ours: dict[str, Tensor], low: dict[str, Tensor], ref: dict[str, Tensor]) -> None:
    assert ours.keys() == ref.keys()
    for name, expected in ref.items():
        error, error_low = ((results[name].double() - expected).abs().max().item() for results in (ours, low))
        rounding = ROUNDING[ours[name].dtype] * torch.finfo(ours[name].dtype).eps * expected.abs().max().item()
        # Weights are of scores and an lse around 20, each of them a rounded float; gradients are made of weights.
        rounding *= 1 if name == "out" else 2
        assert error <= 2 * error_low + rounding, name


def cases(layout: str, attn_masks: dict[str, Tensor | None], padding_masks: dict[str, Tensor | None]) -> Iterator[dict]:
    """Every combination of masks, hint and weights, as keyword arguments of a call."""
    for attn_kind, padding_kind, weights in itertools.product(attn_masks, padding_masks, ["no", "mean", "per head"]):
        attn_mask, padding = attn_masks[attn_kind], padding_masks[padding_kind]
        if layout == "unbatched":
            attn_mask = attn_mask[:NUM_HEADS] if attn_mask is not None and attn_mask.dim() == 3 else attn_mask
            padding = padding if padding is None else padding[0]
        for is_causal in [False, True] if attn_kind.startswith("causal") else [False]:
            yield dict(
                attn_mask=attn_mask,
                key_padding_mask=padding,
                is_causal=is_causal,
                need_weights=weights != "no",
                average_attn_weights=weights == "mean",
            )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["self", "cross", "kdim_vdim"])
@pytest.mark.parametrize("add_bias_kv", [False, True])
@pytest.mark.parametrize("add_zero_attn", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_full_product_equals_torch(
    layout: str, kind: str, add_bias_kv: bool, add_zero_attn: bool, bias: bool, exact_dtype: torch.dtype
) -> None:
    kdim, vdim = (6, 9) if kind == "kdim_vdim" else (EMBED_DIM, EMBED_DIM)
    theirs, ours = twins(
        exact_dtype,
        bias=bias,
        add_bias_kv=add_bias_kv,
        add_zero_attn=add_zero_attn,
        batch_first=layout == "batch_first",
        kdim=kdim,
        vdim=vdim,
    )
    inputs, seqlen_q, seqlen_k = make_inputs(layout, kind, kdim, vdim, exact_dtype)
    total_k = seqlen_k + add_bias_kv + add_zero_attn
    batch = () if layout == "unbatched" else (BATCH,)
    for call in cases(layout, *make_masks(exact_dtype, seqlen_q, seqlen_k)):
        heads = () if call["average_attn_weights"] else (NUM_HEADS,)
        grads = [
            torch.randn(inputs[0].shape, dtype=exact_dtype),
            torch.randn(*batch, *heads, seqlen_q, total_k, dtype=exact_dtype),
        ]
        case = {name: getattr(value, "dtype", value) for name, value in call.items()}
        assert_equal(run(ours, inputs, grads, **call), run(theirs, inputs, grads, **call), case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("mask", ["none", "bool_2d", "float_3d", "causal"])
@pytest.mark.usefixtures("exact_dtype")
def test_low_precision_within_the_oracle_bound(dtype: torch.dtype, need_weights: bool, mask: str) -> None:
    options: dict[str, Any] = dict(embed_dim=48, num_heads=2, batch_first=True, add_bias_kv=True)
    reference, _ = twins(torch.float64, **options)
    low, ours = twins(dtype, **options)
    low.load_state_dict(reference.state_dict())
    ours.load_state_dict(reference.state_dict())
    reference.load_state_dict(low.state_dict())
    inputs = [(0.3 + torch.randn(BATCH, 33, 48)).to(dtype)]
    grads = [torch.randn(BATCH, 33, 48).to(dtype), torch.randn(BATCH, 33, 34).to(dtype)]
    call = dict(attn_mask=make_masks(dtype, 33, 33)[0][mask], need_weights=need_weights)
    exact = dict(call, attn_mask=_double(call["attn_mask"]))
    results = run(reference, [_double(x) for x in inputs], [_double(x) for x in grads], **exact)
    assert_within_oracle_bound(run(ours, inputs, grads, **call), run(low, inputs, grads, **call), results)


def _double(x: Tensor | None) -> Tensor | None:
    return x.double() if x is not None and x.is_floating_point() else x


def test_gradcheck() -> None:
    _, ours = twins(batch_first=True)
    x = torch.randn(1, 3, EMBED_DIM, dtype=torch.float64, requires_grad=True)
    mask = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, mask: ours(x, x, x, attn_mask=mask), (x, mask))


class TestMasks:
    def test_masks_are_not_combined_into_a_square(self, attention_calls: list[dict[str, Any]]) -> None:
        _, ours = twins(batch_first=True)
        x = torch.randn(BATCH, SEQLEN_Q, EMBED_DIM, dtype=torch.float64)
        attn_masks, padding_masks = make_masks(torch.float64, SEQLEN_Q, SEQLEN_Q)
        wide = (BATCH, 1, 1, SEQLEN_Q)
        square = (1, 1, SEQLEN_Q, SEQLEN_Q)
        expected = {
            ("bool_2d", "bool"): {"mask": square, "bias": wide},
            ("bool_2d", "float"): {"mask": square, "bias": wide},
            ("float_2d", "bool"): {"mask": wide, "bias": square},
            ("none", "bool"): {"mask": wide, "bias": None},
            ("none", "float"): {"mask": None, "bias": wide},
            ("float_2d", "none"): {"mask": None, "bias": square},
        }
        for (attn_kind, padding_kind), shapes in expected.items():
            attn_mask, padding = attn_masks[attn_kind], padding_masks[padding_kind]
            ours(x, x, x, attn_mask=attn_mask, key_padding_mask=padding, need_weights=False)
            options = attention_calls.pop()
            assert {name: options[name] if options[name] is None else options[name].shape for name in shapes} == shapes

    @pytest.mark.parametrize("padding", ["none", "bool", "float"])
    def test_a_hint_makes_the_mask_unnecessary(self, padding: str, attention_calls: list[dict[str, Any]]) -> None:
        theirs, ours = twins(batch_first=True)
        x = torch.randn(BATCH, SEQLEN_Q, EMBED_DIM, dtype=torch.float64)
        attn_masks, padding_masks = make_masks(torch.float64, SEQLEN_Q, SEQLEN_Q)
        call = dict(attn_mask=attn_masks["causal_float"], key_padding_mask=padding_masks[padding], is_causal=True)
        out, _ = ours(x, x, x, need_weights=False, **call)
        torch.testing.assert_close(out, theirs(x, x, x, need_weights=False, **call)[0])
        options = attention_calls.pop()
        assert options["causal"] and options["top_left"]
        for name in ("mask", "bias"):
            assert options[name] is None or options[name].shape == (BATCH, 1, 1, SEQLEN_Q)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_mask_of_another_dtype(self, dtype: torch.dtype) -> None:
        reference, ours = twins(torch.float64, batch_first=True)
        ours = ours.to(dtype)
        reference.load_state_dict(ours.state_dict())
        x = torch.randn(BATCH, SEQLEN_Q, EMBED_DIM).to(dtype)
        mask = nn.Transformer.generate_square_subsequent_mask(SEQLEN_Q)
        padding = torch.zeros(BATCH, SEQLEN_Q, dtype=torch.float64)
        for need_weights in (False, True):
            out, _ = ours(x, x, x, attn_mask=mask, key_padding_mask=padding, need_weights=need_weights)
            assert out.dtype == dtype
            exact = reference(x.double(), x.double(), x.double(), attn_mask=mask.double())[0]
            torch.testing.assert_close(out.double(), exact, atol=0.05, rtol=0.05)

    @pytest.mark.parametrize("kind", ["bool", "float"])
    @pytest.mark.parametrize("by", ["attn_mask", "key_padding_mask", "both"])
    def test_rows_that_see_nothing_are_zero(self, kind: str, by: str) -> None:
        _, ours = twins(torch.float32, batch_first=True, bias=False)
        x = torch.randn(BATCH, SEQLEN_Q, EMBED_DIM, requires_grad=True)
        hidden = torch.zeros(BATCH, SEQLEN_Q, dtype=torch.bool)
        hidden[0] = True
        attn_mask = torch.zeros(SEQLEN_Q, SEQLEN_Q, dtype=torch.bool)
        attn_mask[2] = True
        if kind == "float":
            attn_mask = torch.zeros(attn_mask.shape).masked_fill(attn_mask, -torch.inf)
            hidden = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)
        masks = {"attn_mask": attn_mask, "key_padding_mask": hidden}
        out, weights = ours(x, x, x, **(masks if by == "both" else {by: masks[by]}))
        blind = torch.zeros(BATCH, SEQLEN_Q, dtype=torch.bool)
        blind[:, 2] |= by != "key_padding_mask"
        blind[0] |= by != "attn_mask"
        assert (out[blind] == 0).all() and (weights[blind] == 0).all()
        assert torch.isfinite(out).all() and (out[~blind] != 0).all()
        (out[blind].sum() + weights[blind].sum()).backward()
        assert (x.grad == 0).all() and (ours.in_proj_weight.grad == 0).all()

    def test_padding_may_hold_nan(self) -> None:
        theirs, ours = twins(batch_first=True)
        query = torch.randn(BATCH, SEQLEN_Q, EMBED_DIM, dtype=torch.float64)
        memory = torch.randn(BATCH, SEQLEN_K, EMBED_DIM, dtype=torch.float64)
        attn_masks, padding_masks = make_masks(torch.float64, SEQLEN_Q, SEQLEN_K)
        poisoned = memory.masked_fill(padding_masks["bool"][..., None], torch.nan)
        for attn_mask in attn_masks.values():
            call = dict(attn_mask=attn_mask, key_padding_mask=padding_masks["bool"])
            torch.testing.assert_close(ours(query, poisoned, poisoned, **call), theirs(query, memory, memory, **call))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_padding_of_nan_beside_a_mask(self, device: str, dtype: torch.dtype) -> None:
        """Neither in out nor in the gradient of what is no padding."""
        ours = flash_ext.MultiheadAttention(EMBED_DIM, 2, batch_first=True, device=device, dtype=dtype)
        query, memory = (torch.randn(BATCH, n, EMBED_DIM, device=device, dtype=dtype) for n in (SEQLEN_Q, SEQLEN_K))
        hidden = torch.rand(SEQLEN_Q, SEQLEN_K, device=device) < 0.3
        padding = torch.arange(SEQLEN_K, device=device).expand(BATCH, -1) >= SEQLEN_K - 2
        results = []
        for filling in (0.0, torch.nan):
            filled = memory.masked_fill(padding[..., None], filling).requires_grad_()
            leaves = [query.requires_grad_(), filled]
            out, _ = ours(query, filled, filled, attn_mask=hidden, key_padding_mask=padding, need_weights=False)
            gradients = torch.autograd.grad(out.float().sum(), leaves)
            results.append((out, gradients[0], gradients[1][~padding]))
        torch.testing.assert_close(*results)


class OtherTensor(torch.Tensor):
    """Of a class that says nothing of what it holds."""


class TestErrors:
    """Torch's, word for word or nearly so, and before anything is computed."""

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (dict(is_causal=True), "Need attn_mask"),
            (dict(attn_mask=torch.zeros(5, 5, dtype=torch.int64)), "attn_mask"),
            (dict(key_padding_mask=torch.zeros(2, 5, dtype=torch.int64)), "key_padding_mask"),
            (dict(attn_mask=torch.zeros(4, 5)), "attn_mask"),
            (dict(attn_mask=torch.zeros(3, 5, 5)), "attn_mask"),
            (dict(attn_mask=torch.zeros(1, 2, 5, 5)), "attn_mask"),
            (dict(key_padding_mask=torch.zeros(2, 4)), "key_padd"),
            (dict(key_padding_mask=torch.zeros(5)), "key_padding_mask"),
        ],
    )
    def test_masks(self, call: dict[str, Any], message: str, attention_calls: list[dict[str, Any]]) -> None:
        x = torch.randn(2, 5, EMBED_DIM)
        raised = []
        for module in twins(torch.float32, batch_first=True):
            with pytest.raises((AssertionError, RuntimeError), match=message) as error:
                module(x, x, x, **call)
            raised.append(error.type)
        assert raised[0] is raised[1] and not attention_calls

    def test_shapes(self) -> None:
        x = torch.randn(2, 5, EMBED_DIM)
        for query, key, value in [(x[0, 0],) * 3, (x, x[0], x[0]), (x[..., 1:],) * 3, (x, x, x[:, 1:])]:
            for module in twins(torch.float32, batch_first=True):
                with pytest.raises(AssertionError):
                    module(query, key, value)

    @pytest.mark.parametrize(
        ("shapes", "call", "message"),
        [
            ([(4,)] * 3, {}, "query should be unbatched 2D or batched 3D tensor but received 1-D query tensor"),
            ([(2, 4, 4, 8)] * 3, {}, "query should be unbatched 2D or batched 3D tensor but received 4-D query tensor"),
            ([(4, 4, 8), (4, 8), (4, 4, 8)], {}, "to be 3-D but found 2-D and 3-D tensors respectively"),
            ([(4, 4, 8), (4, 4, 8), (4, 8)], {}, "to be 3-D but found 3-D and 2-D tensors respectively"),
            ([(4, 8), (4, 4, 8), (4, 8)], {}, "`key` and `value` to be 2-D but found 3-D and 2-D tensors respectively"),
            ([(4, 4, 8)] * 3, {"key_padding_mask": (4,)}, "`None` or 2-D but found 1-D tensor instead"),
            ([(4, 8)] * 3, {"key_padding_mask": (1, 4)}, "`None` or 1-D but found 2-D tensor instead"),
            ([(4, 4, 8)] * 3, {"attn_mask": (4,)}, "`attn_mask` to be `None`, 2-D or 3-D but found 1-D tensor instead"),
            ([(4, 8)] * 3, {"attn_mask": (4,)}, "`attn_mask` to be `None`, 2-D or 3-D but found 1-D tensor instead"),
            ([(4, 8)] * 3, {"attn_mask": (5, 4, 4)}, r"Expected `attn_mask` shape to be \(2, 4, 4\)"),
            ([(4, 3, 8)] * 3, {"attn_mask": (5, 4)}, r"The shape of the 2D attn_mask is .*5, 4.* should be \(4, 4\)"),
            ([(4, 3, 7)] * 3, {}, "was expecting embedding dimension of 8, but got 7"),
        ],
        ids=str,
    )
    def test_torchs_messages(
        self, shapes: list[tuple[int, ...]], call: dict[str, tuple[int, ...]], message: str
    ) -> None:
        """What torch's own tests look for: both modules say it."""
        masks = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in call.items()}
        for make in (nn.MultiheadAttention, flash_ext.MultiheadAttention):
            with pytest.raises((AssertionError, RuntimeError), match=message):
                make(8, 2)(*map(torch.zeros, shapes), **masks)

    @pytest.mark.parametrize("name", ["query", "key", "value", "key_padding_mask", "attn_mask"])
    def test_classes_of_tensors(self, name: str) -> None:
        x = torch.randn(2, 5, EMBED_DIM)
        call = dict(query=x, key=x, value=x, key_padding_mask=torch.zeros(2, 5), attn_mask=torch.zeros(5, 5))
        call[name] = call[name].as_subclass(OtherTensor)
        with pytest.raises(TypeError, match=f"^{name} must be .*OtherTensor"):
            twins(torch.float32, batch_first=True)[1](**call)

    @pytest.mark.parametrize("name", ["query", "key", "value"])
    @pytest.mark.parametrize("wrong", [None, "x", [[1.0] * EMBED_DIM]], ids=str)
    def test_what_is_no_tensor(self, name: str, wrong: object) -> None:
        call = dict.fromkeys(["query", "key", "value"], torch.randn(2, EMBED_DIM)) | {name: wrong}
        with pytest.raises(TypeError, match=f"^{name} must be a Tensor, got"):
            twins(torch.float32)[1](**call)

    def test_the_hint_is_a_bool(self) -> None:
        x = torch.randn(2, 5, EMBED_DIM)
        with pytest.raises(TypeError, match=r"^is_causal must be True or False, got str 'no'"):
            twins(torch.float32, batch_first=True)[1](x, x, x, attn_mask=torch.zeros(5, 5), is_causal="no")

    def test_constructor(self) -> None:
        with pytest.raises(AssertionError, match="divisible"):
            flash_ext.MultiheadAttention(10, 3)
        with pytest.raises(ValueError, match="greater than 0"):
            flash_ext.MultiheadAttention(0, 1)
        with pytest.raises(ValueError, match="head_dim is 300, at most 256 is supported"):
            flash_ext.MultiheadAttention(600, 2)

    @pytest.mark.parametrize("name", ["bias", "add_bias_kv", "add_zero_attn", "batch_first"])
    def test_flags_of_the_constructor(self, name: str) -> None:
        for wrong in ("False", None, 0):
            with pytest.raises(TypeError, match=f"^{name} must be True or False, got "):
                flash_ext.MultiheadAttention(EMBED_DIM, NUM_HEADS, **{name: wrong})

    def test_dropout(self) -> None:
        for wrong in ("0.1", None, True, torch.tensor(0.1)):
            with pytest.raises(TypeError, match=r"^dropout must be a number, got "):
                flash_ext.MultiheadAttention(EMBED_DIM, NUM_HEADS, dropout=wrong)  # type: ignore[arg-type]
        for outside in (-0.1, 1.5, math.nan):
            with pytest.raises(ValueError, match=rf"^dropout must be in \[0, 1\], got {outside}"):
                flash_ext.MultiheadAttention(EMBED_DIM, NUM_HEADS, dropout=outside)

    @pytest.mark.parametrize("later", ["0.1", torch.tensor(0.1), -0.1])
    def test_dropout_that_is_set_later(self, later: Any) -> None:
        ours, x = flash_ext.MultiheadAttention(EMBED_DIM, NUM_HEADS), torch.randn(5, 2, EMBED_DIM)
        ours.dropout = later
        with pytest.raises((TypeError, RuntimeError), match="dropout_p must be "):
            ours(x, x, x)
