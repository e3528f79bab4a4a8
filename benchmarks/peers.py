"""Who else computes attention here: torch's own backends, and the flash-attn packages where they can be imported."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_ext

OURS = "flash_ext"
STORED_SCORES_LIMIT = 2**31  # bytes of scores up to which it is worth waiting for those that store them


@dataclass(frozen=True)
class Peer:
    """An implementation. Tensors are (batch, seqlen, heads, head_dim), on both sides."""

    title: str
    attention: Callable[[Tensor, Tensor, Tensor, bool], Tensor]  # q, k, v, causal
    decode: Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k_cache, v_cache, all of which is in use
    around: Callable[[], AbstractContextManager[Any]] = nullcontext  # where it runs
    stores_scores: bool = False

    def is_too_large(self, q: Tensor, k: Tensor) -> bool:
        scores = q.shape[0] * q.shape[2] * q.shape[1] * k.shape[1]
        return self.stores_scores and scores * q.element_size() > STORED_SCORES_LIMIT


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """torch's, which wants (batch, heads, seqlen, head_dim): the views cost nothing."""
    q_, k_, v_ = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    grouped = q.shape[2] != k.shape[2]
    return F.scaled_dot_product_attention(q_, k_, v_, is_causal=causal, enable_gqa=grouped).transpose(1, 2)


def ours() -> Peer:
    def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return _first(flash_ext.attention(q, k, v, causal=causal))

    def decode(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        return _first(flash_ext.decode(q, k_cache, v_cache))

    return Peer("flash_ext", attention, decode)


def _first(result: Any) -> Tensor:
    """``out``, where some functions, or some versions of them, return (out, lse)."""
    out = result if isinstance(result, Tensor) else result[0]
    assert isinstance(out, Tensor)
    return out


def _sdpa_backend(title: str, backend: SDPBackend, stores_scores: bool = False) -> Peer:
    return Peer(title, sdpa, sdpa, partial(sdpa_kernel, backend), stores_scores)


def _flash_attn_package(title: str, module_name: str) -> Peer | None:
    """FlashAttention-2 and -3 have functions of the same names."""
    try:
        module = importlib.import_module(module_name)
        function, with_kvcache = module.flash_attn_func, module.flash_attn_with_kvcache
    except (ImportError, OSError, AttributeError):
        return None

    def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return _first(function(q, k, v, causal=causal))

    def decode(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        return _first(with_kvcache(q, k_cache, v_cache))

    return Peer(title, attention, decode)


PEERS: dict[str, Callable[[], Peer | None]] = {
    "fa2": lambda: _sdpa_backend("FlashAttention-2 in torch SDPA", SDPBackend.FLASH_ATTENTION),
    "cudnn": lambda: _sdpa_backend("cuDNN in torch SDPA", SDPBackend.CUDNN_ATTENTION),
    "fa3": lambda: _flash_attn_package("FlashAttention-3", "flash_attn_interface"),
    "flash_attn": lambda: _flash_attn_package("the flash-attn package", "flash_attn"),
    "efficient": lambda: _sdpa_backend("memory-efficient attention in torch SDPA", SDPBackend.EFFICIENT_ATTENTION),
    "sdpa": lambda: Peer("what torch SDPA chooses", sdpa, sdpa),
    "math": lambda: _sdpa_backend("torch SDPA with the scores in memory", SDPBackend.MATH, stores_scores=True),
}
DEFAULT_PEERS = {
    "cuda": ("fa2", "cudnn", "fa3", "flash_attn", "efficient", "math"),
    "cpu": ("sdpa", "math"),
}
NEEDS_CUDA = frozenset({"fa2", "cudnn", "fa3", "flash_attn", "efficient"})


def find_peers(names: Sequence[str] | None, device: torch.device) -> dict[str, Peer]:
    """Those that can be imported; None: all that make sense on the device.

    Raises:
        ValueError: a peer that was named is not to be had.
    """
    found: dict[str, Peer] = {}
    for name in DEFAULT_PEERS[device.type] if names is None else names:
        peer = None if name in NEEDS_CUDA and device.type != "cuda" else PEERS[name]()
        if peer is not None:
            found[name] = peer
        elif names is not None:
            raise ValueError(f"peer {name} is not installed, or not for {device.type}")
    return found
