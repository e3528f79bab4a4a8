"""Operators in plain ones: the decompositions against the oracle's mathematics, ``torch.export`` and ONNX with them."""

from __future__ import annotations

import importlib.util
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flash_ext
from flash_ext.integrations.export import _refuse_others, decompositions
from flash_ext.ops import ScoreOptions
from tests.oracle import cumulative, random

OPS = torch.ops.flash_ext


def export(model: nn.Module, *args: Any) -> torch.export.ExportedProgram:
    """In plain operators, which is checked."""
    program = torch.export.export(model, args, strict=False).run_decompositions(decompositions())
    left = {str(node.target) for node in program.graph.nodes if str(node.target).startswith("flash_ext")}
    assert not left
    return program


class Attend(nn.Module):
    """``flash_ext.attention`` with some options; tensors are constants of the program."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        result = flash_ext.attention(q, k, v, return_lse=True, **self.options)
        assert isinstance(result, tuple)
        return result


def assert_close(found: Any, expected: Any, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


# ---- Attention ------------------------------------------------------------------------------------------------------

BATCH, SEQLEN_Q, SEQLEN_K, HEADS = 2, 9, 13, 4


def hides_a_row() -> Tensor:
    mask = torch.rand(BATCH, 1, SEQLEN_Q, SEQLEN_K) > 0.4
    mask[0, :, 2] = False
    return mask


DENSE: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "scale": lambda: dict(softmax_scale=0.7),
    "causal": lambda: dict(causal=True),
    "causal from top left": lambda: dict(causal=True, top_left=True),
    "window": lambda: dict(window_size=(3, 2)),
    "softcap": lambda: dict(softcap=1.5, causal=True),
    "bias of all": lambda: dict(bias=torch.randn(BATCH, HEADS, SEQLEN_Q, SEQLEN_K)),
    "per-key bias": lambda: dict(bias=torch.randn(1, 1, 1, SEQLEN_K)),
    "mask": lambda: dict(mask=hides_a_row(), causal=True),
    "ALiBi": lambda: dict(alibi_slopes=torch.rand(HEADS), causal=True),
    "ALiBi by batch": lambda: dict(alibi_slopes=torch.rand(BATCH, HEADS)),
    "sink": lambda: dict(sink=torch.randn(HEADS), mask=hides_a_row()),
    "lengths": lambda: dict(
        seqused_q=torch.tensor([9, 4], dtype=torch.int32), seqused_k=torch.tensor([0, 7], dtype=torch.int32)
    ),
    "causal with lengths": lambda: dict(causal=True, seqused_k=torch.tensor([13, 5], dtype=torch.int32)),
}


def on(device: str, options: dict[str, Any]) -> dict[str, Any]:
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}


@pytest.mark.parametrize("name", DENSE)
def test_attention(device: str, name: str) -> None:
    model = Attend(**on(device, DENSE[name]()))
    q = random(BATCH, SEQLEN_Q, HEADS, 16, device=device)
    k, v = random(BATCH, SEQLEN_K, 2, 16, device=device), random(BATCH, SEQLEN_K, 2, 24, device=device)
    assert_close(export(model, q, k, v).module()(q, k, v), model(q, k, v))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes(device: str, dtype: torch.dtype) -> None:
    q, k, v = (random(2, 7, 2, 16, dtype=dtype, device=device) for _ in range(3))
    model = Attend(causal=True)
    found, expected = export(model, q, k, v).module()(q, k, v), model(q, k, v)
    assert [x.dtype for x in found] == [x.dtype for x in expected]
    assert_close(found, expected, 1e-10 if dtype == torch.float64 else 2e-2)


PACKED: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "causal": lambda: dict(causal=True),
    "window from top left": lambda: dict(window_size=(2, 1), top_left=True),
    "ALiBi by sequence": lambda: dict(alibi_slopes=torch.rand(3, HEADS)),
    "bias": lambda: dict(bias=torch.randn(3, HEADS, 5, 7)),
    "bias that sequences share": lambda: dict(bias=torch.randn(1, 1, 1, 7)),
    "mask": lambda: dict(mask=torch.rand(3, 1, 5, 7) > 0.3),
    "lengths": lambda: dict(seqused_k=torch.tensor([2, 0, 7], dtype=torch.int32)),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences(device: str, name: str) -> None:
    lengths = dict(
        cu_seqlens_q=cumulative([4, 0, 5]), cu_seqlens_k=cumulative([3, 2, 7]), max_seqlen_q=5, max_seqlen_k=7
    )
    model = Attend(**on(device, lengths | PACKED[name]()))
    q = random(11, HEADS, 16, device=device)  # two rows behind all sequences
    k, v = (random(12, 2, 16, device=device) for _ in range(2))
    assert_close(export(model, q, k, v).module()(q, k, v), model(q, k, v))


@pytest.mark.parametrize("packed", [False, True])
def test_max_logit(device: str, packed: bool) -> None:
    """Beside a sink, which has no part in it, where a sequence sees nothing."""
    options: dict[str, Any] = dict(sink=torch.randn(HEADS), causal=True, return_max_logit=True)
    if packed:
        options |= dict(cu_seqlens_q=cumulative([4, 0, 5, 2]), cu_seqlens_k=cumulative([3, 2, 7, 0]))
    else:
        options |= dict(seqused_k=torch.tensor([0, 7], dtype=torch.int32))
    model = Attend(**on(device, options))
    shape = (13,) if packed else (BATCH, SEQLEN_Q)
    q, k = random(*shape, HEADS, 16, device=device), random(*shape, 2, 16, device=device)
    expected = model(q, k, k)
    assert len(expected) == 3 and expected[2].isneginf().any() and expected[2].isfinite().any()
    assert_close(export(model, q, k, k).module()(q, k, k), expected)


def test_lengths_that_the_program_leaves_open(device: str) -> None:
    seqlen = torch.export.Dim("seqlen", min=2, max=64)
    model, shapes = Attend(causal=True), [{1: seqlen}] * 3

    def inputs(length: int) -> list[Tensor]:
        return [random(2, length, 2, 16, device=device) for _ in range(3)]

    program = torch.export.export(model, tuple(inputs(8)), dynamic_shapes=shapes, strict=False)
    plain = program.run_decompositions(decompositions()).module()
    other = inputs(21)
    assert_close(plain(*other), model(*other))


# ---- The other operators --------------------------------------------------------------------------------------------


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def check(function: Callable[..., Any], *args: Any) -> None:
    model = Function(function)
    assert_close(export(model, *args).module()(*args), model(*args))


def test_weights(device: str) -> None:
    q, k = random(2, 5, 4, 16, device=device), random(2, 7, 2, 16, device=device)
    lse = random(2, 4, 5, device=device)
    lse[0, 0, 0] = -torch.inf
    check(lambda q, k, lse: flash_ext.attention_weights(q, k, lse, causal=True), q, k, lse)


def test_decode(device: str) -> None:
    q, caches = random(2, 3, 4, 16, device=device), [random(3, 11, 2, 16, device=device) for _ in range(2)]
    options = dict(
        cache_seqlens=torch.tensor([11, 6]),
        cache_leftpad=torch.tensor([0, 2]),
        cache_batch_idx=torch.tensor([2, 0]),
        sink=torch.randn(4),
        alibi_slopes=torch.rand(4),
    )
    given = {name: x.to(device, torch.int32 if "cache" in name else None) for name, x in options.items()}
    check(lambda q, k, v: flash_ext.decode(q, k, v, causal=True, return_lse=True, **given), q, *caches)


def test_merge(device: str) -> None:
    outs, lses = random(3, 2, 5, 4, 16, device=device), random(3, 2, 4, 5, device=device)
    lses[:, 0, 0, 0] = lses[1, 1] = -torch.inf
    outs[1, 1] = torch.nan  # a part that saw nothing
    check(flash_ext.merge, outs, lses)


@pytest.mark.parametrize("need_sum", [False, True])
def test_add_layer_norm(device: str, need_sum: bool) -> None:
    x, residual = (random(2, 5, 32, device=device) for _ in range(2))
    weight, bias = (random(32, device=device) for _ in range(2))
    check(lambda x, residual: OPS.add_layer_norm(x, residual, weight, bias, 1e-5, need_sum), x, residual)


def refused(function: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(Exception) as error:
        export(Function(function), *args)
    return str(error.value)


def test_what_has_no_decomposition() -> None:
    q = random(2, 8, 2, 16)
    block_mask = flash_ext.BlockMask.causal(8, 8)
    rng_state = torch.tensor([1, 2])
    dropped = lambda q: flash_ext.attention(q, q, q, dropout_p=0.5, rng_state=rng_state)  # noqa: E731
    assert "dropout_p must be 0 in a decomposition, got 0.5: export the model after model.eval()" in refused(dropped, q)
    blocks = lambda q: flash_ext.attention(q, q, q, block_mask=block_mask)  # noqa: E731
    assert "mask=block_mask.to_dense()" in refused(blocks, q)
    table = torch.zeros(2, 1, dtype=torch.int32)
    pages = lambda q: flash_ext.decode(q, q, q, block_table=table)  # noqa: E731
    assert "block_table of decode has no decomposition: gather the pages first" in refused(pages, q)


# ---- Modules, and ONNX ----------------------------------------------------------------------------------------------


class CallsSdpa(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projection(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class CallsAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(32, 64)
        self.bias = nn.Parameter(torch.randn(1, 4, 6, 6))
        self.sink = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projection(x).unflatten(-1, (8, 8)).split((4, 2, 2), dim=2)
        out = flash_ext.attention(q, k, v, window_size=(4, 0), softcap=3.0, bias=self.bias, sink=self.sink)
        assert isinstance(out, Tensor)
        return out.flatten(2)


class CallsModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = flash_ext.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        out, _ = self.attention(x, x, x, attn_mask=causal, need_weights=False, is_causal=True)
        assert isinstance(out, Tensor)
        return out


class GivesWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = flash_ext.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out, weights = self.attention(x, x, x, average_attn_weights=False)
        assert isinstance(out, Tensor) and isinstance(weights, Tensor)
        return out * weights.sum((1, 2, 3))[:, None, None]


class Padded(nn.Module):
    """The padding is read from the input, so that it is no constant of the program."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = converted_encoder()

    def forward(self, x: Tensor) -> Tensor:
        padding = x[:, :, 0] > 0.5
        out: Tensor = self.encoder(x, src_key_padding_mask=padding)
        return out.masked_fill(padding[..., None], 0.0)


