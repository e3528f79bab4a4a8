"""Who else computes attention here: torch's own backends and FlexAttention, and the flash-attn packages where they can
be imported."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_ext
from benchmarks.extensions import import_lazily, undefined_symbols
from benchmarks.option_calls import (
    Attend,
    cannot,
    fa2_with_options,
    first,
    flex_plain,
    flex_with_options,
    package_with_options,
    sdpa_with_options,
)
from benchmarks.origins import package_origin, torch_origin
from tests.oracle import Call

OURS = "flash_ext"
FA3_METADATA = "fa3 metadata"
STORED_SCORES_LIMIT = 2**31  # bytes of scores up to which it is worth waiting for those that store them


@dataclass(frozen=True)
class Step:
    """A step as a serving engine has it: one new token a sequence, over caches that have room for more, or a chunk of
    a prompt, whose keys are in the caches already."""

    q: Tensor  # (batch, seqlen_q, heads_q, head_dim)
    k_cache: Tensor  # (batch, seqlen, heads_kv, head_dim), or with block_table pages (pages, page size, ...)
    v_cache: Tensor
    cache_seqlens: Tensor | None = None  # int32 (batch), rows that are in use, the new one not; None: all
    k: Tensor | None = None  # (batch, 1, heads_kv, head_dim), to be appended
    v: Tensor | None = None
    row: Tensor | None = None  # int64 (1), where the new row goes in every sequence
    rotary: tuple[Tensor, Tensor] | None = None  # cos and sin, (seqlen, head_dim / 2)
    ragged: bool = False  # not all rows are in use, the new one counted
    causal: bool = False
    block_table: Tensor | None = None  # int32 (batch, pages of a sequence)


Decode = Callable[[], Tensor]
NO_OPTIONS = cannot("takes no options")


@dataclass(frozen=True)
class Peer:
    """An implementation. Tensors are (batch, seqlen, heads, head_dim), on both sides."""

    title: str
    attention: Callable[[Tensor, Tensor, Tensor, bool], Tensor]  # q, k, v, causal
    decode: Callable[[Step], Decode]  # what a step prepares once for all layers is prepared; the rest is in the call
    around: Callable[[], AbstractContextManager[Any]] = nullcontext  # where it runs
    stores_scores: bool = False
    with_options: Callable[[Call], Attend] = NO_OPTIONS
    origin: Mapping[str, str] = field(default_factory=dict)  # versions, commits

    def is_too_large(self, q: Tensor, k: Tensor) -> bool:
        scores = q.shape[0] * q.shape[2] * q.shape[1] * k.shape[1]
        return self.stores_scores and scores * q.element_size() > STORED_SCORES_LIMIT


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """torch's, which wants (batch, heads, seqlen, head_dim): the views cost nothing."""
    q_, k_, v_ = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    grouped = q.shape[2] != k.shape[2]
    return F.scaled_dot_product_attention(q_, k_, v_, is_causal=causal, enable_gqa=grouped).transpose(1, 2)


def sdpa_decode(step: Step) -> Decode:
    """torch's has neither lengths nor rotary embedding; a new row is copied into the caches before it."""
    if step.rotary is not None:
        return cannot("torch SDPA has no rotary embedding")
    if step.ragged:
        return cannot("torch SDPA takes no lengths of caches")
    if step.block_table is not None:
        return cannot("torch SDPA takes no pages")
    if step.causal:
        attend = sdpa_with_options(Call(step.q, step.k_cache, step.v_cache, {"causal": True}))
        return partial(attend, {"q": step.q, "k": step.k_cache, "v": step.v_cache})
    if step.k is None or step.v is None or step.row is None:
        return partial(sdpa, step.q, step.k_cache, step.v_cache)
    copies = ((step.k_cache, step.k), (step.v_cache, step.v))
    row = step.row

    def append_and_attend() -> Tensor:
        for cache, fresh in copies:
            cache.index_copy_(1, row, fresh)
        return sdpa(step.q, step.k_cache, step.v_cache)

    return append_and_attend


