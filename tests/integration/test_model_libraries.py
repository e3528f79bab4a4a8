"""Models of timm, torchvision, diffusers and torchtitan, small and with random weights, under ``activate()``: their
outputs and gradients are those of torch's math, and our kernels computed each attention."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_ext
from flash_ext.integrations import sdpa_provider
from flash_ext.integrations import torchvision_swin as torchvision_functions

Model = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]  # and what it is called with


def images() -> tuple[Tensor]:
    return (torch.randn(2, 3, 32, 32),)


def latents(channels: int = 4) -> Tensor:
    return torch.randn(2, channels, 8, 8)


# ---- Models: each has two layers of attention, unless its name says how many ----------------------------------------


def timm_vit() -> Model:
    timm = pytest.importorskip("timm")
    sizes = dict(img_size=32, patch_size=8, depth=2, num_classes=10)
    return timm.create_model("vit_tiny_patch16_224", **sizes), images(), {}


def timm_beit() -> Model:
    """A position bias with a gradient."""
    timm = pytest.importorskip("timm")
    sizes = dict(img_size=32, patch_size=8, depth=2, embed_dim=64, num_heads=2, num_classes=10)
    return timm.create_model("beit_base_patch16_224", **sizes), images(), {}


def timm_swin() -> Model:
    """A bias with a gradient, and the mask of shifted windows on top of it. timm's Swin computes by hand unless it is
    told otherwise."""
    timm = pytest.importorskip("timm")
    fused = timm.layers.use_fused_attn(experimental=True)
    timm.layers.set_fused_attn(True, experimental=True)
    sizes = dict(img_size=32, window_size=4, depths=(2,), num_heads=(2,), embed_dim=32, num_classes=10)
    try:
        return timm.create_model("swin_tiny_patch4_window7_224", **sizes), images(), {}
    finally:
        timm.layers.set_fused_attn(True, experimental=fused)


def torchvision_vit() -> Model:
    """nn.MultiheadAttention."""
    models = pytest.importorskip("torchvision").models
    return models.VisionTransformer(32, 8, 2, 2, 64, 128, num_classes=10), images(), {}


def torchvision_swin() -> Model:
    """A bias with a gradient, and shifted windows: attention in operations of its own, until activate() replaces it."""
    models = pytest.importorskip("torchvision").models
    return models.SwinTransformer([4, 4], 32, [2], [2], [4, 4], num_classes=10), images(), {}


def torchvision_swin_v2() -> Model:
    """Cosine attention. Images that windows do not divide, and a window as large as the image in one direction."""
    swin = pytest.importorskip("torchvision").models.swin_transformer
    model = swin.SwinTransformer(
        [4, 4], 32, [2], [2], [3, 8], num_classes=10, block=swin.SwinTransformerBlockV2, downsample_layer=None
    )
    return model, images(), {}


def diffusers_dit() -> Model:
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        norm_num_groups=4,
        num_embeds_ada_norm=10,
    )
    conditions = dict(timestep=torch.tensor([1, 5]), class_labels=torch.tensor([1, 2]))
    return model, (latents(),), conditions


def diffusers_unet_with_8() -> Model:
    """Self-attention, and cross-attention under a padding mask of the text."""
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.UNet2DConditionModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=24,
        attention_head_dim=4,
        norm_num_groups=8,
    )
    text, seen = torch.randn(2, 7, 24), torch.ones(2, 7)
    seen[1, 4:] = 0
    return model, (latents(), torch.tensor([3, 9]), text), dict(encoder_attention_mask=seen)


def diffusers_flux() -> Model:
    """Images and text in one sequence, and in two; by diffusers' own dispatcher."""
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    conditions = dict(
        hidden_states=torch.randn(2, 16, 4),
        encoder_hidden_states=torch.randn(2, 6, 32),
        pooled_projections=torch.randn(2, 32),
        timestep=torch.tensor([0.3, 0.9]),
        img_ids=torch.randn(16, 3),
        txt_ids=torch.randn(6, 3),
    )
    return model, (), conditions


class TitanAttention(nn.Module):
    """torchtitan's grouped attention by SDPA: that of its Flux. It asks for an order of backends."""

    def __init__(self) -> None:
        super().__init__()
        attention = pytest.importorskip("torchtitan.models.common.attention")
        self.qkv = nn.Linear(64, 8 * 16)
        self.inner = nn.ModuleList(
            attention.ScaledDotProductAttention(attention.ScaledDotProductAttention.Config()) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for inner in self.inner:
            q, k, v = self.qkv(x).unflatten(-1, (8, 16)).split((4, 2, 2), dim=2)
            x = x + inner(q, k, v, is_causal=True, enable_gqa=True).flatten(2)
        return x


def torchtitan_sdpa() -> Model:
    return TitanAttention(), (torch.randn(2, 24, 64),), {}


MODELS = (
    timm_vit,
    timm_beit,
    timm_swin,
    torchvision_vit,
    torchvision_swin,
    torchvision_swin_v2,
    diffusers_dit,
    diffusers_unet_with_8,
    diffusers_flux,
    torchtitan_sdpa,
)


# ---- Under activate() -----------------------------------------------------------------------------------------------


def spread(model: nn.Module) -> nn.Module:
    """Random numbers for parameters that begin as zeros: what is behind them would not be seen."""
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return model


def step(model: nn.Module, args: Any, options: Any) -> list[Tensor]:
    """The output and the gradients of all parameters."""
    model.zero_grad()
    torch.manual_seed(1)
    out = model(*args, **options)
    out = out if isinstance(out, Tensor) else out[0]
    out.float().square().mean().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def move(value: Any, device: str) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_step(device: str, build: Callable[[], Model]) -> None:
    model, args, options = build()
    model = spread(model).to(device)
    args, options = [move(x, device) for x in args], {name: move(x, device) for name, x in options.items()}
    layers = 8 if build is diffusers_unet_with_8 else 2
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        with sdpa_kernel(SDPBackend.MATH):
            expected = step(model, args, options)
        sdpa_provider.forget_calls()
        with flash_ext.activated():
            found = step(model, args, options)
    forwards = {name: n for name, n in sdpa_provider.calls_served().items() if not name.endswith("_backward")}
    assert sum(forwards.values()) == layers, sdpa_provider.calls_served()
    assert not sdpa_provider.calls_passed_on()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * max(1.0, other.abs().max().item()))


