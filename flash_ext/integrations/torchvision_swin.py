"""torchvision's Swin transformers, whose attention is written out in torch operations, by SDPA.

``torchvision.models.swin_transformer.shifted_window_attention`` is one function for both versions of Swin, which their
modules look up by its name. ``activate()`` puts the function of this file there, or, while torchvision is not imported,
as soon as it is. It has the same arguments and the same result, but calls ``F.scaled_dot_product_attention`` with the
position bias, and the mask of shifted windows on top of it, as one additive mask. Shifted windows of an image become
heads, so that the mask is shared by all images and not repeated for each of them. Under autocast the position
bias is rounded to the dtype of the query; torchvision adds it in float32.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_ext.torch_private import script_instead

MODULE, FUNCTION = "torchvision.models.swin_transformer", "shifted_window_attention"
_HIDDEN = -100.0  # what torchvision adds to the score of a pair of two regions


def shifted_window_attention(
    input: Tensor,
    qkv_weight: Tensor,
    proj_weight: Tensor,
    relative_position_bias: Tensor,
    window_size: list[int],
    num_heads: int,
    shift_size: list[int],
    attention_dropout: float = 0.0,
    dropout: float = 0.0,
    qkv_bias: Tensor | None = None,
    proj_bias: Tensor | None = None,
    logit_scale: Tensor | None = None,
    training: bool = True,
) -> Tensor:
    """As torchvision's: ``input`` (batch, height, width, channels), ``relative_position_bias`` (1, heads, pairs)."""
    batch, height, width, channels = input.shape
    x = F.pad(input, (0, 0, 0, -width % window_size[1], 0, -height % window_size[0]))
    size = (x.shape[1], x.shape[2])
    shift = [0 if window >= whole else s for s, window, whole in zip(shift_size, window_size, size, strict=True)]
    if shifted := sum(shift) > 0:
        x = x.roll((-shift[0], -shift[1]), (1, 2))
    x = _windows(x, window_size)  # (batch, windows, places, channels)
    x = x if shifted else x.flatten(0, 1)[:, None]  # windows are alike: each is an entry of the batch
    if logit_scale is not None and qkv_bias is not None:
        bias_q, bias_k, bias_v = qkv_bias.chunk(3)
        qkv_bias = torch.cat([bias_q, torch.zeros_like(bias_k), bias_v])
    qkv = F.linear(x, qkv_weight, qkv_bias).unflatten(-1, (3, num_heads, channels // num_heads))
    q, k, v = qkv.permute(3, 0, 1, 4, 2, 5).flatten(2, 3).unbind(0)  # (batch, windows * heads, places, head_dim)
    scale: float | None = None
    if logit_scale is not None:  # cosine attention, of the second version
        factor = logit_scale.clamp(max=math.log(100.0)).exp().repeat(x.shape[1], 1, 1)
        q, k, scale = F.normalize(q, dim=-1) * factor, F.normalize(k, dim=-1), 1.0
    mask = relative_position_bias.expand(x.shape[1], -1, -1, -1)
    if shifted:
        mask = mask + _hidden_pairs(x, size, window_size, shift)[:, None]
    mask = mask.to(q.dtype).flatten(0, 1)[None]
    dropout_p = attention_dropout if training else 0.0
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p, scale=scale)
    out = out.unflatten(1, (-1, num_heads)).transpose(2, 3).flatten(3)
    out = F.dropout(F.linear(out, proj_weight, proj_bias), dropout, training)
    out = _image(out.reshape(batch, -1, *out.shape[2:]), size, window_size)
    if shifted:
        out = out.roll((shift[0], shift[1]), (1, 2))
    return out[:, :height, :width].contiguous()


def _windows(x: Tensor, window: Sequence[int]) -> Tensor:
    """(batch, height, width, channels) as (batch, windows, places, channels)."""
    x = x.unflatten(2, (-1, window[1])).unflatten(1, (-1, window[0]))
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def _image(x: Tensor, size: Sequence[int], window: Sequence[int]) -> Tensor:
    """The reverse."""
    x = x.unflatten(2, tuple(window)).unflatten(1, (size[0] // window[0], size[1] // window[1]))
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def _hidden_pairs(like: Tensor, size: Sequence[int], window: Sequence[int], shift: Sequence[int]) -> Tensor:
    """(windows, places, places): what hides places from each other that the roll brought into one window."""
    rows, columns = (
        (torch.arange(length, device=like.device) >= length - s).long() for length, s in zip(size, shift, strict=True)
    )
    region = _windows((2 * rows[:, None] + columns)[None, :, :, None], window)[0, :, :, 0]
    return (region[:, :, None] != region[:, None]).to(like.dtype) * _HIDDEN


# ---- In torchvision -------------------------------------------------------------------------------------------------

_torchvisions: dict[str, Any] = {}  # the function that ours stands for, while it does


def install() -> None:
    """Puts it there, now or when torchvision is imported."""
    module = sys.modules.get(MODULE)
    if module is None:
        if _AT_IMPORT not in sys.meta_path:
            sys.meta_path.insert(0, _AT_IMPORT)
    else:
        _put_into(module)


def restore() -> None:
    """Puts torchvision's own back."""
    if _AT_IMPORT in sys.meta_path:
        sys.meta_path.remove(_AT_IMPORT)
    original = _torchvisions.pop(FUNCTION, None)
    if original is not None and is_installed():
        setattr(sys.modules[MODULE], FUNCTION, original)


def is_installed() -> bool:
    return getattr(sys.modules.get(MODULE), FUNCTION, None) is shifted_window_attention


def _put_into(module: ModuleType) -> None:
    """Where the function is the one that this was written for."""
    original = getattr(module, FUNCTION, None)
    if original is shifted_window_attention or not inspect.isfunction(original):
        return
    if list(inspect.signature(original).parameters) == list(inspect.signature(shifted_window_attention).parameters):
        _torchvisions[FUNCTION] = original
        script_instead(shifted_window_attention, original)
        setattr(module, FUNCTION, shifted_window_attention)


class _AtImport(MetaPathFinder):
    """Finds the module as others do, and has the function replaced once its code has run."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != MODULE:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if _AT_IMPORT in sys.meta_path:
            _put_into(module)


_AT_IMPORT = _AtImport()
