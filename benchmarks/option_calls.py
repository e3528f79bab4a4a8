"""How the peers are given the options of a call: whatever can be made before, a dense mask for instance, is made before
the clock starts.

Each function takes a call and returns what attends with its options, from the tensors that may have gradients (q, k, v,
bias, sink) to out (batch, seqlen, heads, head_dim). Where a peer has no such option, what is returned raises.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import ModuleType
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from tests.oracle import Call

Attend = Callable[[Mapping[str, Tensor]], Tensor]

DEFAULTS = {"window_size": (-1, -1), "softcap": 0.0, "dropout_p": 0.0, "causal": False, "deterministic": False}
RECOMPILE_LIMIT = 256  # of FlexAttention, which is compiled anew for every rule; torch's default of 8 makes it unfused


def cannot(reason: str) -> Callable[..., NoReturn]:
    """A call that raises a RuntimeError."""

    def refuse(*args: object) -> NoReturn:
        raise RuntimeError(reason)

    return refuse


def options_in_use(call: Call) -> dict[str, Any]:
    """Those that differ from their defaults."""
    return {
        name: value
        for name, value in call.options.items()
        if isinstance(value, Tensor) or value not in (None, DEFAULTS.get(name))
    }


def _listing(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


# ---- torch's scaled_dot_product_attention ---------------------------------------------------------------------------

SDPA_MASKS = frozenset({"mask", "block_mask", "window_size"})
SDPA_BIASES = frozenset({"bias", "alibi_slopes"})
SDPA_OTHERS = frozenset({"causal", "dropout_p", "rng_state"})
MADE_DENSE = frozenset({"block_mask", "window_size", "alibi_slopes"})
MADE_DENSE_LIMIT = 2**27  # pairs up to which it is worth waiting for those that get them as a tensor: 11585 squared


def sdpa_with_options(call: Call) -> Attend:
    """Masks, windows, biases and ALiBi are its attn_mask."""
    options = options_in_use(call)
    if foreign := options.keys() - SDPA_MASKS - SDPA_BIASES - SDPA_OTHERS:
        return cannot(f"torch SDPA has no {_listing(foreign)}")
    if options.keys() == {"causal"} and call.q.shape[1] != call.k.shape[1]:
        return sdpa_aligned_with_the_last_key(call)
    masks = options.keys() & (SDPA_MASKS | SDPA_BIASES)
    if len(masks) + bool(options.get("causal")) > 1:
        return cannot(f"torch SDPA takes one mask, not {_listing(masks)}")
    if masks & MADE_DENSE and call.q.shape[1] * call.k.shape[1] > MADE_DENSE_LIMIT:
        return cannot(f"torch SDPA is not asked with dense masks of more than {MADE_DENSE_LIMIT} pairs")
    made = None if "bias" in masks else dense_mask(call, options)

    def attend(leaves: Mapping[str, Tensor]) -> Tensor:
        q, k, v = (leaves[name].transpose(1, 2) for name in ("q", "k", "v"))
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=leaves.get("bias", made),
            dropout_p=options.get("dropout_p", 0.0),
            is_causal=options.get("causal", False),
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out.transpose(1, 2)

    return attend


def sdpa_aligned_with_the_last_key(call: Call) -> Attend:
    """Its is_causal is aligned with the first key. FlashAttention-2 and efficient have the other rule too; cuDNN does
    not, and who stores the scores gets a mask."""
    backends = torch.backends.cuda
    if call.q.is_cuda and not (backends.flash_sdp_enabled() or backends.mem_efficient_sdp_enabled()):
        if backends.cudnn_sdp_enabled():
            return cannot("cuDNN in torch SDPA aligns a causal mask with the first key")
    mask = causal_lower_right(call.q.shape[1], call.k.shape[1])
    grouped = call.q.shape[2] != call.k.shape[2]

    def attend(leaves: Mapping[str, Tensor]) -> Tensor:
        q, k, v = (leaves[name].transpose(1, 2) for name in ("q", "k", "v"))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped).transpose(1, 2)

    return attend


def fa2_with_options(call: Call) -> Attend:
    """torch has FlashAttention-2 for packed sequences as a function of its own."""
    return torch_varlen(call) if call.varlen else sdpa_with_options(call)


VARLEN_OPTIONS = frozenset({"causal", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"})


def torch_varlen(call: Call) -> Attend:
    """``torch.nn.attention.varlen.varlen_attn``, whose arguments differ between versions."""
    options = options_in_use(call)
    if foreign := options.keys() - VARLEN_OPTIONS:
        return cannot(f"torch's varlen_attn has no {_listing(foreign)}")
    if missing := VARLEN_OPTIONS - options.keys() - {"causal"}:
        return cannot(f"torch's varlen_attn needs {_listing(missing)}")
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return cannot("this torch has no varlen_attn")
    known = inspect.signature(varlen_attn).parameters.keys()
    arguments: dict[str, Any] = {}
    if options.get("causal"):
        arguments = {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
    if call.q.shape[-2] != call.k.shape[-2]:
        arguments["enable_gqa"] = True
    if foreign := arguments.keys() - known:
        return cannot(f"torch's varlen_attn has no {_listing(foreign)}")
    lengths = [options[name] for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")]
    return lambda leaves: first(varlen_attn(leaves["q"], leaves["k"], leaves["v"], *lengths, **arguments))


def dense_mask(call: Call, options: Mapping[str, Any]) -> Tensor | None:
    """The mask as torch's function takes it: bool (True = visible), or numbers that are added."""
    if "mask" in options:
        return torch.as_tensor(options["mask"])
    if "block_mask" in options:
        return call.block_visible
    distance = _distance(call)
    if "window_size" in options:
        left, right = options["window_size"]
        return (distance <= (left if left >= 0 else torch.inf)) & (-distance <= (right if right >= 0 else torch.inf))
    if "alibi_slopes" in options:
        return (-options["alibi_slopes"][:, None, None] * distance.abs()).to(call.dtype)[None]
    return None


