"""Architectures of transformers beyond those of ``test_transformers``, small and with random weights: by SDPA under
``activate()`` and by ``register()`` they give eager attention's outputs and gradients, with padding where they take it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flash_ext
from flash_ext.integrations import sdpa_provider

transformers = pytest.importorskip("transformers", minversion="5.0")
from flash_ext.integrations import transformers as integration  # noqa: E402

TEXT = dict(vocab_size=99, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
GROUPED = TEXT | dict(num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, eos_token_id=1)
IMAGES = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
IMAGES |= dict(image_size=32, patch_size=8)
EXPERTS = dict(num_experts=4, moe_intermediate_size=32, num_experts_per_tok=2)
SEVERAL = ("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads")
TWO_SIDED = dict(vocab_size=99, d_model=64, encoder_ffn_dim=64, decoder_ffn_dim=64, pad_token_id=0, eos_token_id=1)
TWO_SIDED |= dict(zip(SEVERAL, (2, 2, 4, 4), strict=True))
LATENT = dict(kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16)
LATENT |= dict(moe_intermediate_size=32, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2)
CONVOLUTIONS = dict(conv_dim=(32, 32), conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2)
CONVOLUTIONS |= dict(num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4)

# Which side is padded, the model, and its config. What each has beyond the others stands behind it.
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Qwen3": ("left", "ForCausalLM", GROUPED | dict(head_dim=16)),  # norms of heads
    "Qwen3Moe": ("left", "ForCausalLM", GROUPED | EXPERTS | dict(head_dim=16)),
    "Gemma3": ("left", "ForCausalLM", GROUPED | dict(head_dim=16, sliding_window=5)),  # layers of two kinds
    "Phi3": ("left", "ForCausalLM", GROUPED),  # one projection
    "GPTNeoX": ("left", "ForCausalLM", TEXT),
    "Llama4": (  # chunks
        "left",
        "ForCausalLM",
        GROUPED | dict(head_dim=16, intermediate_size_mlp=64, num_local_experts=2, attention_chunk_size=8),
    ),
    "DeepseekV3": (  # another head_dim of values
        "left",
        "ForCausalLM",
        GROUPED | LATENT | dict(num_key_value_heads=4, first_k_dense_replace=1),
    ),
    "ModernBert": ("right", "ForMaskedLM", TEXT | dict(pad_token_id=0, local_attention=8)),  # windows on both sides
    "Roberta": ("right", "ForMaskedLM", TEXT | dict(pad_token_id=0)),
    "Bart": ("right", "ForConditionalGeneration", TWO_SIDED),
    "Dinov2": ("images", "Model", IMAGES),
    "SiglipVision": ("images", "Model", IMAGES),
    "CLIPText": ("right", "Model", TEXT),  # causal and padded
    "Wav2Vec2": ("sound", "Model", TEXT | CONVOLUTIONS),
}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        integration.register()
        yield


def make_model(name: str) -> nn.Module:
    _, head, sizes = ARCHITECTURES[name]
    config_name = (
        "Gemma3TextConfig" if name == "Gemma3" else "Llama4TextConfig" if name == "Llama4" else f"{name}Config"
    )
    config = getattr(transformers, config_name)(**copy.deepcopy(sizes))
    model: nn.Module = getattr(transformers, name + head)._from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.05)
    return model.eval()


def make_inputs(name: str) -> tuple[dict[str, Tensor], Tensor | None]:
    """And which rows of the output are real."""
    side, head, _ = ARCHITECTURES[name]
    if side == "images":
        return dict(pixel_values=torch.randn(2, 3, 32, 32)), None
    if side == "sound":
        heard = torch.ones(2, 800, dtype=torch.long)
        heard[1, 500:] = 0
        return dict(input_values=torch.randn(2, 800), attention_mask=heard), torch.arange(80)[None] < torch.tensor(
            [[79], [49]]
        )
    ids, seen = torch.randint(3, 90, (2, 21)), torch.ones(2, 21, dtype=torch.long)
    seen[1, slice(6) if side == "left" else slice(15, None)] = 0
    inputs = dict(input_ids=ids, attention_mask=seen)
    if head == "ForConditionalGeneration":
        return inputs | dict(decoder_input_ids=torch.randint(3, 90, (2, 9))), None
    return inputs, seen.bool()


def step(model: nn.Module, inputs: dict[str, Tensor], real: Tensor | None) -> list[Tensor]:
    """The output and the gradients of all parameters."""
    model.zero_grad()
    out = model(**inputs)[0]
    if real is not None:
        out = out.masked_fill(~real[:, : out.shape[1], None], 0)
    out.square().mean().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_step(device: str, name: str) -> None:
    torch.manual_seed(0)
    model = make_model(name).to(device)
    inputs, real = make_inputs(name)
    inputs, real = {key: x.to(device) for key, x in inputs.items()}, None if real is None else real.to(device)
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        expected = step(model, inputs, real)
        model.set_attn_implementation("fext")
        results = [step(model, inputs, real)]
        model.set_attn_implementation("sdpa")
        with flash_ext.activated():
            sdpa_provider.forget_calls()
            results.append(step(model, inputs, real))
            assert sdpa_provider.calls_served() and not sdpa_provider.reasons_passed_on()
    for found in results:
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * max(1e-3, other.abs().max().item()))
