"""NaN and Inf in keys and values that nobody sees reach no output and no gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flash_ext
from tests.oracle import FLOATS, Call, assert_matches_oracle, cumulative, int32, make_call, run_library


def by_window(call: Call) -> tuple[Call, Any]:
    """Top-left causal with fewer queries than keys: the last keys are seen by nobody."""
    return call.with_options(causal=True, top_left=True), (slice(None), slice(33, None))


def by_left_window(call: Call) -> tuple[Call, Any]:
    return call.with_options(window_size=(4, -1)), (slice(None), slice(0, 10))


def by_key_mask(call: Call) -> tuple[Call, Any]:
    mask = torch.ones(2, 1, 1, 47, dtype=torch.bool, device=call.q.device)
    mask[0, ..., 5:9] = mask[0, ..., 40:] = False
    return call.with_options(mask=mask), (0, [*range(5, 9), *range(40, 47)])


def by_full_mask(call: Call) -> tuple[Call, Any]:
    mask = torch.rand(2, 4, 33, 47, device=call.q.device) < 0.7
    mask[1, :2, :, 20:30] = False  # both query heads of the first kv head
    return call.with_options(mask=mask), (1, slice(20, 30), 0)


def by_length(call: Call) -> tuple[Call, Any]:
    return call.with_options(seqused_k=int32([47, 13], str(call.q.device))), (1, slice(13, None))


HIDDEN = {f.__name__: f for f in (by_window, by_left_window, by_key_mask, by_full_mask, by_length)}


@pytest.mark.parametrize("hide", HIDDEN.values(), ids=HIDDEN.keys())
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf], ids=str)
def test_hidden_keys_and_values(device: str, dtype: torch.dtype, hide: Any, poison: float) -> None:
    call, hidden = hide(make_call(dtype=dtype, device=device))
    call.k[hidden] = call.v[hidden] = poison
    result = assert_matches_oracle(call)
    assert (result["dk"][hidden] == 0).all() and (result["dv"][hidden] == 0).all()


def test_a_key_of_the_future_does_not_reach_earlier_rows(device: str, dtype: torch.dtype) -> None:
    """Not even when it shares a tile with them."""
    call = make_call(1, 40, 40, dtype=dtype, device=device, causal=True)
    before = run_library(call)
    call.k[:, 30] = torch.nan
    after = run_library(call)
    torch.testing.assert_close(after["out"][:, :30], before["out"][:, :30])
    torch.testing.assert_close(after["lse"][:, :, :30], before["lse"][:, :, :30])
    assert after["lse"][:, :, 30:].isnan().all()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf], ids=str)
def test_a_value_of_the_future_does_not_reach_earlier_rows(device: str, poison: float) -> None:
    """0 * NaN is NaN: rows that do not see the value must not multiply it."""
    q, k, v = (torch.randn(1, 40, 2, 16, device=device) for _ in range(3))
    before = flash_ext.attention(q, k, v, causal=True)
    v[:, 30, :, 3] = poison
    after = flash_ext.attention(q, k, v, causal=True)
    torch.testing.assert_close(after[:, :30], before[:, :30])
    assert not after[:, 30:, :, 3].isfinite().any()
    torch.testing.assert_close(after[:, 30:, :, :3], before[:, 30:, :, :3])


# Two kernels of Hopper. In one, tiles begin with the first query that sees the keys: the last one is short or not, and
# may run past the sequence's rows of scratch memory.
@pytest.mark.parametrize(
    ("length", "window"),
    [
        (192, {"causal": True}),
        (200, {"causal": True}),
        (420, {"causal": True}),
        (450, {"causal": True}),
        (480, {"causal": True}),
        (384, {"window_size": (-1, 8)}),
        (384, {"window_size": (-1, 8), "top_left": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("more_keys", [0, 16])
@pytest.mark.parametrize("option", [None, "ALiBi"])
@pytest.mark.parametrize("of", ["all", "the gradient of out"])  # whose lse is NaN, or finite
def test_the_next_packed_sequence(
    device: str, dtype: torch.dtype, length: int, window: dict[str, Any], more_keys: int, option: str | None, of: str
) -> None:
    """Tiles of queries that run past the end of a sequence hold rows of the next one, or rows without an lse."""
    ends = {"q": length, "k": length + more_keys, "v": length + more_keys, "grad_out": length}
    tensors = {name: torch.randn(end + 100, 4, 64, dtype=dtype, device=device) for name, end in ends.items()}
    lengths = {f"cu_seqlens_{x}": int32([0, ends[x], ends[x] + 100], device) for x in "qk"}
    slopes = torch.full((4,), 0.1, device=device) if option else None

    def gradients() -> list[torch.Tensor]:
        inputs = [tensors[name].clone().requires_grad_() for name in "qkv"]
        out = flash_ext.attention(*inputs, **lengths, max_seqlen_q=length, **window, alibi_slopes=slopes)
        found = torch.autograd.grad(out, inputs, tensors["grad_out"])
        return [x[: ends[name]] for x, name in zip(found, "qkv", strict=True)]

    before = gradients()
    for name in ends if of == "all" else ["grad_out"]:
        tensors[name][ends[name] :] = torch.nan
    torch.testing.assert_close(gradients(), before)


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf], ids=str)
def test_values_that_tiles_show_in_part(device: str, poison: float, head_dim: int) -> None:
    """In each of some tiles of a window one value is not finite: who sees it gets that, the others do not."""
    left, right, seqlen = 150, 20, 400
    q, k, v = (torch.randn(2, seqlen, 2, head_dim, device=device) for _ in range(3))
    before = flash_ext.attention(q, k, v, window_size=(left, right))
    poisoned = {5: 0, 130: 1, 260: head_dim - 1}  # column by key
    row = torch.arange(seqlen, device=device)
    touched = torch.zeros(seqlen, head_dim, dtype=torch.bool, device=device)
    for key, column in poisoned.items():
        v[:, key, :, column] = poison
        touched[:, column] = (row - left <= key) & (key <= row + right)
    after = flash_ext.attention(q, k, v, window_size=(left, right))
    shown = touched[None, :, None].expand_as(after)
    assert not after[shown].isfinite().any()
    torch.testing.assert_close(after[~shown], before[~shown])


@pytest.mark.parametrize("strides", ["contiguous", "heads of q with a stride of 0"])
@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
def test_values_that_a_mask_alone_hides(device: str, dtype: torch.dtype, strides: str) -> None:
    """In tiles that no window and no length cuts; a stride of 0 goes to other kernels on Hopper."""
    q, k, v = (torch.randn(1, 300, 2, 64, device=device, dtype=dtype) for _ in range(3))
    if strides != "contiguous":
        q = q[:, :, :1].expand(-1, -1, 2, -1)
    mask = torch.ones(1, 1, 300, 300, dtype=torch.bool, device=device)
    hidden = [5, 70, 140, 290]
    mask[..., hidden] = False
    before = flash_ext.attention(q, k, v, mask=mask)
    v[:, hidden] = torch.nan
    torch.testing.assert_close(flash_ext.attention(q, k, v, mask=mask), before)


def test_gaps_between_packed_tensors(device: str, dtype: torch.dtype) -> None:
    call = make_call(seqlen_q=20, seqlen_k=30, dtype=dtype, device=device, cu_seqlens_q=cumulative([8, 12], device),
                     cu_seqlens_k=cumulative([9, 21], device), seqused_k=int32([4, 20], device),
                     seqused_q=int32([8, 5], device))  # fmt: skip
    hidden = [*range(4, 9), 29]
    call.k[hidden] = call.v[hidden] = torch.nan
    call.q[13:] = torch.nan
    assert_matches_oracle(call)


def test_memory_around_the_tensors(device: str, dtype: torch.dtype) -> None:
    """What lies before, between and behind the rows is never read into a result."""
    call = make_call(dtype=dtype, device=device)
    for name in "qkv":
        t = getattr(call, name)
        arena = torch.full((t.shape[0] + 2, t.shape[1] + 70, t.shape[2] + 2, t.shape[3] + 64), torch.nan, device=device)
        view = arena[1:-1, 3 : 3 + t.shape[1], 1:-1, 16 : 16 + t.shape[3]]
        view.copy_(t)
        setattr(call, name, view)
    assert_matches_oracle(call)


def test_nan_in_a_visible_value_does_reach_the_output(device: str, dtype: torch.dtype) -> None:
    """Hiding is by selection, not by replacing every NaN."""
    call = make_call(1, 5, 7, dtype=dtype, device=device)
    call.v[:, 3] = torch.nan
    assert run_library(call)["out"].isnan().all()
    call.v[:, 3], call.q[:, 2] = 0.0, torch.nan
    result = run_library(call)
    assert result["out"][:, 2].isnan().all() and not result["out"][:, [0, 1, 3, 4]].isnan().any()
