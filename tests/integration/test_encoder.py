"""Converted ``nn.TransformerEncoder`` and its layers in evaluation, against torch's, fused and not."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

import flash_ext
from flash_ext import encoder as encoder_module
from flash_ext import modules
from tests.integration.module_twins import WITHOUT_TORCHS_WARNINGS

EMBED_DIM, NUM_HEADS, HIDDEN, BATCH, SEQLEN = 32, 4, 48, 3, 9
LENGTHS = [9, 4, 7]
EXACT = {"cpu": torch.float64, "cuda": torch.float32}

pytestmark = WITHOUT_TORCHS_WARNINGS


@pytest.fixture(autouse=True)
def accumulating(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, inputs as small as those of these tests take the way of large ones."""
    monkeypatch.setattr(encoder_module, "ACCUMULATE_FROM", 1)


@pytest.fixture
def attention_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], dict[str, Any]]]:
    """The shape of q and the options of each call of the attention function."""
    calls: list[tuple[tuple[int, ...], dict[str, Any]]] = []
    attention = modules.attention

    def recorded(q: Tensor, *args: Any, **options: Any) -> Any:
        calls.append((tuple(q.shape), options))
        return attention(q, *args, **options)

    monkeypatch.setattr(modules, "attention", recorded)
    return calls


@pytest.fixture(params=["inference_mode", "no_grad", "frozen"])
def without_gradients(request: pytest.FixtureRequest) -> Iterator[bool]:
    """True: gradients are on, and it is for the test to make sure that nothing requires one."""
    context = {"inference_mode": torch.inference_mode, "no_grad": torch.no_grad}.get(request.param, torch.enable_grad)
    with context():
        yield request.param == "frozen"


def make_encoder(
    device: str, dtype: torch.dtype | None = None, hidden: int = HIDDEN, **options: Any
) -> nn.TransformerEncoder:
    """In evaluation, with biases and norms that are not those of the start."""
    options = {"batch_first": True, "activation": "relu", "dtype": dtype or EXACT[device]} | options
    layer = nn.TransformerEncoderLayer(EMBED_DIM, NUM_HEADS, hidden, device=device, **options)
    encoder = nn.TransformerEncoder(layer, num_layers=2).eval()
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return encoder


def convert_copy(model: nn.Module) -> Any:
    return flash_ext.convert(copy.deepcopy(model), report=lambda line: None)


def make_input(device: str, dtype: torch.dtype | None = None) -> Tensor:
    return (0.3 + torch.randn(BATCH, SEQLEN, EMBED_DIM, device=device)).to(dtype or EXACT[device])


def make_padding(device: str, lengths: list[int] = LENGTHS) -> Tensor:
    """(BATCH, SEQLEN), True = padding."""
    return torch.arange(SEQLEN, device=device) >= torch.tensor(lengths, device=device)[:, None]