def serving_arguments(step: Step) -> dict[str, Any]:
    """Of ``decode`` and of flash_attn_with_kvcache, besides q and the caches."""
    arguments: dict[str, Any] = {"cache_seqlens": step.cache_seqlens, "k": step.k, "v": step.v}
    if step.rotary is not None:
        cos, sin = step.rotary
        arguments |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": False}
    arguments |= {"causal": step.causal or None, "block_table": step.block_table}
    return {name: value for name, value in arguments.items() if value is not None}


def ours() -> Peer:
    def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return first(flash_ext.attention(q, k, v, causal=causal))

    def decode(step: Step) -> Decode:
        arguments = serving_arguments(step)
        return lambda: first(flash_ext.decode(step.q, step.k_cache, step.v_cache, **arguments))

    def with_options(call: Call) -> Attend:
        return lambda leaves: first(flash_ext.attention(**{**call.options, **leaves}))

    return Peer("flash_ext", attention, decode, with_options=with_options)


def _sdpa_backend(title: str, backend: SDPBackend, stores_scores: bool = False) -> Peer:
    around = partial(sdpa_kernel, backend)
    origin = torch_origin(cudnn=backend == SDPBackend.CUDNN_ATTENTION)
    with_options = fa2_with_options if backend == SDPBackend.FLASH_ATTENTION else sdpa_with_options
    return Peer(title, sdpa, sdpa_decode, around, stores_scores, with_options, origin)


def metadata_of(step: Step, make: Callable[..., Tensor]) -> Tensor:
    """What FlashAttention-3's ``get_scheduler_metadata`` makes for the step.

    A serving engine makes it once a step, and all layers read it. Each call leaves the counter of tiles in it at 0, so
    that it serves the next call and every replay of a graph, as long as it is kept.
    """
    if step.cache_seqlens is None:
        raise RuntimeError("its scheduler metadata is made from lengths of caches, which the step does not have")
    (batch, seqlen_q, heads_q, head_dim), (_, rows, heads_kv, _) = step.q.shape, step.k_cache.shape
    pages = None if step.block_table is None else step.block_table.shape[1]
    return make(
        batch,
        seqlen_q,
        rows if pages is None else pages * rows,
        heads_q,
        heads_kv,
        head_dim,
        step.cache_seqlens,
        qkv_dtype=step.q.dtype,
        page_size=None if pages is None else rows,
        max_seqlen_k_new=0 if step.k is None else step.k.shape[1],
        causal=step.causal,
    )


def _flash_attn_package(
    title: str, module_name: str, distribution: str, extension: str, metadata: bool = False
) -> Peer | None:
    """FlashAttention-2 and -3 have functions of the same names.

    Args:
        extension: the module that holds the kernels.
        metadata: make FlashAttention-3's scheduler metadata before the call; else it makes them within.
    """
    try:
        module = import_lazily(module_name)
        function, with_kvcache = module.flash_attn_func, module.flash_attn_with_kvcache
        make_metadata = module.get_scheduler_metadata if metadata else None
    except (ImportError, OSError, AttributeError):
        return None

    def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return first(function(q, k, v, causal=causal))

    def decode(step: Step) -> Decode:
        arguments = serving_arguments(step)
        if "block_table" in arguments:
            arguments[name_of_table] = arguments.pop("block_table")
        if lacks_a_kernel(sys.modules.get(extension), step):
            return cannot(f"its library was built without some kernels of head_dim {step.q.shape[-1]}")
        if make_metadata is not None:
            arguments["scheduler_metadata"] = metadata_of(step, make_metadata)
        return lambda: first(with_kvcache(step.q, step.k_cache, step.v_cache, **arguments))

    name_of_table = next(n for n in ("page_table", "block_table") if n in inspect.signature(with_kvcache).parameters)
    with_options = partial(package_with_options, module)
    origin = package_origin(distribution, sys.modules.get(extension))
    return Peer(title, attention, decode, with_options=with_options, origin=origin)


