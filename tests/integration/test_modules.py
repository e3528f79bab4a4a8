"""``MultiheadAttention`` against ``nn.MultiheadAttention``, and ``convert``."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flash_ext
from flash_ext import modules
from tests.oracle import ROUNDING

EMBED_DIM, NUM_HEADS, BATCH, SEQLEN_Q, SEQLEN_K = 10, 2, 2, 5, 7  # a head dim of 5 is padded to 8


@pytest.fixture(autouse=True)
def without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Support for mismatched")
        warnings.filterwarnings("ignore", message="enable_nested_tensor")
        warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors")
        yield


@pytest.fixture
def exact_dtype(device: str) -> Iterator[torch.dtype]:
    """Makes every tensor of the test on the device; the dtype in which results are compared tightly."""
    with torch.device(device):
        yield torch.float64 if device == "cpu" else torch.float32


@pytest.fixture
def attention_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of each call that our modules make of the attention function."""
    calls: list[dict[str, Any]] = []
    attention = modules.attention

    def recorded(*args: Any, **options: Any) -> Any:
        calls.append(options)
        return attention(*args, **options)

    monkeypatch.setattr(modules, "attention", recorded)
    return calls


def twins(dtype: torch.dtype = torch.float64, **options: Any) -> tuple[nn.MultiheadAttention, nn.MultiheadAttention]:
    """(torch's, ours) with equal, non-zero parameters."""
    options = {"embed_dim": EMBED_DIM, "num_heads": NUM_HEADS, "dtype": dtype} | options
    theirs, ours = nn.MultiheadAttention(**options), flash_ext.MultiheadAttention(**options)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(0.05 + torch.randn_like(parameter) * options["embed_dim"] ** -0.5)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def make_masks(dtype: torch.dtype, seqlen_q: int, seqlen_k: int) -> tuple[dict[str, Tensor | None], ...]:
    """Kinds of attn_mask and of key_padding_mask for BATCH sequences; no row is masked entirely."""

    def hidden(*shape: int) -> Tensor:
        mask = torch.rand(*shape) < 0.3
        mask[..., 0] = False
        return mask

    def additive(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype).masked_fill(hidden(*shape), -torch.inf)

    causal = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).triu(1)
    attn_masks = {
        "none": None,
        "bool_2d": hidden(seqlen_q, seqlen_k),
        "bool_3d": hidden(BATCH * NUM_HEADS, seqlen_q, seqlen_k),
        "float_2d": additive(seqlen_q, seqlen_k),
        "float_3d": additive(BATCH * NUM_HEADS, seqlen_q, seqlen_k),
        "causal": causal,
        "causal_float": torch.zeros(causal.shape, dtype=dtype).masked_fill(causal, -torch.inf),
    }
    padding = hidden(BATCH, seqlen_k)
    padding_masks = {"none": None, "bool": padding, "float": additive(BATCH, seqlen_k)}
    return attn_masks, padding_masks


def run(module: nn.Module, inputs: list[Tensor], grads: list[Tensor], **call: Any) -> dict[str, Tensor]:
    """Output, weights and every gradient, of parameters, inputs and float masks; ``inputs`` of one is shared by all.

    A mask that a hint replaces has no gradient.
    """
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    for name in ("attn_mask", "key_padding_mask"):
        if call.get(name) is not None and call[name].is_floating_point() and not call.get("is_causal"):
            call[name] = call[name].detach().clone().requires_grad_()
    module.zero_grad()
    out, weights = module(*(inputs * 3 if len(inputs) == 1 else inputs), **call)
    results = {"out": out}
    loss = (out * grads[0].to(out.dtype)).sum()
    if weights is not None:
        results["weights"] = weights
        loss = loss + (weights * grads[1].to(weights.dtype)).sum()
    loss.backward()
    results |= {f"grad of {n}": p.grad for n, p in module.named_parameters() if p.grad is not None}
    results |= {f"grad of input {n}": x.grad for n, x in enumerate(inputs)}
    results |= {f"grad of {n}": m.grad for n, m in call.items() if isinstance(m, Tensor) and m.requires_grad}
    return {name: result.detach() for name, result in results.items()}


