"""Random problems against the oracle: any combination of shapes, layouts and options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flash_ext
from tests import reference
from tests.decode_oracle import assert_decode_matches, fill_unused_rows, make_decode, paged
from tests.oracle import (
    FLOATS,
    Call,
    assert_matches_oracle,
    cumulative,
    dtypes_of,
    int32,
    make_call,
    random,
    random_rng,
)

QUICK = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
LONG = settings(QUICK, max_examples=500, deadline=None)
PARTS = pytest.mark.parametrize("part", range(4))  # 2,000 problems, in parts that can run side by side

seqlens = st.one_of(st.integers(0, 9), st.integers(10, 150), st.sampled_from([63, 64, 65, 127, 128, 129]))
head_dims = st.integers(1, 32).map(lambda n: 8 * n)
sizes_of_window = st.one_of(st.just(-1), st.integers(0, 20), st.integers(0, 200))


@st.composite
def score_options(draw: st.DrawFn, shape: tuple[int, int, int, int], device: str) -> dict[str, Any]:
    """Options of a problem with (batch, heads_q, seqlen_q, seqlen_k) scores."""
    options: dict[str, Any] = {}
    heads_q = shape[1]

    def broadcast() -> tuple[int, ...]:
        return tuple(n if draw(st.booleans()) else 1 for n in shape)

    if draw(st.booleans()):
        options["causal"] = draw(st.booleans())
        options["top_left"] = draw(st.booleans())
        options["window_size"] = (draw(sizes_of_window), draw(sizes_of_window))
    if draw(st.booleans()):
        options["softmax_scale"] = draw(st.floats(-1, 1))
    if draw(st.integers(0, 3)) == 0:
        options["softcap"] = draw(st.floats(0.5, 30))
    if draw(st.integers(0, 3)) == 0:
        options["alibi_slopes"] = torch.rand((shape[0], heads_q) if draw(st.booleans()) else (heads_q,), device=device)
    if draw(st.integers(0, 2)) == 0:
        options["bias"] = random(*broadcast(), dtype=draw(st.sampled_from(FLOATS)), device=device)
    if draw(st.integers(0, 2)) == 0:
        options["mask"] = torch.rand(broadcast(), device=device) < draw(st.sampled_from([0.0, 0.3, 0.8]))
    if draw(st.integers(0, 3)) == 0:
        options["sink"] = random(heads_q, dtype=draw(st.sampled_from(FLOATS)), device=device)
    if draw(st.integers(0, 3)) == 0:
        options |= {"dropout_p": draw(st.sampled_from([0.1, 0.5, 0.9])), "rng_state": random_rng(device)}
    return options


@st.composite
def attention_calls(draw: st.DrawFn, device: str) -> tuple[Call, tuple[str, ...]]:
    """A call, dense or packed, and the inputs that want gradients."""
    torch.manual_seed(draw(st.integers(0, 2**32 - 1)))
    group, heads_kv = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (3, 2)]))
    sizes: dict[str, Any] = dict(
        heads_q=group * heads_kv, heads_kv=heads_kv, head_dim=draw(head_dims), head_dim_v=draw(head_dims),
        dtype=draw(st.sampled_from(dtypes_of(device))), device=device,
    )  # fmt: skip
    batch = draw(st.integers(0, 3))
    packed = draw(st.booleans()) and batch > 0
    if packed:
        lengths_q = draw(st.lists(seqlens, min_size=batch, max_size=batch))
        lengths_k = draw(st.lists(seqlens, min_size=batch, max_size=batch))
        seqlen_q, seqlen_k = max(lengths_q), max(lengths_k)
        sizes |= dict(
            seqlen_q=sum(lengths_q), seqlen_k=sum(lengths_k), cu_seqlens_q=cumulative(lengths_q, device),
            cu_seqlens_k=cumulative(lengths_k, device), max_seqlen_q=seqlen_q, max_seqlen_k=seqlen_k,
        )  # fmt: skip
    else:
        seqlen_q, seqlen_k = draw(seqlens), draw(seqlens)
        lengths_q, lengths_k = [seqlen_q] * batch, [seqlen_k] * batch
        sizes |= dict(batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    for name, lengths in (("seqused_q", lengths_q), ("seqused_k", lengths_k)):
        if draw(st.integers(0, 3)) == 0:
            sizes[name] = int32([draw(st.integers(0, n)) for n in lengths], device)
    call = make_call(**sizes, **draw(score_options((batch, sizes["heads_q"], seqlen_q, seqlen_k), device)))
    if draw(st.integers(0, 3)) == 0:
        call = with_block_mask(draw, call, (batch, sizes["heads_q"], seqlen_q, seqlen_k))
    if draw(st.booleans()):
        call.q, call.k, call.v = (t.transpose(0, -2).contiguous().transpose(0, -2) for t in (call.q, call.k, call.v))
    wanted = tuple(name for name in call.inputs() if draw(st.booleans()))
    return call, wanted


def with_block_mask(draw: st.DrawFn, call: Call, shape: tuple[int, int, int, int]) -> Call:
    if not all(shape):
        return call
    block_m, block_n = draw(st.sampled_from([16, 64, 128])), draw(st.sampled_from([32, 64, 128]))
    batch, heads = (n if draw(st.booleans()) else 1 for n in shape[:2])
    kind = torch.randint(0, 3, (batch, heads, -(-shape[2] // block_m), -(-shape[3] // block_n)))
    kind = kind.repeat_interleave(block_m, 2).repeat_interleave(block_n, 3)[:, :, : shape[2], : shape[3]]
    see = ((kind == 2) | ((kind == 1) & (torch.rand(kind.shape) < 0.5))).to(call.q.device)
    tensors = reference.block_mask_tensors(see, block_m, block_n)
    call = call.with_options(block_mask=flash_ext.BlockMask(*tensors, seqlen_q=shape[2], seqlen_k=shape[3]))
    call.block_visible = see
    return call


def check_attention(data: st.DataObject, device: str) -> None:
    call, wanted = data.draw(attention_calls(device))
    assert_matches_oracle(call, wanted)


def check_decode(data: st.DataObject, device: str) -> None:
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 2**32 - 1)))
    batch, seqlen_cache, seqlen_new = draw(st.integers(1, 4)), draw(st.integers(1, 300)), draw(st.integers(0, 4))
    seqlen_new = min(seqlen_new, seqlen_cache)
    group, heads_kv = draw(st.sampled_from([(1, 1), (1, 3), (4, 1), (3, 2)]))
    lengths = [draw(st.integers(0, seqlen_cache - seqlen_new)) for _ in range(batch)]
    call = make_decode(
        batch, draw(st.integers(1, 6)), seqlen_cache, group * heads_kv, heads_kv, draw(head_dims), draw(head_dims),
        seqlen_new, draw(st.sampled_from(dtypes_of(device))), device, cache_seqlens=int32(lengths, device),
        window_left=draw(sizes_of_window), window_right=draw(sizes_of_window), softmax_scale=0.2,
        num_splits=draw(st.integers(0, 6)),
    )  # fmt: skip
    if draw(st.booleans()):
        call.options["cache_leftpad"] = int32([draw(st.integers(0, n)) for n in lengths], device)
        fill_unused_rows(call, torch.nan)
    if draw(st.booleans()):
        call.options["sink"] = random(group * heads_kv, device=device)
    if draw(st.booleans()):
        call.options["alibi_slopes"] = torch.rand(group * heads_kv, device=device) * 0.2
    if draw(st.booleans()):
        call = paged(call, draw(st.integers(1, 70)))
    assert_decode_matches(call)


@QUICK
@given(data=st.data())
def test_attention(device: str, data: st.DataObject) -> None:
    check_attention(data, device)


@QUICK
@given(data=st.data())
@pytest.mark.op("attention_decode_append")
def test_decode(device: str, data: st.DataObject) -> None:
    check_decode(data, device)


@pytest.mark.slow
@PARTS
@LONG
@given(data=st.data())
def test_attention_at_length(device: str, part: int, data: st.DataObject) -> None:
    check_attention(data, device)


@pytest.mark.slow
@PARTS
@LONG
@given(data=st.data())
@pytest.mark.op("attention_decode_append")
def test_decode_at_length(device: str, part: int, data: st.DataObject) -> None:
    check_decode(data, device)
