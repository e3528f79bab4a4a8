"""Threads that call the library at the same time, with options that ask the same kernels for different things."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

import flash_ext
from tests.oracle import int32, random

NUM_THREADS = 8
CALLS = {"cpu": 2000, "cuda": 20_000}  # of all threads

Run = Callable[[], tuple[Tensor, ...]]


def gradients(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in (q, k, v, bias) if t is not None]
    out = flash_ext.attention(*leaves[:3], bias=leaves[3] if bias is not None else None, deterministic=True)
    return out.detach(), *torch.autograd.grad(out.sum(), leaves)


def mixed_calls(device: str) -> list[Run]:
    """Biases take shared memory by their dtype, so that one kernel is launched with different amounts of it."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16) + (() if device != "cpu" else (torch.float64,))
    calls: list[Run] = []

    def add(run: Callable[..., Tensor | tuple[Tensor, ...]], *tensors: Tensor, **options: object) -> None:
        def call() -> tuple[Tensor, ...]:
            result = run(*tensors, **options)
            return result if isinstance(result, tuple) else (result,)

        calls.append(call)

    for dtype in dtypes:
        for head_dim in (64, 128, 256):
            q, k, v = (random(1, n, 1, head_dim, dtype=dtype, device=device) for n in (64, 96, 96))
            add(flash_ext.attention, q, k, v)
            add(flash_ext.attention, q, k, v, softcap=5.0, causal=True)
            add(gradients, q, k, v)
            add(flash_ext.decode, q[:, :1], k, v, cache_seqlens=int32([70], device), num_splits=2)
            for bias_dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
                bias = random(1, 1, 64, 96, dtype=bias_dtype, device=device)
                add(flash_ext.attention, q, k, v, bias=bias)
                add(gradients, q, k, v, bias)
            mask = torch.rand(1, 1, 64, 96, device=device) < 0.8
            add(flash_ext.attention, q, k, v, mask=mask)
            rng = torch.tensor([3, 5], device=device)
            add(flash_ext.attention, q, k, v, dropout_p=0.3, rng_state=rng)
            add(flash_ext.attention, q, k, v, dropout_p=0.3, rng_state=rng, mask=mask)
    return calls


def stream_of(device: str) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if device == "cpu" else torch.cuda.stream(torch.cuda.Stream(device))


def call_all(device: str, calls: list[Run], expected: list[tuple[Tensor, ...]], first: int, count: int) -> list[str]:
    """Of `count` calls from number `first` on, those that fail or find something else than before."""
    failures = []
    with stream_of(device):
        for n in range(first, first + count):
            number = n * 7919 % len(calls)  # a prime: threads go through them in different order
            try:
                results = calls[number]()
                if not all(torch.equal(a, b) for a, b in zip(results, expected[number], strict=True)):
                    failures.append(f"call {number}: another result")
            except RuntimeError as error:
                failures.append(f"call {number}: {error}")
    return failures


def test_threads_that_call_at_the_same_time(device: str) -> None:
    """On two devices where there are two."""
    places = [device] if device == "cpu" else [f"cuda:{n}" for n in range(min(torch.cuda.device_count(), 2))]
    calls = {place: mixed_calls(place) for place in places}
    expected = {place: [call() for call in calls[place]] for place in places}
    if device == "cuda":
        for place in places:
            torch.cuda.synchronize(place)
    count = CALLS[device] // NUM_THREADS
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        futures = [
            pool.submit(call_all, place, calls[place], expected[place], thread * 31, count)
            for thread in range(NUM_THREADS)
            for place in [places[thread % len(places)]]
        ]
        failures = [failure for future in futures for failure in future.result()]
    assert not failures, f"{len(failures)} of {count * NUM_THREADS} calls: {sorted(set(failures))[:5]}"