def assert_equal(
    ours: dict[str, Tensor], theirs: dict[str, Tensor], case: object, tolerance: float | None = None
) -> None:
    tolerance = tolerance or {torch.float64: 1e-10, torch.float32: 2e-5}[ours["out"].dtype]
    assert ours.keys() == theirs.keys(), case
    for name, expected in theirs.items():
        actual = ours[name]
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), (case, name)
        difference = (actual - expected).abs().max().item() if expected.numel() else 0.0
        assert difference <= tolerance * (1 + expected.abs().max().item()), (case, name, difference)


def assert_within_oracle_bound(ours: dict[str, Tensor], low: dict[str, Tensor], ref: dict[str, Tensor]) -> None:
    assert ours.keys() == ref.keys()
    for name, expected in ref.items():
        error, error_low = ((results[name].double() - expected).abs().max().item() for results in (ours, low))
        rounding = ROUNDING[ours[name].dtype] * torch.finfo(ours[name].dtype).eps * expected.abs().max().item()
        # Weights are of scores and an lse around 20, each of them a rounded float; gradients are made of weights.
        rounding *= 1 if name == "out" else 2
        assert error <= 2 * error_low + rounding, name


LAYOUTS = ["batch_first", "sequence_first", "unbatched"]


def make_inputs(layout: str, kind: str, kdim: int, vdim: int, dtype: torch.dtype) -> tuple[list[Tensor], int, int]:
    """Inputs of self-attention (one tensor), memory attention (key is value) or cross-attention, and lengths."""
    seqlen_k = SEQLEN_Q if kind == "self" else SEQLEN_K
    shapes = [(SEQLEN_Q, EMBED_DIM)] if kind == "self" else [(SEQLEN_Q, EMBED_DIM), (seqlen_k, kdim), (seqlen_k, vdim)]
    if layout == "batch_first":
        shapes = [(BATCH, *shape) for shape in shapes]
    elif layout == "sequence_first":
        shapes = [(seqlen, BATCH, dim) for seqlen, dim in shapes]
    return [0.3 + torch.randn(*shape, dtype=dtype) for shape in shapes], SEQLEN_Q, seqlen_k


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


@pytest.mark.usefixtures("exact_dtype")
class TestDropout:
    P = 0.4

    def make(self, **options: Any) -> tuple[nn.MultiheadAttention, Tensor]:
        _, ours = twins(torch.float32, embed_dim=16, batch_first=True, dropout=self.P, **options)
        return ours, torch.randn(4, 24, 16)

    def test_only_in_training(self) -> None:
        ours, x = self.make()
        without = flash_ext.MultiheadAttention(16, NUM_HEADS, batch_first=True)
        without.load_state_dict(ours.state_dict())
        assert not torch.equal(ours(x, x, x)[0], without(x, x, x)[0])
        torch.testing.assert_close(ours.eval()(x, x, x), without(x, x, x))

    def test_weights_are_those_that_made_the_output(self) -> None:
        ours, x = self.make()
        out, weights = ours(x, x, x, average_attn_weights=False)
        v = nn.functional.linear(x, ours.in_proj_weight[32:], ours.in_proj_bias[32:]).unflatten(-1, (NUM_HEADS, 8))
        attended = torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2)
        torch.testing.assert_close(out, ours.out_proj(attended))

    def test_rate_and_scale(self) -> None:
        ours, x = self.make()
        dropped = ours(x, x, x, average_attn_weights=False)[1]
        kept = ours.eval()(x, x, x, average_attn_weights=False)[1]
        assert (dropped == 0).float().mean().item() == pytest.approx(self.P, abs=0.05)
        rounded = round(self.P * 256) / 256  # what eight bits a weight can tell apart
        torch.testing.assert_close(dropped, torch.where(dropped == 0, 0, kept / (1 - rounded)))

    def test_repeats_with_the_seed(self) -> None:
        ours, x = self.make()
        outs = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            outs.append(ours(x, x, x, need_weights=False)[0])
        assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])

    def test_everything_dropped(self) -> None:
        ours, x = self.make(bias=False)
        ours.dropout = 1.0
        out, weights = ours(x, x, x)
        assert (out == 0).all() and (weights == 0).all()


