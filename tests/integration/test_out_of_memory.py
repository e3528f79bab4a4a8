"""Memory that is not there: the error has the class and the text of torch's own, as programs that try again expect."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flash_ext

OPS = torch.ops.flash_ext
# One float for each row and head takes more bytes than an address space has: some machines promise more memory than
# there is.
BATCH, ROWS, HEADS, DIM = 2**13, 2**20, 2**14, 8


def is_torchs_error(error: BaseException, device: str) -> bool:
    """As accelerate, Lightning and transformers recognise it: by the class, or by the text of a RuntimeError."""
    if device == "cuda":
        return type(error) is torch.OutOfMemoryError and str(error).startswith("CUDA out of memory. Tried to allocate")
    return type(error) is RuntimeError and "DefaultCPUAllocator: can't allocate memory" in str(error)


def endless(device: str, rows: int = ROWS) -> Tensor:
    """(batch, rows, heads, dim), of one element."""
    return torch.zeros(1, 1, 1, DIM, device=device).expand(BATCH, rows, HEADS, DIM)


def by_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def forward(q: Tensor, k: Tensor) -> Any:
    return flash_ext.attention(q, k, k)


def backward(q: Tensor, k: Tensor) -> Any:
    lse = torch.zeros(1, 1, 1, device=q.device).expand(BATCH, HEADS, ROWS)
    flags = (True, False, False, False, False)
    return OPS.attention_backward(q, None, q, k, k, q, lse, False, *flags, 1.0)


def weights(q: Tensor, k: Tensor) -> Any:
    return flash_ext.attention_weights(q, k, torch.zeros(1, 1, 1, device=q.device).expand(BATCH, HEADS, ROWS))


def sdpa(q: Tensor, k: Tensor) -> Any:
    with flash_ext.activated():
        return F.scaled_dot_product_attention(by_heads(q), by_heads(k), by_heads(k))


def sdpa_with_a_mask(q: Tensor, k: Tensor) -> Any:
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=q.device)
    with flash_ext.activated():
        return F.scaled_dot_product_attention(by_heads(q), by_heads(k), by_heads(k), mask)


def decode(q: Tensor, k: Tensor) -> Any:
    return flash_ext.decode(q, k, k)


def merge(q: Tensor, k: Tensor) -> Any:
    return OPS.merge(q[None], torch.zeros(1, 1, 1, 1, device=q.device).expand(1, BATCH, HEADS, ROWS))


def add_layer_norm(q: Tensor, k: Tensor) -> Any:
    return OPS.add_layer_norm(q, q, None, None, 1e-5, True)


CALLS = [forward, backward, weights, sdpa, sdpa_with_a_mask, decode, merge, add_layer_norm]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_error_is_torchs(device: str, call: Callable[[Tensor, Tensor], Any]) -> None:
    with pytest.raises(RuntimeError) as raised:
        call(endless(device), endless(device, 1))
    assert is_torchs_error(raised.value, device), repr(raised.value)


@pytest.mark.parametrize(
    ("module", "function"),
    [
        ("accelerate.utils.memory", "should_reduce_batch_size"),
        ("lightning.pytorch.utilities.memory", "is_oom_error"),
    ],
)
def test_libraries_recognise_it(device: str, module: str, function: str) -> None:
    """Trainers that look for a batch size that fits go on with a smaller one."""
    recognises = getattr(pytest.importorskip(module), function)
    for call in CALLS:
        with pytest.raises(RuntimeError) as raised:
            call(endless(device), endless(device, 1))
        assert recognises(raised.value), call.__name__


def test_what_fits_by_now_is_allocated(device: str) -> None:
    """The second attempt, in Python, may succeed: another thread has freed memory, or Python its garbage."""
    like = torch.zeros(1, device=device)
    found, exception = torch.ops.flash_ext_python.empty_strided(like, [2, 3], [1, 2], torch.float16)
    assert exception.numel() == 0
    assert (found.shape, found.stride(), found.dtype, found.device) == ((2, 3), (1, 2), torch.float16, like.device)


# ---- A program that tries again with less ---------------------------------------------------------------------------

ROWS_OF_A_STEP = 2**17
SLACK = 8 << 20  # bytes that Python and an exception need, on a CPU


@contextmanager
def limited_memory(num_bytes: int, device: str) -> Iterator[None]:
    """So much memory may be reserved beside what is."""
    if device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + num_bytes) / total)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        return
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def fill_reserved_memory(device: str) -> list[Tensor]:
    """What torch's allocator or malloc keeps although it is free, because something else beside it is in use."""
    filled: list[Tensor] = []
    with limited_memory(0 if device == "cuda" else SLACK, device):
        for megabytes in (256, 64, 16, 4, 2) if device == "cuda" else (256, 64, 16):
            try:
                while True:
                    filled.append(torch.empty(megabytes << 20, dtype=torch.uint8, device=device))
            except RuntimeError as error:
                if not is_torchs_error(error, device):
                    raise
    return filled


