"""How many floating-point operations each operator is, for ``torch.utils.flop_counter.FlopCounterMode``.

Counted as torch counts its own attention: the matrix products alone, two operations for each multiplication with its
addition, and all pairs of queries and keys, visible or not. So the numbers of a model are the same with either.

Most programs never import torch's module, which is slow where it finds Triton. A counter copies the formulas that there
are when it is made. So ours are entered right behind that module's import, whenever it comes.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flash_ext.ops import DecodeOptions, ScoreOptions

_OPS = torch.ops.flash_ext


def _product(m: int, n: int, k: int) -> int:
    return 2 * m * n * k


def _pairs(q: Tensor, k: Tensor, options: ScoreOptions) -> int:
    """Pairs of a query and a key, of all sequences, for one head."""
    if options.cu_seqlens_q is None or options.cu_seqlens_k is None:
        return q.shape[0] * q.shape[1] * k.shape[1]
    lengths_q = _lengths(options.cu_seqlens_q, options.max_seqlen_q)
    lengths_k = _lengths(options.cu_seqlens_k, options.max_seqlen_k)
    return sum(m * n for m, n in zip(lengths_q, lengths_k, strict=True))


def _lengths(cu_seqlens: Tensor, longest: int) -> list[int]:
    """Of each sequence; the longest one for all of them where no values can be read, as torch does."""
    if cu_seqlens.device.type == "meta" or type(cu_seqlens) is not Tensor:
        return [longest] * (cu_seqlens.shape[0] - 1)
    lengths: list[int] = cu_seqlens.diff().tolist()
    return lengths


def _forward(q: Tensor, k: Tensor, v: Tensor, *options: Any, **rest: Any) -> int:
    pairs = _pairs(q, k, _score_options(options))
    return q.shape[-2] * (_product(pairs, 1, q.shape[-1]) + _product(pairs, 1, v.shape[-1]))


def _backward(grad_out: Any, grad_lse: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **more: Any) -> int:
    """Scores again, dQ and dK; dP and dV."""
    pairs = _pairs(q, k, _score_options(rest[8:]))  # behind out, lse, deterministic and what is needed
    return q.shape[-2] * (3 * _product(pairs, 1, q.shape[-1]) + 2 * _product(pairs, 1, v.shape[-1]))


def _weights(q: Tensor, k: Tensor, lse: Tensor, dropout_mode: int, *options: Any, **rest: Any) -> int:
    return q.shape[-2] * _product(_pairs(q, k, _score_options(options)), 1, q.shape[-1])


def _weights_backward(grad_weights: Tensor, q: Tensor, k: Tensor, *rest: Any, **more: Any) -> int:
    """Scores again, dQ and dK."""
    pairs = _pairs(q, k, _score_options(rest[6:]))  # behind lse, dropout_mode and what is needed
    return q.shape[-2] * 3 * _product(pairs, 1, q.shape[-1])


def _decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, *options: Any, **rest: Any) -> int:
    """The whole cache counts: how much of it is in use is known on the device."""
    o = DecodeOptions(*options)
    rows = k_cache.shape[1] * (1 if o.block_table is None else o.block_table.shape[1])
    queries = q.shape[0] if q.dim() == 3 else q.shape[0] * q.shape[1]
    return q.shape[-2] * _product(queries, rows, q.shape[-1] + v_cache.shape[-1])


def _decode_append(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, *options: Any, **_: Any) -> int:
    return _decode(q, k_cache, v_cache, *options)


def _score_options(options: tuple[Any, ...]) -> ScoreOptions:
    """Without the flag that attention_forward has behind them."""
    return ScoreOptions(*options[: len(ScoreOptions._fields)])


_FORMULAS: dict[Any, Callable[..., int]] = {
    _OPS.attention_forward: _forward,
    _OPS.attention_forward_max_logit: _forward,
    _OPS.attention_forward_plain: _forward,
    _OPS.attention_backward: _backward,
    _OPS.attention_weights: _weights,
    _OPS.attention_weights_backward: _weights_backward,
    _OPS.attention_decode: _decode,
    _OPS.attention_decode_append: _decode_append,
}


def _enter(flop_counter: ModuleType) -> None:
    for operator, formula in _FORMULAS.items():
        if operator not in flop_counter.flop_registry:
            flop_counter.register_flop_formula(operator, get_raw=True)(formula)


class _BehindImport(MetaPathFinder):
    """Finds one module as everybody else would, once, and sees to what happens when it has been loaded."""

    NAME = "torch.utils.flop_counter"

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.NAME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_enter(module: ModuleType) -> None:
                load(module)
                _enter(module)

            spec.loader.exec_module = load_and_enter  # type: ignore[method-assign]
        return spec


def register() -> None:
    """Enters the formulas now, or when torch's counter is imported."""
    if module := sys.modules.get(_BehindImport.NAME):
        _enter(module)
    else:
        sys.meta_path.insert(0, _BehindImport())