def converted_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return flash_ext.convert(nn.TransformerEncoder(layer, 2), report=lambda line: None)


MODELS = {
    "attention": CallsAttention,
    "SDPA": CallsSdpa,
    "module": CallsModule,
    "weights": GivesWeights,
    "encoder": converted_encoder,
    "padded encoder": Padded,
}


def test_an_option_that_is_not_known_is_refused() -> None:
    """Whoever adds one need not know of decompositions: they do not ignore it."""
    defaults = [*ScoreOptions._field_defaults.values(), 0.0]
    added = namedtuple("added", [*ScoreOptions._fields, "clip"], defaults=defaults)  # type: ignore[misc]
    _refuse_others(added(0.3))
    for clip in (1.0, torch.zeros(1)):
        with pytest.raises(NotImplementedError, match="clip has no decomposition"):
            _refuse_others(added(0.3, clip=clip))


@pytest.mark.parametrize("kind", MODELS)
def test_export_of_models(device: str, kind: str) -> None:
    model = MODELS[kind]().eval().to(device)
    x = random(2, 6, 32, device=device)
    with flash_ext.activated(), torch.no_grad():
        program = export(model, x)
        assert_close(program.module()(x), model(x))
    assert_close(program.module()(x), model(x))


@pytest.mark.parametrize("kind", MODELS)
def test_onnx(tmp_path: Path, kind: str) -> None:
    """The file computes the same without torch."""
    pytest.importorskip("onnxscript")
    model = MODELS[kind]().eval()
    x = random(2, 6, 32)
    with flash_ext.activated(), torch.no_grad():
        expected = model(x)
        program = export(model, x)
    path = str(tmp_path / "model.onnx")
    torch.onnx.export(program, dynamo=True, verbose=False).save(path)  # type: ignore[union-attr]
    assert_close(run_onnx(path, x), expected)


def run_onnx(path: str, x: Tensor) -> Tensor:
    if importlib.util.find_spec("onnxruntime") is not None:
        import onnxruntime

        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        (out,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    else:
        from onnx.reference import ReferenceEvaluator

        session = ReferenceEvaluator(path)
        (out,) = session.run(None, {session.input_names[0]: x.numpy()})
    return torch.from_numpy(out)