@contextmanager
def room_for(num_bytes: int, device: str) -> Iterator[None]:
    """So much memory may be allocated beside what is."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    filled = fill_reserved_memory(device)
    try:
        with limited_memory(num_bytes, device):
            yield
    finally:
        filled.clear()


def test_room_counts_what_is_kept(device: str) -> None:
    """Otherwise a test would find room in what tests before it have freed."""
    megabytes = 4 if device == "cuda" else 16  # torch's allocator on CUDA takes 20 at once for blocks of 4

    def blocks(count: int) -> list[Tensor]:
        return [torch.empty(megabytes << 20, dtype=torch.uint8, device=device) for _ in range(count)]

    torch.empty(31 << 20, dtype=torch.uint8, device=device)  # once it is freed, malloc takes such blocks from its heap
    kept = blocks(40)[::5]
    with room_for(2 * megabytes << 20, device):
        with pytest.raises(RuntimeError) as raised:
            blocks(20)
        assert is_torchs_error(raised.value, device), repr(raised.value)
    del kept


def attention_of(q: Tensor, k: Tensor) -> Tensor:
    out: Tensor = flash_ext.attention(q, k, k)
    return out


CALLERS: list[Callable[[Tensor, Tensor], Tensor]] = [attention_of, sdpa, sdpa_with_a_mask]


@pytest.mark.parametrize("call", CALLERS, ids=lambda call: call.__name__)
@pytest.mark.parametrize(("room", "place"), [(0.5, "forward"), (1.5, "backward")], ids=["forward", "backward"])
def test_a_step_with_less_follows(
    device: str, call: Callable[[Tensor, Tensor], Tensor], room: float, place: str
) -> None:
    """On CUDA, the backward runs in a thread of torch's own."""
    dtype = torch.float32 if device == "cpu" else torch.float16
    k = torch.randn(1, 1, 8, 64, device=device, dtype=dtype)

    def step(q: Tensor) -> None:
        out = call(q, k)
        out.backward(torch.ones((), device=device, dtype=dtype).expand(out.shape))

    whole = torch.zeros(1, ROWS_OF_A_STEP, 8, 64, device=device, dtype=dtype, requires_grad=True)
    part = torch.randn(1, 64, 8, 64, device=device, dtype=dtype, requires_grad=True)
    step(part)  # what the first call of a process allocates, threads included
    expected, part.grad = part.grad, None
    with room_for(int(room * whole.numel() * whole.element_size()), device):
        with pytest.raises(RuntimeError) as raised:
            step(whole)
        assert is_torchs_error(raised.value, device), repr(raised.value)
        frames = [entry.name for entry in raised.traceback]
        assert ("backward" in frames) == (place == "backward"), frames
        step(part)
    torch.testing.assert_close(part.grad, expected)
    step(whole)
