"""torch.fx: a converted module is one node, as the module of torch that it replaces."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx.proxy import TraceError

import flash_ext


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out, weights = self.attention(x, x, x, key_padding_mask=mask, average_attn_weights=False)
        return out + weights.sum()


class Encodes(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers) if layers else layer

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.encoder(x, src_key_padding_mask=mask) * 2


class AttendsFromBuffer(nn.Module):
    """The query is no value that fx traces."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.register_buffer("query", torch.randn(2, 3, 16))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.attention(self.query, x, x, key_padding_mask=mask)[0]


def calls(model: nn.Module) -> list[str]:
    return [str(node.target) for node in torch.fx.symbolic_trace(model).graph.nodes if node.op == "call_module"]


@pytest.mark.parametrize(
    "make",
    [Attends, AttendsFromBuffer, lambda: Encodes(0), lambda: Encodes(2)],
    ids=["module", "buffer", "layer", "encoder"],
)
@pytest.mark.parametrize("training", [False, True])
def test_a_converted_module_is_a_node(device: str, make: Callable[[], nn.Module], training: bool) -> None:
    model = make().to(device).train(training)
    nodes = calls(model)
    flash_ext.convert(model, report=lambda line: None)
    assert calls(model) == nodes
    x = torch.randn(2, 5, 16, device=device)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2], device=device)
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x, mask), model(x, mask))


@pytest.mark.parametrize("make", [lambda: nn.MultiheadAttention(16, 2), lambda: Encodes(0).encoder], ids=["m", "layer"])
def test_it_is_no_root(make: Callable[[], nn.Module]) -> None:
    converted = flash_ext.convert(make(), report=lambda line: None)
    with pytest.raises(TraceError, match=r"flash_ext\.\w+ is one node of a graph"):
        torch.fx.symbolic_trace(converted)


def test_features_of_a_vision_transformer() -> None:
    models = pytest.importorskip("torchvision.models")
    extraction = pytest.importorskip("torchvision.models.feature_extraction")
    model = models.VisionTransformer(32, 8, 2, 4, 32, 64).eval()
    name = "encoder.layers.encoder_layer_0"
    image = torch.randn(1, 3, 32, 32)
    expected = extraction.create_feature_extractor(model, [name])(image)[name]
    flash_ext.convert(model, report=lambda line: None)
    torch.testing.assert_close(extraction.create_feature_extractor(model, [name])(image)[name], expected)
