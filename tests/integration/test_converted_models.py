"""``convert``: models keep their parameters and give what they gave, by our attention."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import flash_ext
from tests.integration.module_twins import (
    BATCH,
    EMBED_DIM,
    NUM_HEADS,
    SEQLEN_Q,
    WITHOUT_TORCHS_WARNINGS,
    twins,
)

pytestmark = WITHOUT_TORCHS_WARNINGS


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