def _distance(call: Call) -> Tensor:
    """How far a key lies before the query, (seqlen_q, seqlen_k)."""
    rows, columns = (torch.arange(t.shape[1], device=t.device) for t in (call.q, call.k))
    return rows[:, None] + call.k.shape[1] - call.q.shape[1] - columns


# ---- The flash-attn packages ----------------------------------------------------------------------------------------


def package_with_options(module: ModuleType, call: Call) -> Attend:
    """FlashAttention-2 and -3 have functions of the same names; which options they take differs."""
    options = options_in_use(call)
    function = module.flash_attn_varlen_func if call.varlen else module.flash_attn_func
    known = inspect.signature(function).parameters.keys()
    options.pop("rng_state", None)  # their dropout draws its own numbers
    if foreign := options.keys() - known:
        return cannot(f"{module.__name__} has no {_listing(foreign)}")

    def attend(leaves: Mapping[str, Tensor]) -> Tensor:
        return first(function(leaves["q"], leaves["k"], leaves["v"], **options))

    return attend


def first(result: Any) -> Tensor:
    """``out``, where some functions, or some versions of them, return (out, lse)."""
    out = result if isinstance(result, Tensor) else result[0]
    assert isinstance(out, Tensor)
    return out


# ---- FlexAttention --------------------------------------------------------------------------------------------------

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

FLEX_SCORES = frozenset({"bias", "softcap", "alibi_slopes"})
FLEX_MASKS = frozenset({"mask", "block_mask", "window_size", "causal"})
FLEX_TOO_LARGE = "No valid triton configs"  # its own choice of tiles does not fit into shared memory
FLEX_SMALLER = {"BLOCK_M": 128, "BLOCK_N": 64, "num_stages": 2}


