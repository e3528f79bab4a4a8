"""FlashAttention's interfaces of both versions and their passes: errors name the argument that is wrong."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from flash_ext.integrations.flash_attn import extension_2, interface_2, interface_3
from tests.oracle import cumulative, random

SCALE = torch.tensor(0.3, requires_grad=True)
Q = torch.ones(1, 8, 2, 16)
ENDS: dict[str, Any] = dict(cu_seqlens_q=cumulative([8], "cpu"), cu_seqlens_k=cumulative([8], "cpu"))
ENDS |= dict(max_seqlen_q=8, max_seqlen_k=8)
SCORES: dict[str, Any] = dict(dropout_p=0.0, softmax_scale=0.3, causal=False, softcap=0.0, alibi_slopes=None)
SCORES |= dict(window_size_left=-1, window_size_right=-1)
INTO: dict[str, Any] = dict(dq=torch.empty_like(Q), dk=torch.empty_like(Q), dv=torch.empty_like(Q))
INTO |= dict(deterministic=False, rng_state=torch.zeros(2, dtype=torch.int64))
OUT: dict[str, Any] = dict(dout=Q, q=Q, k=Q, v=Q, out=Q, softmax_lse=torch.ones(1, 2, 8))
PACKED_OUT = {name: x[0] for name, x in OUT.items()}
PACKED_INTO = {name: x[0] if name in ("dq", "dk", "dv") else x for name, x in INTO.items()}
ROWS = (Q[0], Q[0], Q[0])
PAGED: dict[str, Any] = dict(q=Q[0], k=Q.view(2, 4, 2, 16), v=Q.view(2, 4, 2, 16))
PAGED |= dict(block_table=torch.tensor([[1, 0]]).int(), return_softmax=False)
USED_PAGES = PAGED | dict(seqused_k=torch.tensor([5]).int())
CALLS: dict[str, partial[Any]] = {
    "3 func": partial(interface_3.flash_attn_func, Q, Q, Q),
    "3 varlen": partial(interface_3.flash_attn_varlen_func, *ROWS, **ENDS),
    "3 qkvpacked": partial(interface_3.flash_attn_qkvpacked_func, torch.stack([Q, Q, Q], dim=2)),
    "3 kvcache": partial(interface_3.flash_attn_with_kvcache, Q, Q, Q),
    "3 forward": partial(interface_3._flash_attn_forward, Q, Q, Q),
    "3 backward": partial(interface_3._flash_attn_backward, **OUT, dq=Q, dk=Q, dv=Q),
    "forward": partial(interface_2._flash_attn_forward, Q, Q, Q, **SCORES, return_softmax=False),
    "varlen forward": partial(interface_2._flash_attn_varlen_forward, *ROWS, **ENDS, **SCORES),
    "paged forward": partial(interface_2._flash_attn_varlen_forward, **PAGED, **ENDS, **SCORES),
    "paged forward of used keys": partial(interface_2._flash_attn_varlen_forward, **USED_PAGES, **ENDS, **SCORES),
    "backward": partial(interface_2._flash_attn_backward, **OUT, **SCORES, **INTO),
    "varlen backward": partial(interface_2._flash_attn_varlen_backward, **PACKED_OUT, **ENDS, **SCORES, **PACKED_INTO),
}
WRONG: dict[str, list[Any]] = {
    "softmax_scale": [SCALE, "x"],
    "softcap": [SCALE, torch.tensor(-1.0), "x", -1.0],
    "causal": ["False", None],
    "is_causal": ["False", None],
    "window_size": [3, (1.5, 0), (-5, -5)],
    "window_size_left": [-5, "x"],
    "dropout_p": [-0.5, True, torch.tensor(0.0), "x"],
    "num_splits": ["x"],
    "pack_gqa": ["x"],
    "sm_margin": ["x"],
    "deterministic": ["x", ""],
    "return_attn_probs": ["x"],
    "return_softmax": ["x"],
    "return_softmax_lse": ["x"],
    "scheduler_metadata": ["x"],
    "page_table": [[1]],
    "block_table": [[1]],
    "leftpad_k": [[1], torch.zeros(1)],
    "cu_seqlens_q": [[1]],
    "cu_seqlens_k": [[0, 8]],
    "max_seqlen_q": [6.5, "x"],
    "max_seqlen_k": [6.5, "x"],
    "seqused_k": [[1], torch.ones(1)],
    "zero_tensors": ["x", None],
    "alibi_slopes": [[1.0]],
    "q": [None],
    "dq": [[1], torch.empty(3, 1, 8, 2, 16), torch.empty(1, 8, 2, 24)],
    "dv": [torch.empty(1, 8, 1, 16)],
}
WRONG_WITH_PAGES: dict[str, list[Any]] = {
    "k": [torch.ones(8, 2, 16), torch.ones(2, 4, 2, 8)],
    "v": [torch.ones(2, 3, 2, 16)],
    "block_table": [torch.zeros(2).int(), torch.tensor([[7, 0]]).int()],
    "cu_seqlens_k": [None, torch.tensor([0, 8]), torch.tensor([5, 3]).int()],
    "max_seqlen_k": [4],
    "leftpad_k": [torch.tensor([9]).int()],
}
ALSO_CALLED = dict.fromkeys(("window_size", "window_size_left"), "window_left|window_size")


def cases() -> Iterator[Any]:
    for name, call in CALLS.items():
        parameters = inspect.signature(call.func).parameters
        positional = list(parameters)[: len(call.args)]
        wrong = WRONG | (WRONG_WITH_PAGES if name == "paged forward" else {})
        for argument, values in wrong.items():
            if argument in parameters and argument not in positional:
                yield from (pytest.param(name, argument, x, id=f"{name}-{argument}-{shown(x)}") for x in values)


def shown(value: Any) -> str:
    return f"tensor of {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


@pytest.mark.parametrize(("name", "argument", "value"), list(cases()))
def test_wrong_arguments(name: str, argument: str, value: Any) -> None:
    call = CALLS[name]
    call()
    words = ALSO_CALLED.get(argument, argument)
    with pytest.raises((TypeError, ValueError, RuntimeError), match=rf"\b({words})\b.* must ") as raised:
        call(**{argument: value})
    foreign = "Expected a value of type|object has no|unexpected keyword|not subscriptable"
    assert not re.search(foreign, str(raised.value))


def varlen_fwd(zero_tensors: Any) -> Any:
    ends = (ENDS["cu_seqlens_q"], ENDS["cu_seqlens_k"], None, None, None, None, 8, 8)
    return extension_2.varlen_fwd(*ROWS, None, *ends, 0.0, 0.3, zero_tensors, False, -1, -1, 0.0, False, None)


LSES = torch.ones(3, 2, 7, 4)
OUTS = torch.ones(3, 2, 7, 4, 16)
HEADS = torch.ones(2, 7, 12, 16)
SHAPES = "out_partial must be .*lse_partial the same without headdim, got shapes"
OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "lse by heads": (lambda: interface_3.flash_attn_combine(OUTS, LSES.transpose(-1, -2)), SHAPES),
    "out of one sequence": (lambda: interface_3.flash_attn_combine(OUTS[:, 0, 0], LSES[:, 0, 0]), SHAPES),
    "out to broadcast to": (
        lambda: interface_3.flash_attn_combine(OUTS, LSES, OUTS),
        r"^out must have shape \(2, 7, 4, 16\), got \(3, 2, 7, 4, 16\)",
    ),
    "out_dtype": (
        lambda: interface_3.flash_attn_combine(OUTS, LSES, out_dtype="x"),  # type: ignore[arg-type]
        r"out_dtype must be a torch\.dtype or None, got str 'x'",
    ),
    "cache_seqlens": (
        lambda: interface_3.get_scheduler_metadata(2, 1, 64, 4, 2, 32, None),  # type: ignore[arg-type]
        "cache_seqlens must be a Tensor, got None",
    ),
    "page_table": (
        lambda: interface_3.flash_attn_with_kvcache(Q, Q, Q, cache_seqlens=ENDS["cu_seqlens_q"][1:], page_table=Q),
        "page_table must ",
    ),
    **{
        f"{heads} of 12 heads": (
            partial(interface_3.flash_attn_qkvpacked_func, HEADS, num_heads_q=heads),
            f"num_heads_q must leave as many heads of k as of v among 12 heads of qkv, got {heads}",
        )
        for heads in (5, 0, 12, 30, -2)
    },
    "no string of heads": (
        lambda: interface_3.flash_attn_qkvpacked_func(HEADS, num_heads_q="x"),  # type: ignore[arg-type]
        "num_heads_q must be an integer",
    ),
    "other heads": (
        lambda: interface_3.flash_attn_qkvpacked_func(HEADS.unflatten(2, (3, 4)), num_heads_q=2),
        r"num_heads_q must be that of qkv \(2, 7, 3, 4, 16\), 4, got 2",
    ),
    "zero_tensors of the extension": (lambda: varlen_fwd("x"), "zero_tensors must be True or False, got str 'x'"),
    "out_": (
        lambda: extension_2.fwd(Q, Q, Q, torch.empty(3, 1, 8, 2, 16), None, 0.0, 0.3, False, -1, -1, 0.0, False, None),
        r"out_ must have shape \(1, 8, 2, 16\), got \(3, 1, 8, 2, 16\)",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_fits_no_other_argument(case: str) -> None:
    call, text = OTHERS[case]
    with pytest.raises((TypeError, ValueError, RuntimeError), match=text):
        call()


def test_a_softcap_of_none_is_off() -> None:
    q = random(1, 8, 2, 16)
    for softcap in (None, 0.0):
        scores = SCORES | dict(softcap=softcap)
        out, *_ = interface_2._flash_attn_forward(q, q, q, **scores, return_softmax=False)
        assert torch.equal(out, interface_3.flash_attn_func(q, q, q, 0.3))  # type: ignore[arg-type]