class TestModuleBehaviour:
    @pytest.mark.parametrize("options", [{}, dict(kdim=6, vdim=9, add_bias_kv=True), dict(bias=False)])
    def test_same_initialisation_attributes_and_state(self, options: dict[str, Any]) -> None:
        made = []
        for cls in (nn.MultiheadAttention, flash_ext.MultiheadAttention):
            torch.manual_seed(7)
            made.append(cls(EMBED_DIM, NUM_HEADS, **options))
        theirs, ours = made
        assert vars(theirs).keys() == vars(ours).keys()
        assert list(theirs.state_dict()) == list(ours.state_dict())
        for name, expected in theirs.state_dict().items():
            assert torch.equal(ours.state_dict()[name], expected)
        theirs.load_state_dict(ours.state_dict())
        ours.load_state_dict(theirs.state_dict())
        torch.manual_seed(7)
        theirs._reset_parameters()
        torch.manual_seed(7)
        ours._reset_parameters()
        assert torch.equal(theirs.out_proj.weight, ours.out_proj.weight)
        for name, expected in theirs.state_dict().items():
            assert torch.equal(ours.state_dict()[name], expected)

    @pytest.mark.parametrize("options", [{}, dict(kdim=6, vdim=9)])
    def test_copies_and_pickles(self, options: dict[str, Any]) -> None:
        _, ours = twins(**options)
        inputs, _, _ = make_inputs("sequence_first", "cross", ours.kdim, ours.vdim, torch.float64)
        buffer = io.BytesIO()
        torch.save(ours, buffer)
        buffer.seek(0)
        copies = [copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), torch.load(buffer, weights_only=False)]
        for other in copies:
            assert type(other) is flash_ext.MultiheadAttention
            torch.testing.assert_close(other(*inputs), ours(*inputs))

    def test_gradients_of_a_subset(self) -> None:
        theirs, ours = twins()
        inputs, _, _ = make_inputs("sequence_first", "cross", EMBED_DIM, EMBED_DIM, torch.float64)
        for module in (theirs, ours):
            module.in_proj_weight.requires_grad_(False)
            module.in_proj_bias.requires_grad_(False)
        for wanted in range(3):
            grads = []
            for module in (theirs, ours):
                leaves = [x.clone().requires_grad_(n == wanted) for n, x in enumerate(inputs)]
                module(*leaves, need_weights=False)[0].square().sum().backward()
                grads.append([x.grad for x in leaves])
            torch.testing.assert_close(grads[1][wanted], grads[0][wanted])
            assert all((grad is None) == (n != wanted) for n, grad in enumerate(grads[1]))

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_output_is_contiguous(self, layout: str) -> None:
        _, ours = twins(batch_first=layout == "batch_first")
        inputs, _, _ = make_inputs(layout, "cross", EMBED_DIM, EMBED_DIM, torch.float64)
        assert all(result.is_contiguous() for result in ours(*inputs))

    @pytest.mark.parametrize("need_weights", [False, True])
    @pytest.mark.parametrize("add_bias_kv", [False, True])
    def test_autocast(self, need_weights: bool, add_bias_kv: bool) -> None:
        theirs, ours = twins(torch.float32, batch_first=True, add_bias_kv=add_bias_kv)
        inputs = [torch.randn(BATCH, SEQLEN_Q, EMBED_DIM)]
        grads = [torch.randn(BATCH, SEQLEN_Q, EMBED_DIM), torch.randn(BATCH, SEQLEN_Q, SEQLEN_Q + add_bias_kv)]
        results = []
        for module in (theirs, ours):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                results.append(run(module, inputs, grads, need_weights=need_weights))
        assert_equal(results[1], results[0], "autocast", tolerance=0.05)

    @pytest.mark.parametrize("no_grad", [torch.no_grad, torch.inference_mode])
    def test_evaluation_runs_our_attention(
        self, no_grad: Callable[[], Any], attention_calls: list[dict[str, Any]]
    ) -> None:
        theirs, ours = twins(batch_first=True)
        x = torch.randn(BATCH, SEQLEN_Q, EMBED_DIM, dtype=torch.float64)
        with no_grad():
            torch.testing.assert_close(ours.eval()(x, x, x), theirs.eval()(x, x, x))
        assert len(attention_calls) == 1

    def test_empty_sequences(self) -> None:
        _, ours = twins(batch_first=True)
        for query_shape, key_shape in [((0, 3), (0, 3)), ((2, 0), (2, 3))]:
            query = torch.randn(*query_shape, EMBED_DIM, dtype=torch.float64, requires_grad=True)
            key = torch.randn(*key_shape, EMBED_DIM, dtype=torch.float64)
            out, weights = ours(query, key, key)
            out.sum().backward()
            assert out.shape == query.shape and weights.shape == (*query_shape, key_shape[1])

    @pytest.mark.parametrize("need_weights", [False, True])
    def test_compiles_in_one_graph(self, need_weights: bool) -> None:
        theirs, ours = twins(torch.float32, batch_first=True)
        inputs = [torch.randn(BATCH, SEQLEN_Q, EMBED_DIM)]
        grads = [torch.randn(BATCH, SEQLEN_Q, EMBED_DIM), torch.randn(BATCH, SEQLEN_Q, SEQLEN_Q)]
        mask = make_masks(torch.float32, SEQLEN_Q, SEQLEN_Q)[0]["float_2d"]
        torch._dynamo.reset()
        compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
        results = run(compiled, inputs, grads, attn_mask=mask, need_weights=need_weights)
        results = {name.replace("_orig_mod.", ""): result for name, result in results.items()}
        expected = run(theirs, inputs, grads, attn_mask=mask, need_weights=need_weights)
        assert_equal(results, expected, "compiled", tolerance=1e-5)

    def test_exports(self) -> None:
        theirs, ours = twins(torch.float32, batch_first=True)
        x = torch.randn(BATCH, SEQLEN_Q, EMBED_DIM)
        length = torch.export.Dim("length", min=2, max=64)
        exported = torch.export.export(ours.eval(), (x, x, x), dynamic_shapes=({1: length}, {1: length}, {1: length}))
        longer = torch.randn(BATCH, 2 * SEQLEN_Q, EMBED_DIM)
        torch.testing.assert_close(exported.module()(longer, longer, longer), theirs(longer, longer, longer))

    def test_nested_tensors(self) -> None:
        _, ours = twins(batch_first=True)
        sequences = [torch.randn(n, EMBED_DIM, dtype=torch.float64) for n in (3, 1, 6)]
        nested = torch.nested.as_nested_tensor(sequences)
        out, _ = ours(nested, nested, nested, need_weights=False)
        for part, x in zip(out.unbind(), sequences, strict=True):
            torch.testing.assert_close(part, ours(x, x, x)[0])
        with pytest.raises(AssertionError, match="does not support NestedTensor outside of its fast path"):
            ours(nested, nested, nested, need_weights=True)

    def test_nested_tensors_with_the_causal_rule(self) -> None:
        _, ours = twins(batch_first=True)
        sequences = [torch.randn(n, EMBED_DIM, dtype=torch.float64) for n in (3, 1, 6)]
        nested = torch.nested.as_nested_tensor(sequences)
        out, _ = ours(nested, nested, nested, need_weights=False, is_causal=True)
        for part, x in zip(out.unbind(), sequences, strict=True):
            hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
            torch.testing.assert_close(part, ours(x, x, x, attn_mask=hidden)[0])