@cache
def flex_attention() -> Callable[..., Tensor]:
    """torch's, compiled."""
    from torch.nn.attention import flex_attention as module

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
    torch._functorch.config.donated_buffer = False  # its backward is timed more than once
    compiled: Callable[..., Tensor] = torch.compile(module.flex_attention, dynamic=False)
    return compiled


def flex_with_options(call: Call) -> Attend:
    """Options as rules: what changes a score is its score_mod, what hides keys its block mask."""
    options = options_in_use(call)
    if foreign := options.keys() - FLEX_SCORES - FLEX_MASKS:
        return cannot(f"FlexAttention is given no {_listing(foreign)} here")
    if len(options) > 1:
        return cannot(f"FlexAttention is given one rule here, not {_listing(options)}")
    block_mask = _block_mask(call, options) if options.keys() & FLEX_MASKS else None
    kernel: dict[str, Any] = {}

    def run(q: Tensor, k: Tensor, v: Tensor, rule: ScoreMod | None) -> Tensor:
        return flex_attention()(q, k, v, rule, block_mask, enable_gqa=q.shape[1] != k.shape[1], **kernel)

    def attend(leaves: Mapping[str, Tensor]) -> Tensor:
        q, k, v = (leaves[name].transpose(1, 2) for name in ("q", "k", "v"))
        rule = _score_mod(options, leaves.get("bias"))
        try:
            out = run(q, k, v, rule)
        except RuntimeError as error:
            if kernel or FLEX_TOO_LARGE not in str(error):
                raise
            kernel["kernel_options"] = FLEX_SMALLER
            out = run(q, k, v, rule)
        return out.transpose(1, 2)

    return attend


def _score_mod(options: Mapping[str, Any], bias: Tensor | None) -> ScoreMod | None:
    if bias is not None:
        return _add_bias(bias)
    if "softcap" in options:
        cap = float(options["softcap"])
        return lambda score, b, h, i, j: cap * torch.tanh(score / cap)
    if "alibi_slopes" in options:
        slopes = options["alibi_slopes"]
        return lambda score, b, h, i, j: score - slopes[h] * (i - j).abs()
    return None


def _add_bias(bias: Tensor) -> ScoreMod:
    at = _entry_of(bias)
    return lambda score, b, h, i, j: score + at(b, h, i, j)


def _entry_of(table: Tensor) -> MaskMod:
    """What a tensor that broadcasts over (batch, heads, seqlen_q, seqlen_k) says of a score."""
    used = [dim for dim, length in enumerate(table.shape) if length > 1]
    squeezed = table.squeeze()

    def entry(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        indices = (b, h, i, j)
        return squeezed[tuple([indices[dim] for dim in used])]

    return entry


def _block_mask(call: Call, options: Mapping[str, Any]) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    if "block_mask" in options:  # the same blocks
        return options["block_mask"].to_flex()
    mask = options.get("mask")
    batch = None if mask is None or mask.shape[0] == 1 else mask.shape[0]
    heads = None if mask is None or mask.shape[1] == 1 else mask.shape[1]
    lengths = call.q.shape[1], call.k.shape[1]
    return create_block_mask(_mask_mod(call, options), batch, heads, *lengths, device=str(call.q.device))


def _mask_mod(call: Call, options: Mapping[str, Any]) -> MaskMod:
    if "mask" in options:
        return _entry_of(options["mask"])
    left, right = (-1, 0) if "causal" in options else options["window_size"]
    seqlen_q, seqlen_k = call.q.shape[1], call.k.shape[1]
    left, right = (seqlen_k + seqlen_q if side < 0 else side for side in (left, right))
    offset = seqlen_k - seqlen_q
    return lambda b, h, i, j: (j >= i + offset - left) & (j <= i + offset + right)


@cache
def flex_plain(causal: bool, q_shape: tuple[int, ...], k_shape: tuple[int, ...], device: str) -> Attend:
    """Without options but ``causal``; its block mask is made once for the shapes."""
    q, k = (torch.empty(shape, device=device) for shape in (q_shape, k_shape))
    return flex_with_options(Call(q, k, k, {"causal": causal}))
