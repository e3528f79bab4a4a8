"""``MultiheadAttention`` as a module: dropout, state, autocast, tracing, nested tensors."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
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
    SEQLEN_Q,
    WITHOUT_TORCHS_WARNINGS,
    assert_equal,
    make_inputs,
    make_masks,
    run,
    twins,
)

pytestmark = WITHOUT_TORCHS_WARNINGS


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

    def test_an_empty_batch_with_a_mask_of_each_head(self) -> None:
        _, ours = twins(batch_first=True)
        x = torch.randn(0, 3, EMBED_DIM, dtype=torch.float64)
        for mask in (torch.zeros(0, 3, 3, dtype=torch.bool), torch.zeros(0, 3, 3, dtype=torch.float64)):
            out, weights = ours(x, x, x, attn_mask=mask)
            assert out.shape == x.shape and weights.shape == (0, 3, 3)

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
        for wrong in ({"attn_mask": torch.zeros(6, 6)}, {"key_padding_mask": torch.zeros(3, 6)}):
            with pytest.raises(AssertionError, match="does not support NestedTensor outside of its fast path"):
                ours(nested, nested, nested, **wrong)

    def test_nested_tensors_with_the_causal_rule(self) -> None:
        _, ours = twins(batch_first=True)
        sequences = [torch.randn(n, EMBED_DIM, dtype=torch.float64) for n in (3, 1, 6)]
        nested = torch.nested.as_nested_tensor(sequences)
        out, _ = ours(nested, nested, nested, need_weights=False, is_causal=True)
        for part, x in zip(out.unbind(), sequences, strict=True):
            hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
            torch.testing.assert_close(part, ours(x, x, x, attn_mask=hidden)[0])