@contextmanager
def nothing_fused() -> Iterator[None]:
    """Torch's Python forward: the fused one takes float masks, and autocast, for what they are not."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def assert_equal(ours: Tensor, theirs: Tensor) -> None:
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-4}[theirs.dtype]
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


ACTIVATIONS: dict[str, Any] = {
    "relu": "relu",
    "gelu": "gelu",
    "ReLU": nn.ReLU(),
    "GELU": nn.GELU(),
    "tanh": nn.GELU(approximate="tanh"),
    "silu": F.silu,
}


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_every_mask_equals_torch(
    norm_first: bool, activation: str, bias: bool, batch_first: bool, device: str, without_gradients: bool
) -> None:
    options = dict(norm_first=norm_first, activation=ACTIVATIONS[activation], bias=bias, batch_first=batch_first)
    theirs = make_encoder(device, **options).requires_grad_(not without_gradients)
    ours = convert_copy(theirs)
    x = make_input(device)
    x = x if batch_first else x.transpose(0, 1).contiguous()
    hidden = torch.rand(SEQLEN, SEQLEN, device=device) < 0.3
    hidden.fill_diagonal_(False)
    padding = make_padding(device)
    additive = torch.randn(SEQLEN, SEQLEN, device=device, dtype=x.dtype)
    masks = [None, hidden, additive, nn.Transformer.generate_square_subsequent_mask(SEQLEN, device, x.dtype)]
    float_padding = torch.zeros(padding.shape, device=device, dtype=x.dtype).masked_fill(padding, -torch.inf)
    seen = ~padding if batch_first else ~padding.T
    for mask, key_padding in itertools.product(masks, [None, padding, float_padding]):
        out = ours(x, mask=mask, src_key_padding_mask=key_padding)
        assert out.is_contiguous() and not out.requires_grad
        with nothing_fused():
            expected = theirs(x, mask=mask, src_key_padding_mask=key_padding)
        compared = slice(None) if key_padding is None else seen
        assert_equal(out[compared], expected[compared])
    one, one_padding = (x[0], padding[0]) if batch_first else (x[:, 0], padding[0])
    with nothing_fused():
        assert_equal(ours(x, mask=masks[3], is_causal=True), theirs(x, mask=masks[3], is_causal=True))
        assert_equal(ours(one, src_key_padding_mask=one_padding), theirs(one, src_key_padding_mask=one_padding))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@torch.inference_mode()
def test_low_precision_within_the_oracle_bound(
    dtype: torch.dtype, activation: str, norm_first: bool, padded: bool, device: str
) -> None:
    low = make_encoder(device, dtype, activation=activation, norm_first=norm_first)
    for layer in low.layers:
        layer.activation_relu_or_gelu = 0  # plain PyTorch, nothing fused
    reference = copy.deepcopy(low).double()
    ours = convert_copy(low)
    x = make_input(device, dtype)
    padding = make_padding(device) if padded else None
    ref, plain, out = (
        model(x.to(model.layers[0].norm1.weight.dtype), src_key_padding_mask=padding)
        for model in (reference, low, ours)
    )
    seen = slice(None) if padding is None else ~padding
    error, plain_error = ((result.double() - ref)[seen].abs().max().item() for result in (out, plain))
    assert out.dtype == dtype
    assert error <= 2 * plain_error + 2 * torch.finfo(dtype).eps * ref.abs().max().item()


@pytest.mark.parametrize("kind", ["layer", "encoder"])
@torch.inference_mode()
def test_a_layer_is_nothing_but_what_it_has_to_be(kind: str, device: str) -> None:
    """Four products, two additions, two normalisations, the attention; on CUDA the activation is for free.

    On a CPU two products accumulate on what they are added to, with the bias in it. Only the first is not in place.
    """
    theirs = make_encoder(device, torch.float32)
    model = convert_copy(theirs if kind == "encoder" else theirs.layers[0])
    x = make_input(device, torch.float32)
    model(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(x)
    counts = {event.key.removeprefix("aten::"): event.count for event in profile.key_averages()}
    layers = 2 if kind == "encoder" else 1
    expected = {"linear": 3, "_addmm_activation": 1, "flash_ext::add_layer_norm": 2}
    if device == "cpu":
        expected = {"addmm": 2, "addmm_": 2, "relu_": 1, "native_layer_norm": 2}
        assert counts["add"] == 1 and counts["add_"] == 2 * layers - 1
    for name, count in expected.items():
        assert counts[name] == count * layers
    assert counts["flash_ext::attention_forward_plain"] == layers
    unwanted = {"contiguous", "cat", "clone", "relu", "dropout", "index"} | ({"add"} if device == "cuda" else set())
    assert not unwanted & set(counts)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@torch.inference_mode()
def test_additions_and_norms_in_one_kernel(
    norm_first: bool, padded: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA; between layers that are normalised first, too."""
    monkeypatch.setattr(encoder_module, "_is_one_kernel", lambda *args: True)
    monkeypatch.setattr(encoder_module, "_may_accumulate", lambda *args: False)
    theirs = make_encoder(device, norm_first=norm_first)
    ours, x, padding = convert_copy(theirs), make_input(device), make_padding(device) if padded else None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        out = ours(x, src_key_padding_mask=padding)
    counts = {event.key: event.count for event in profile.key_averages()}
    if not norm_first:
        assert counts["flash_ext::add_layer_norm"] == 4 and "aten::native_layer_norm" not in counts
    elif not padded:
        assert (
            counts["flash_ext::add_layer_norm"] == 3 and counts["aten::native_layer_norm"] == counts["aten::add_"] == 1
        )
    assert_equal(out, theirs(x, src_key_padding_mask=padding))