def make_encoder(dtype: torch.dtype = torch.float64, **options: Any) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(
        EMBED_DIM, NUM_HEADS, dim_feedforward=12, dropout=0.0, batch_first=True, dtype=dtype, **options
    )
    return nn.TransformerEncoder(layer, num_layers=2)


class TestConvert:
    def convert_copy(self, model: nn.Module) -> tuple[nn.Module, list[str]]:
        lines: list[str] = []
        ours = flash_ext.convert(copy.deepcopy(model), report=lines.append)
        return ours, lines

    def test_keeps_everything_but_the_class(self) -> None:
        theirs, _ = twins(add_bias_kv=True)
        theirs.eval()
        theirs.in_proj_bias.requires_grad_(False)
        seen: list[nn.Module] = []
        theirs.register_forward_pre_hook(lambda module, args: seen.append(module))
        parameters = list(theirs.parameters())
        model = nn.Sequential(nn.Linear(3, 3), theirs)
        assert flash_ext.convert(model) is model
        assert model[1] is theirs and type(theirs) is flash_ext.MultiheadAttention
        assert all(a is b for a, b in zip(parameters, theirs.parameters(), strict=True))
        assert not theirs.training and not theirs.in_proj_bias.requires_grad
        x = torch.randn(SEQLEN_Q, BATCH, EMBED_DIM, dtype=torch.float64)
        theirs(x, x, x)
        assert seen == [theirs]

    def test_says_what_it_changed(self, capsys: pytest.CaptureFixture[str]) -> None:
        model = nn.ModuleDict({"a": nn.MultiheadAttention(8, 2), "b": nn.ModuleList([nn.MultiheadAttention(8, 2)])})
        flash_ext.convert(model)
        assert "2 nn.MultiheadAttention converted: a, b.0" in capsys.readouterr().out
        flash_ext.convert(model)
        assert "0 nn.MultiheadAttention converted" in capsys.readouterr().out
        assert "the model itself" in self.convert_copy(nn.MultiheadAttention(8, 2))[1][-1]

    def test_leaves_what_it_cannot_vouch_for(self) -> None:
        class Special(nn.MultiheadAttention):
            pass

        model, lines = self.convert_copy(nn.ModuleList([Special(8, 2), nn.MultiheadAttention(512, 1)]))
        assert type(model[0]) is Special and type(model[1]) is nn.MultiheadAttention
        assert "left 0 alone" in lines[0] and "subclass" in lines[0]
        assert "left 1 alone" in lines[1] and "head_dim is 512" in lines[1]

    @pytest.mark.parametrize("norm_first", [False, True])
    @pytest.mark.parametrize("activation", ["relu", "gelu"])
    @pytest.mark.parametrize("mask", ["none", "causal", "padding", "both"])
    @pytest.mark.parametrize("mode", ["train", "eval", "no_grad", "inference"])
    def test_encoder(
        self,
        norm_first: bool,
        activation: str,
        mask: str,
        mode: str,
        exact_dtype: torch.dtype,
        attention_calls: list[dict[str, Any]],
    ) -> None:
        theirs = make_encoder(exact_dtype, norm_first=norm_first, activation=activation).train(mode == "train")
        ours, _ = self.convert_copy(theirs)
        x = torch.randn(BATCH, SEQLEN_Q, EMBED_DIM, dtype=exact_dtype)
        padding = torch.zeros(BATCH, SEQLEN_Q, dtype=torch.bool)
        padding[1, 3:] = True
        call: dict[str, Any] = {}
        if mask in ("causal", "both"):
            call["mask"] = nn.Transformer.generate_square_subsequent_mask(SEQLEN_Q, dtype=exact_dtype)
        if mask in ("padding", "both"):
            call["src_key_padding_mask"] = padding
        context = {"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(mode, torch.enable_grad)
        with context():
            torch.testing.assert_close(ours(x, **call), theirs(x, **call))
        assert len(attention_calls) == 2
        assert all(options.get("causal", False) == ("mask" in call) for options in attention_calls)

    def test_a_module_put_into_a_layer_by_hand_is_not_bypassed(self, attention_calls: list[dict[str, Any]]) -> None:
        layer = nn.TransformerEncoderLayer(EMBED_DIM, NUM_HEADS, batch_first=True, dropout=0.0)
        ours = flash_ext.MultiheadAttention(EMBED_DIM, NUM_HEADS, batch_first=True)
        ours.load_state_dict(layer.self_attn.state_dict())
        x = torch.randn(BATCH, SEQLEN_Q, EMBED_DIM)
        expected = layer.eval()(x)
        layer.self_attn = ours.eval()
        with torch.inference_mode():
            torch.testing.assert_close(layer(x), expected)
        assert len(attention_calls) == 1

    @pytest.mark.parametrize("batch_first", [False, True])
    def test_encoder_decoder_trains_alike(self, batch_first: bool, attention_calls: list[dict[str, Any]]) -> None:
        theirs = nn.Transformer(
            EMBED_DIM, NUM_HEADS, 1, 2, 12, dropout=0.0, batch_first=batch_first, dtype=torch.float64
        )
        ours, lines = self.convert_copy(theirs)
        assert "5 nn.MultiheadAttention converted" in lines[-1]
        source, target = (torch.randn(n, n, EMBED_DIM, dtype=torch.float64) for n in (4, 4))
        mask = nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64)
        padding = torch.zeros(4, 4, dtype=torch.bool)
        padding[:, 3] = True
        for model in (theirs, ours):
            out = model(source, target, tgt_mask=mask, src_key_padding_mask=padding, memory_key_padding_mask=padding)
            out.square().sum().backward()
        assert len(attention_calls) == 5
        for (name, a), b in zip(theirs.named_parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(b.grad, a.grad, msg=lambda text, name=name: f"{name}: {text}")

    def test_encoder_compiles(self) -> None:
        theirs = make_encoder(torch.float32).eval()
        ours, _ = self.convert_copy(theirs)
        torch._dynamo.reset()
        compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
        x = torch.randn(BATCH, SEQLEN_Q, EMBED_DIM)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), theirs(x), atol=1e-5, rtol=1e-5)