@pytest.mark.parametrize("logit_scale", [False, True])
@pytest.mark.parametrize("shift", [[0, 0], [2, 1], [0, 2]])
@pytest.mark.parametrize("size", [(8, 12), (7, 9), (4, 10), (3, 3)])
def test_windows_of_swin(size: tuple[int, int], shift: list[int], logit_scale: bool, device: str) -> None:
    """Values and all gradients are those of torchvision's own function."""
    swin = pytest.importorskip("torchvision.models.swin_transformer")
    heads, window = 2, [4, 3]
    places = window[0] * window[1]
    named = dict(
        input=torch.randn(2, *size, 16),
        qkv_weight=torch.randn(48, 16),
        proj_weight=torch.randn(16, 16),
        relative_position_bias=torch.randn(1, heads, places, places),
        qkv_bias=torch.randn(48),
        proj_bias=torch.randn(16),
    )
    named |= {"logit_scale": torch.randn(heads, 1, 1)} if logit_scale else {}
    results = []
    for function in (swin.shifted_window_attention, torchvision_functions.shifted_window_attention):
        leaves = {name: x.double().to(device).requires_grad_() for name, x in named.items()}
        out = function(**leaves, window_size=window, num_heads=heads, shift_size=shift)
        results.append([out, *torch.autograd.grad(out.sin().sum(), list(leaves.values()))])
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected)


def test_swin_is_restored() -> None:
    swin = pytest.importorskip("torchvision.models.swin_transformer")
    own = swin.shifted_window_attention
    model, args, _ = torchvision_swin()
    model.eval()
    with flash_ext.activated():
        assert swin.shifted_window_attention is torchvision_functions.shifted_window_attention
        # A program of TorchScript is torchvision's: it is to run elsewhere.
        scripted = torch.jit.script(model)
    assert swin.shifted_window_attention is own
    torch.testing.assert_close(scripted(*args), model(*args))


LATER = """
import sys, flash_ext
from flash_ext.integrations import torchvision_swin

flash_ext.activate()
assert "torchvision" not in sys.modules
{before}
from torchvision.models import swin_transformer as swin
assert torchvision_swin.is_installed() is {installed}, swin.shifted_window_attention
assert type(swin.__loader__).__module__ != torchvision_swin.__name__ == torchvision_swin.__spec__.name
flash_ext.deactivate()
assert swin.shifted_window_attention.__module__ == swin.__name__
assert not any(type(finder).__module__ == torchvision_swin.__name__ for finder in sys.meta_path)
"""


@pytest.mark.parametrize(("before", "installed"), [("", True), ("flash_ext.deactivate()", False)])
def test_torchvision_that_is_imported_later(before: str, installed: bool) -> None:
    pytest.importorskip("torchvision")
    program = LATER.format(before=before, installed=installed)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_llama_of_torchtitan(device: str) -> None:
    """Packed documents through ``torch.nn.attention.varlen``, which a CPU has under ``activate()`` alone."""
    llama = pytest.importorskip("torchtitan.models.llama3")
    attention = pytest.importorskip("torchtitan.models.common.attention")
    model = llama.llama3_configs["debugmodel"](attn_backend="varlen").build()
    model.init_states()
    model.to(device)
    layers = list(model.layers.values())
    tokens, positions = torch.randint(2048, (2, 24), device=device), torch.arange(24, device=device).expand(2, 24)
    ends = torch.tensor([0, 24, 48], dtype=torch.int32, device=device)
    documents = attention.VarlenMetadata(cu_seq_q=ends, cu_seq_k=ends, max_q=24, max_k=24)
    with flash_ext.activated():
        sdpa_provider.forget_calls()
        found = step(model, (tokens,), dict(positions=positions, attention_masks=documents))
        assert sdpa_provider.calls_served()["_flash_attention_forward"] == len(layers)
        assert sdpa_provider.calls_served()["_flash_attention_backward"] == len(layers)
    for layer in layers:
        kind = attention.ScaledDotProductAttention
        layer.attention.inner_attention = kind(kind.Config())
    expected = step(model, (tokens,), dict(positions=positions))
    for one, other in zip(found, expected, strict=True):  # varlen rounds to bfloat16
        torch.testing.assert_close(one, other, rtol=3e-2, atol=3e-2 * max(1e-3, other.abs().max().item()))


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (timm_vit, "call flash_ext.activate()"),
        (timm_swin, "call flash_ext.activate()"),
        (diffusers_unet_with_8, "call flash_ext.activate()"),
        (diffusers_flux, "call flash_ext.activate()"),
        (torchvision_vit, "2 nn.MultiheadAttention converted"),
        (torchvision_swin, "shifted_window_attention is called there, which convert cannot reach; call flash_ext.act"),
        (torchtitan_sdpa, "call flash_ext.activate()"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_convert_says(build: Callable[[], Model], said: str) -> None:
    lines: list[str] = []
    flash_ext.convert(build()[0], report=lines.append)
    assert any(said in line for line in lines), lines