class TestAccumulating:
    """On a CPU products are written to memory that is there: to none that somebody else holds."""

    VARIANTS = tuple(itertools.product((False, True), (False, True)))

    @pytest.fixture(params=VARIANTS, ids=["norm_last", "norm_last-bias", "norm_first", "norm_first-bias"])
    def theirs(self, request: pytest.FixtureRequest) -> nn.TransformerEncoder:
        norm_first, bias = request.param
        return make_encoder("cpu", norm_first=norm_first, bias=bias)

    @staticmethod
    def accumulated(model: nn.Module, *args: Any, **options: Any) -> tuple[Tensor, int]:
        """The output, and how many products accumulated."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            out = model(*args, **options)
        return out, sum(event.count for event in profile.key_averages() if event.key == "aten::addmm_")

    @pytest.mark.parametrize("padded", [False, True])
    @torch.inference_mode()
    def test_neither_the_input_nor_an_earlier_result_changes(self, theirs: nn.TransformerEncoder, padded: bool) -> None:
        ours, padding = convert_copy(theirs), make_padding("cpu") if padded else None
        inputs = [make_input("cpu") for _ in range(2)]
        before = [x.clone() for x in inputs]
        parameters = [p.clone() for p in ours.parameters()]
        first = ours(inputs[0], src_key_padding_mask=padding)
        kept = first.clone()
        second = ours(inputs[1], src_key_padding_mask=padding)
        assert torch.equal(first, kept) and not torch.equal(first, second)
        assert all(map(torch.equal, inputs, before))
        assert all(map(torch.equal, ours.parameters(), parameters))
        assert len({x.untyped_storage().data_ptr() for x in (*inputs, first, second)}) == 4
        assert first.untyped_storage().nbytes() == first.nbytes  # it keeps no memory of the layers alive

    @pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
    @torch.inference_mode()
    def test_nested_input_does_not_change(self, theirs: nn.TransformerEncoder, layout: torch.layout) -> None:
        x = torch.nested.nested_tensor(list(make_input("cpu")), layout=layout)
        before = [part.clone() for part in x.unbind()]
        _, count = self.accumulated(convert_copy(theirs), x)
        assert count == 4 and all(map(torch.equal, x.unbind(), before))

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
    @torch.inference_mode()
    def test_unbatched_and_single_layers(self, theirs: nn.TransformerEncoder, dtype: torch.dtype) -> None:
        theirs = theirs.to(dtype)
        ours, x = convert_copy(theirs), make_input("cpu", dtype)
        tolerance = {torch.bfloat16: 0.2, torch.float16: 0.03}.get(dtype, 1e-4)
        for theirs_, ours_ in ((theirs, ours), (theirs.layers[0], ours.layers[0])):
            for src in (x, x[1], x[:1]):
                out, count = self.accumulated(ours_, src)
                assert count in (2, 4) and out.dtype == dtype
                with nothing_fused():
                    torch.testing.assert_close(out, theirs_(src), atol=tolerance, rtol=tolerance)

    @pytest.mark.parametrize("norm_first", [False, True])
    @pytest.mark.parametrize("padded", [False, True])
    @torch.inference_mode()
    def test_not_more_memory(self, norm_first: bool, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """At the peak; and of what the layers make one after another, the hidden units are there once."""
        ours = convert_copy(make_encoder("cpu", hidden=4 * EMBED_DIM, norm_first=norm_first))
        x, padding = make_input("cpu"), make_padding("cpu") if padded else None
        peak, allocated = memory_of(lambda: ours(x, src_key_padding_mask=padding))
        monkeypatch.setattr(encoder_module, "_may_accumulate", lambda *args: False)
        peak_before, allocated_before = memory_of(lambda: ours(x, src_key_padding_mask=padding))
        assert peak <= peak_before + 1024 and allocated < 0.7 * allocated_before

    @pytest.mark.parametrize("kind", ["transposed", "empty", "autocast", "norm dtype", "subclass", "forward mode"])
    def test_everybody_else_is_evaluated_as_on_cuda(self, kind: str) -> None:
        theirs = make_encoder("cpu", torch.float32).requires_grad_(False)
        ours, x = convert_copy(theirs), make_input("cpu", torch.float32)
        context: Any = nullcontext()
        if kind == "transposed":
            x = x.transpose(0, 1).contiguous().transpose(0, 1)
        elif kind == "empty":
            x = x[:0]
        elif kind == "autocast":
            context = torch.autocast("cpu", torch.bfloat16)
        elif kind == "norm dtype":
            x = x.bfloat16()
            for model in (theirs, ours):
                model.bfloat16()
                model.layers[1].norm1.float()
        elif kind == "subclass":

            class Weight(nn.Parameter):
                pass

            ours.layers[1].linear2.weight = Weight(ours.layers[1].linear2.weight, requires_grad=False)
        elif kind == "forward mode":
            context = torch.autograd.forward_ad.dual_level()
        with context:
            assert not encoder_module._may_accumulate(list(ours.layers), x)
            out = ours(x)
            with nothing_fused():
                torch.testing.assert_close(out.float(), theirs(x).float(), atol=0.1, rtol=0.1)

    @torch.inference_mode()
    def test_small_inputs_are_not_worth_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ours, x = convert_copy(make_encoder("cpu")), make_input("cpu")
        monkeypatch.setattr(encoder_module, "ACCUMULATE_FROM", x.numel() + 1)
        assert self.accumulated(ours, x)[1] == 0

    @torch.inference_mode()
    def test_what_an_activation_sees_is_its_own(self) -> None:
        """Whoever watches the activations of a model keeps them beyond the next layer."""
        theirs = make_encoder("cpu", activation=nn.ReLU())
        ours, x = convert_copy(theirs), make_input("cpu")
        kept: list[list[Tensor]] = []
        for model in (theirs, ours):
            seen: list[Tensor] = []
            for layer in model.layers:
                layer.activation.register_forward_hook(lambda _, args, out, seen=seen: seen.extend((*args, out)))
            with nothing_fused():
                model(x)
            kept.append(seen)
        for mine, expected in zip(*kept, strict=True):
            assert_equal(mine, expected)


def memory_of(call: Any) -> tuple[int, int]:
    """Bytes: the most that is allocated at a time during the call, and all that is allocated."""
    call()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call()
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    changes = [event.self_cpu_memory_usage for event in events]
    return max(itertools.accumulate(changes)), sum(change for change in changes if change > 0)


class TestPadding:
    """Packed once for all layers, where torch has nested tensors."""

    @torch.inference_mode()
    def test_tokens_are_packed(self, device: str, attention_calls: list[Any]) -> None:
        theirs = make_encoder(device)
        ours = convert_copy(theirs)
        padding, x = make_padding(device), make_input(device)
        x[padding] = torch.nan
        out = ours(x, src_key_padding_mask=padding)
        assert [shape[0] for shape, _ in attention_calls] == [sum(LENGTHS)] * 2
        assert (out[padding] == 0).all()
        assert_equal(out, theirs(x, src_key_padding_mask=padding))

    @torch.inference_mode()
    def test_norm_at_the_end(self, device: str) -> None:
        theirs = make_encoder(device)
        theirs.norm = nn.LayerNorm(EMBED_DIM, device=device, dtype=EXACT[device])
        nn.init.normal_(theirs.norm.bias)
        padding, x = make_padding(device), make_input(device)
        assert_equal(convert_copy(theirs)(x, src_key_padding_mask=padding), theirs(x, src_key_padding_mask=padding))

    @pytest.mark.parametrize("lengths", [[9, 9, 9], [0, 9, 3], [0, 0, 0], [1, 1, 1]])
    @torch.inference_mode()
    def test_lengths(self, lengths: list[int], device: str, attention_calls: list[Any]) -> None:
        theirs = make_encoder(device)
        padding, x = make_padding(device, lengths), make_input(device)
        out = convert_copy(theirs)(x, src_key_padding_mask=padding)
        packed = [options.get("cu_seqlens_q") is not None for _, options in attention_calls]
        assert packed == [lengths != [9, 9, 9]] * 2
        for entry, length in enumerate(lengths):
            if length > 0:
                assert_equal(out[entry, :length], theirs(x[entry : entry + 1, :length])[0])
            assert (out[entry, length:] == 0).all()

    @torch.inference_mode()
    def test_tokens_right_of_padding_are_left_to_the_mask_as_with_torch(
        self, device: str, attention_calls: list[Any]
    ) -> None:
        theirs = make_encoder(device)
        padding, x = make_padding(device).flip(1), make_input(device)
        assert_equal(convert_copy(theirs)(x, src_key_padding_mask=padding), theirs(x, src_key_padding_mask=padding))
        assert all(options.get("cu_seqlens_q") is None for _, options in attention_calls)

    @torch.inference_mode()
    def test_without_the_check_of_the_mask(self, device: str) -> None:
        """Torch then takes every mask for left-aligned."""
        ours = convert_copy(make_encoder(device))
        ours.mask_check = False
        padding, x = make_padding(device).flip(1), make_input(device)
        out = ours(x, src_key_padding_mask=padding)
        expected = ours(x.flip(1), src_key_padding_mask=padding.flip(1)).flip(1)
        assert_equal(out, expected)

    @pytest.mark.parametrize("by", ["enable_nested_tensor", "fastpath", "autocast", "mask", "norm_first"])
    @torch.inference_mode()
    def test_not_packed_where_torch_does_not(self, by: str, device: str, attention_calls: list[Any]) -> None:
        theirs = make_encoder(device, torch.float32, norm_first=by == "norm_first")
        if by == "enable_nested_tensor":
            theirs.use_nested_tensor = False
        ours = convert_copy(theirs)
        padding, x = make_padding(device), make_input(device, torch.float32)
        mask = torch.zeros(SEQLEN, SEQLEN, dtype=torch.bool, device=device) if by == "mask" else None
        autocast = torch.autocast("cuda", enabled=by == "autocast" and device == "cuda")
        with autocast, nothing_fused() if by == "fastpath" else nullcontext():
            out = ours(x, mask=mask, src_key_padding_mask=padding)
        if by != "autocast" or device == "cuda":
            assert all(options.get("cu_seqlens_q") is None for _, options in attention_calls)
            assert (out[padding] != 0).any()

    @pytest.mark.parametrize("padding", ["shape", "dtype"])
    @torch.inference_mode()
    def test_wrong_masks_are_refused_as_by_torch(self, padding: str, device: str) -> None:
        mask = make_padding(device)[:, 1:] if padding == "shape" else make_padding(device).int()
        theirs = make_encoder(device)
        for model in (theirs, convert_copy(theirs)):
            with pytest.raises((AssertionError, RuntimeError)):
                model(make_input(device), src_key_padding_mask=mask)

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs")
    @torch.inference_mode()
    def test_graph_capture(self) -> None:
        ours = convert_copy(make_encoder("cuda", torch.bfloat16))
        x, padding = make_input("cuda", torch.bfloat16), make_padding("cuda")
        expected = ours(x, src_key_padding_mask=padding)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            ours(x, src_key_padding_mask=padding)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = ours(x, src_key_padding_mask=padding)
        graph.replay()
        torch.testing.assert_close(out[~padding], expected[~padding], atol=0.05, rtol=0.05)


class TestNested:
    @pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
    @pytest.mark.parametrize("kind", ["layer", "encoder"])
    @torch.inference_mode()
    def test_nested_input(self, layout: torch.layout, kind: str, device: str, attention_calls: list[Any]) -> None:
        theirs = make_encoder(device)
        ours = convert_copy(theirs)
        theirs, ours = (theirs, ours) if kind == "encoder" else (theirs.layers[0], ours.layers[0])
        sequences = [torch.randn(length, EMBED_DIM, device=device, dtype=EXACT[device]) for length in LENGTHS]
        out = ours(torch.nested.as_nested_tensor(sequences, layout=layout))
        assert out.layout == layout
        for part, alone in zip(out.unbind(), sequences, strict=True):
            assert_equal(part, theirs(alone[None])[0])
        assert {shape[0] for shape, _ in attention_calls} == {sum(LENGTHS)}


class TestFallback:
    """Whoever changed a submodule, or watches it, has it called."""

    def check(self, theirs: nn.Module, ours: nn.Module, device: str) -> None:
        x, padding = make_input(device), make_padding(device)
        for call in ({}, {"src_key_padding_mask": padding}):
            with torch.no_grad():
                out, expected = ours(x, **call), theirs(x, **call)
            assert_equal(out[~padding], expected[~padding])

    @pytest.mark.parametrize("name", ["linear1", "linear2", "norm1", "norm2", "self_attn", "dropout1", ""])
    @pytest.mark.parametrize("kind", ["forward_hook", "pre_hook", "kwargs"])
    def test_hooks(self, name: str, kind: str, device: str) -> None:
        theirs = make_encoder(device)
        ours = convert_copy(theirs)
        calls = []
        for model in (theirs, ours):
            seen: list[int] = []
            module = model.layers[1].get_submodule(name)
            if kind == "forward_hook":

                def double(_: nn.Module, args: Any, out: Any, seen: list[int] = seen) -> Any:
                    seen.append(1)
                    return (2 * out[0], *out[1:]) if isinstance(out, tuple) else 2 * out

                module.register_forward_hook(double)
            else:

                def count(*args: Any, seen: list[int] = seen) -> None:
                    seen.append(1)

                module.register_forward_pre_hook(count, with_kwargs=kind == "kwargs")
            calls.append(seen)
        self.check(theirs, ours, device)
        assert len(calls[1]) == 2

    def test_global_hook(self, device: str) -> None:
        ours = convert_copy(make_encoder(device))
        seen: list[type] = []
        handle = nn.modules.module.register_module_forward_hook(lambda module, *rest: seen.append(type(module)))
        try:
            with torch.no_grad():
                ours(make_input(device))
        finally:
            handle.remove()
        assert seen.count(nn.Linear) == 4 and seen.count(flash_ext.MultiheadAttention) == 2

    @pytest.mark.parametrize("name", ["linear1", "linear2", "norm1", "self_attn.out_proj"])
    def test_parametrized(self, name: str, device: str) -> None:
        class Double(nn.Module):
            def forward(self, weight: Tensor) -> Tensor:
                return 2 * weight

        theirs = make_encoder(device)
        ours = convert_copy(theirs)
        for model in (theirs, ours):
            parametrize.register_parametrization(model.layers[0].get_submodule(name), "weight", Double())
        theirs.layers[0].activation_relu_or_gelu = 0
        self.check(theirs, ours, device)

    def test_subclass_and_forward_of_its_own(self, device: str) -> None:
        class Adapted(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x) + 1

        theirs = make_encoder(device)
        ours = convert_copy(theirs)
        for model in (theirs, ours):
            model.layers[0].linear1.__class__ = Adapted
            linear2 = model.layers[1].linear2
            linear2.forward = lambda x, linear2=linear2: 3 * F.linear(x, linear2.weight, linear2.bias)
            for layer in model.layers:
                layer.activation_relu_or_gelu = 0  # torch's fused evaluation would not see either
        self.check(theirs, ours, device)

    def test_dropout_in_evaluation(self, device: str) -> None:
        """Monte Carlo dropout: whoever puts a dropout module into training mode wants it."""
        ours = convert_copy(make_encoder(device, dropout=0.5))
        ours.layers[0].dropout.train()
        x = make_input(device)
        with torch.inference_mode():
            assert not torch.equal(ours(x), ours(x))

    def test_gradients_flow_in_evaluation(self, device: str) -> None:
        theirs = make_encoder(device)
        ours = convert_copy(theirs)
        gradients = []
        for model in (theirs, ours):
            x = make_input(device).fill_(0.5).requires_grad_()
            model(x).square().sum().backward()
            gradients.append([x.grad, *(p.grad for p in model.parameters())])
        for mine, expected in zip(*gradients, strict=True):
            assert_equal(mine, expected)

    @pytest.mark.parametrize("transform", ["vmap", "functional_call"])
    def test_transforms(self, transform: str, device: str) -> None:
        theirs = make_encoder(device)
        ours = convert_copy(theirs)
        x = make_input(device)
        with torch.no_grad():
            if transform == "vmap":
                out = torch.vmap(ours)(x[:, None])[:, 0]
            else:
                parameters = {name: p.detach().clone() for name, p in theirs.named_parameters()}
                out = torch.func.functional_call(ours, parameters, (x,))
            assert_equal(out, theirs(x))

    @pytest.mark.parametrize("padded", [False, True])
    def test_autocast(self, padded: bool, device: str) -> None:
        theirs = make_encoder(device, torch.float32)
        ours = convert_copy(theirs)
        x, padding = make_input(device, torch.float32), make_padding(device)
        with torch.inference_mode(), torch.autocast(device, dtype=torch.bfloat16):
            out = ours(x, src_key_padding_mask=padding if padded else None)
            with nothing_fused():
                expected = theirs(x, src_key_padding_mask=padding if padded else None)
        seen = ~padding if padded else slice(None)
        assert out.dtype == expected.dtype
        torch.testing.assert_close(out[seen].float(), expected[seen].float(), atol=0.1, rtol=0.1)


@pytest.mark.parametrize("call", ["plain", "padded", "causal"])
def test_compiles_in_one_graph(call: str, device: str) -> None:
    theirs = make_encoder(device, torch.float32)
    ours = convert_copy(theirs)
    x, padding = make_input(device, torch.float32), make_padding(device)
    options: dict[str, Any] = {"padded": {"src_key_padding_mask": padding}}.get(call, {})
    if call == "causal":
        mask = nn.Transformer.generate_square_subsequent_mask(SEQLEN, device)
        options = {"mask": mask, "is_causal": True}
    torch._dynamo.reset()
    with torch.no_grad():
        out = torch.compile(ours, fullgraph=True, backend="aot_eager")(x, **options)
        seen = ~padding if call == "padded" else slice(None)
        assert_equal(out[seen], theirs(x, **options)[seen])


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
def test_decoder_equals_torch(batch_first: bool, norm_first: bool, device: str) -> None:
    """Its layers are torch's; the projections of key and value are one product there."""
    options = dict(batch_first=batch_first, norm_first=norm_first, device=device, dtype=EXACT[device])
    theirs = nn.TransformerDecoder(nn.TransformerDecoderLayer(EMBED_DIM, NUM_HEADS, HIDDEN, **options), 2).eval()
    x, memory = make_input(device), make_input(device)
    with torch.inference_mode():
        assert_equal(convert_copy(theirs)(x, memory), theirs(x, memory))


def test_gelu_is_approximated_only_where_it_hardly_shows() -> None:
    allowed = encoder_module._may_be_tanh
    assert allowed("none", torch.bfloat16) and allowed("none", torch.float16) and not allowed("none", torch.float32)
    assert allowed("tanh", torch.float32) and not allowed(None, torch.bfloat16)


def test_copies_and_state(device: str) -> None:
    theirs = make_encoder(device)
    ours = convert_copy(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    x = make_input(device)
    with torch.inference_mode():
        assert_equal(copy.deepcopy(ours)(x), theirs(x))