def lacks_a_kernel(extension: ModuleType | None, step: Step) -> bool:
    """Whether the step may need a kernel that FlashAttention-3's library was linked without.

    Who builds a part of it and loads it lazily can call that part; calling another one ends the process. Which kernel a
    call needs, split or not, the library decides by itself.
    """
    if extension is None or extension.__file__ is None:
        return False
    element = {torch.float16: "6half_t", torch.bfloat16: "10bfloat16_t"}.get(step.q.dtype)
    head_dim, paged = step.q.shape[-1], "[01]" if step.block_table is not None else "0"
    # run_mha_fwd_<90, element, head_dim, head_dim, split, paged, softcap, several heads in a tile>
    kernel = rf"_Z12run_mha_fwd_ILi90EN7cutlass{element}ELi{head_dim}ELi{head_dim}ELb[01]ELb{paged}ELb0E\w+"
    return bool(undefined_symbols(extension.__file__, kernel))


def _flex() -> Peer:
    def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        attend = flex_plain(causal, tuple(q.shape), tuple(k.shape), str(q.device))
        return attend({"q": q, "k": k, "v": v})

    def decode(step: Step) -> Decode:
        return cannot("FlexAttention is not asked to decode")

    return Peer("FlexAttention, compiled", attention, decode, with_options=flex_with_options, origin=torch_origin())


def _fa3(title: str, metadata: bool) -> Peer | None:
    return _flash_attn_package(title, "flash_attn_interface", "flash_attn_3", "flash_attn_3._C", metadata)


PEERS: dict[str, Callable[[], Peer | None]] = {
    "fa2": lambda: _sdpa_backend("FlashAttention-2 in torch SDPA", SDPBackend.FLASH_ATTENTION),
    "cudnn": lambda: _sdpa_backend("cuDNN in torch SDPA", SDPBackend.CUDNN_ATTENTION),
    "fa3": lambda: _fa3("FlashAttention-3", metadata=False),
    FA3_METADATA: lambda: _fa3("FlashAttention-3, its scheduler metadata made before the call", metadata=True),
    "flash_attn": lambda: _flash_attn_package(
        "the flash-attn package", "flash_attn", "flash_attn", "flash_attn_2_cuda"
    ),
    "efficient": lambda: _sdpa_backend("memory-efficient attention in torch SDPA", SDPBackend.EFFICIENT_ATTENTION),
    "flex": _flex,
    "sdpa": lambda: Peer(
        "what torch SDPA chooses", sdpa, sdpa_decode, with_options=sdpa_with_options, origin=torch_origin()
    ),
    "math": lambda: _sdpa_backend("torch SDPA with the scores in memory", SDPBackend.MATH, stores_scores=True),
}
DEFAULT_PEERS = {
    "cuda": ("fa2", "cudnn", "fa3", "flash_attn", "efficient", "math"),
    "cpu": ("sdpa", "math"),
}
NEEDS_CUDA = frozenset({"fa2", "cudnn", "fa3", FA3_METADATA, "flash_attn", "efficient", "flex"})


def find_peers(
    names: Sequence[str] | None,
    device: torch.device,
    also: Sequence[str] = (),
    default: Sequence[str] | None = None,
) -> dict[str, Peer]:
    """Those that are named. None: where they can be had, ``default``, or all that make sense on the device.

    Args:
        also: asked besides these.

    Raises:
        ValueError: a peer that was named is not to be had.
    """
    if names is None:
        return available_peers((*(DEFAULT_PEERS[device.type] if default is None else default), *also), device)
    found = available_peers(names, device)
    for name in names:
        if name not in found:
            raise ValueError(f"peer {name} is not installed, or not for {device.type}")
    return found


def available_peers(names: Sequence[str], device: torch.device) -> dict[str, Peer]:
    """Those of them that can be imported and run on the device."""
    wanted = [name for name in names if device.type == "cuda" or name not in NEEDS_CUDA]
    return {name: peer for name in wanted if (peer := PEERS[name]()) is not None}
