"""The same call gives the same bits: again, on other threads, from several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.decode_oracle import make_decode
from tests.oracle import (
    Call,
    Result,
    assert_matches_oracle,
    int32,
    make_call,
    make_varlen_call,
    random,
    random_rng,
    run_library,
)

RUNS = 30
BF16 = torch.bfloat16  # which Hopper has kernels of its own for


def demanding_call(device: str, dtype: torch.dtype) -> Call:
    """Several tiles, grouped heads, and gradients that sum over batch, heads and rows."""
    call = make_call(
        2, 200, 300, heads_q=4, heads_kv=2, dtype=dtype, device=device, causal=True,
        bias=random(1, 1, 1, 300, device=device), sink=random(4, device=device), dropout_p=0.1,
        rng_state=random_rng(device), deterministic=True,
    )  # fmt: skip
    return call.with_random_gradients()


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def bits(t: Tensor) -> Tensor:
    return t.view({2: torch.int16, 4: torch.int32}[t.element_size()])


def assert_same_bits(a: Result, b: Result) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(bits(a[name]), bits(b[name])), name


def test_repeated_runs(device: str, dtype: torch.dtype, threads: None) -> None:
    torch.set_num_threads(2)
    call = demanding_call(device, dtype)
    first = run_library(call, tuple(call.inputs()))
    for _ in range(RUNS):
        assert_same_bits(run_library(call, tuple(call.inputs())), first)


@pytest.mark.parametrize("head_dim", [8, 64, 96, 128, 192, 256])
def test_head_dims(device: str, head_dim: int, dtype: torch.dtype, threads: None) -> None:
    """On CUDA the CTAs of many tiles of keys add to the same dq, in a fixed order."""
    torch.set_num_threads(2)
    batch, seqlen_q, seqlen_k, runs = (1, 130, 300, 5) if device == "cpu" else (2, 390, 1500, 100)
    call = make_call(batch, seqlen_q, seqlen_k, 4, 2, head_dim, dtype=dtype, device=device, deterministic=True)
    call = call.with_random_gradients()
    first = run_library(call, ("q", "k", "v"))
    for _ in range(runs):
        assert_same_bits(run_library(call, ("q", "k", "v")), first)


MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "top_left": {"causal": True, "top_left": True},
    "window": {"window_size": (150, 30)},
    "open window": {"window_size": (150, -1)},
}


def assert_repeatable(call: Call) -> None:
    """The gradients of q, k and v are right, and have the same bits in many runs."""
    inputs = ("q", "k", "v")
    call = call.with_options(deterministic=True).with_random_gradients()
    first = assert_matches_oracle(call, inputs)
    for _ in range(2 if call.q.device.type == "cpu" else 100):
        assert_same_bits(run_library(call, inputs), first)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_masks_and_groups(device: str, head_dim: int, group: int, mask: dict[str, Any]) -> None:
    batch, seqlen_q, seqlen_k = (1, 130, 200) if device == "cpu" else (2, 900, 1100)
    assert_repeatable(make_call(batch, seqlen_q, seqlen_k, 4, 4 // group, head_dim, dtype=BF16, device=device, **mask))


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("group", [1, 4])
def test_more_tiles_of_keys_than_ctas_run_at_a_time(device: str, group: int, mask: dict[str, Any]) -> None:
    """Of head_dim 64, where a CTA takes one after the other on Hopper."""
    seqlen, heads_kv = (200, 1) if device == "cpu" else (2500, 8)
    assert_repeatable(make_call(1, seqlen, seqlen, group * heads_kv, heads_kv, 64, dtype=BF16, device=device, **mask))


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_queries_that_see_no_key(device: str, head_dim: int) -> None:
    """The first, the last or those of a packed sequence without keys. Nobody adds to their dq, and the call before has
    left its own in scratch memory."""
    seqlen_q, seqlen_k = (90, 40) if device == "cpu" else (900, 300)
    call = make_call(2, seqlen_q, seqlen_k, 4, 2, head_dim, dtype=BF16, device=device, deterministic=True)
    run_library(call.with_random_gradients(), ("q", "k", "v"))
    call = call.with_options(causal=True).with_random_gradients()
    result = assert_matches_oracle(call, ("q", "k", "v"))
    assert (result["dq"][:, : seqlen_q - seqlen_k] == 0).all()
    call = call.with_options(causal=False, window_size=(20, 0), top_left=True).with_random_gradients()
    result = assert_matches_oracle(call, ("q", "k", "v"))
    assert (result["dq"][:, seqlen_k + 20 :] == 0).all()
    lengths = ([seqlen_q, 7, seqlen_q], [seqlen_k, 0, 0])
    call = make_varlen_call(*lengths, device, head_dim=head_dim, heads_q=4, heads_kv=2, dtype=BF16, deterministic=True)
    result = assert_matches_oracle(call.with_random_gradients(), ("q", "k", "v"))
    assert (result["dq"][seqlen_q:] == 0).all()


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("inputs", ["q", "k", "v", "kv"], ids=str)
def test_some_gradients_alone(device: str, head_dim: int, inputs: str) -> None:
    call = make_call(1, 300, 400, 4, 2, head_dim, dtype=BF16, device=device, causal=True, deterministic=True)
    assert_matches_oracle(call.with_random_gradients(), tuple(inputs))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_packed_sequences(device: str, head_dim: int, causal: bool) -> None:
    lengths = [1, 70, 0, 150, 33] if device == "cpu" else [1, 700, 64, 0, 1500, 333, 128, 5]
    call = make_varlen_call(
        lengths, lengths, device, head_dim=head_dim, heads_q=8, heads_kv=2, dtype=BF16, causal=causal
    )
    assert_repeatable(call)
    assert_repeatable(call.with_options(max_seqlen_q=None, max_seqlen_k=None))


def key_padding(batch: int, heads: int, seqlen_k: int, device: str) -> Tensor:
    """Hides a tenth of the keys, and a range of them that each head has elsewhere, with whole tiles in it."""
    mask = torch.rand(batch, heads, 1, seqlen_k, device=device) < 0.9
    length = seqlen_k // 3
    for head in range(heads):
        mask[0, head, :, length // 2 + head * length // 4 :][..., :length] = False
    mask[1:, ..., seqlen_k - length :] = False
    return mask


def hiding_bias(batch: int, heads: int, seqlen_k: int, device: str) -> Tensor:
    bias = random(batch, heads, 1, seqlen_k, dtype=BF16, device=device)
    return bias.masked_fill(~key_padding(batch, heads, seqlen_k, device), -torch.inf)


def option(name: str, device: str, seqlen_q: int, seqlen_k: int) -> dict[str, Any]:
    makers: dict[str, Callable[[], dict[str, Any]]] = {
        "softcap": lambda: {"softcap": 20.0},
        "alibi": lambda: {"alibi_slopes": torch.rand(4, device=device)},
        "bias": lambda: {"bias": random(1, 4, seqlen_q, seqlen_k, dtype=BF16, device=device)},
        "per-key bias": lambda: {"bias": random(2, 1, 1, seqlen_k, dtype=BF16, device=device)},
        "dropout": lambda: {"dropout_p": 0.2, "rng_state": random_rng(device)},
        "sink": lambda: {"sink": random(4, device=device)},
        "mask": lambda: {"mask": torch.rand(2, 1, seqlen_q, seqlen_k, device=device) < 0.7},
        "key padding": lambda: {"mask": key_padding(2, 1, seqlen_k, device)},
        "key padding of heads": lambda: {"mask": key_padding(2, 4, seqlen_k, device)},
        "per-key bias of heads": lambda: {"bias": hiding_bias(2, 4, seqlen_k, device)},
    }
    return makers[name]()


OPTIONS = [
    "softcap",
    "alibi",
    "bias",
    "per-key bias",
    "dropout",
    "sink",
    "mask",
    "key padding",
    "per-key bias of heads",
]
# Beside which Hopper's own kernel adds to dq in turns at head_dim 128; the last one at no head_dim.
TOGETHER = [["bias", "key padding"], ["dropout", "key padding"], ["dropout", "key padding of heads"],
            ["bias", "key padding of heads"], ["softcap", "alibi", "bias"]]  # fmt: skip


def options_of(names: list[str], device: str, seqlen_q: int, seqlen_k: int) -> dict[str, Any]:
    return {k: v for name in names for k, v in option(name, device, seqlen_q, seqlen_k).items()}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("names", [*([name] for name in OPTIONS), *TOGETHER], ids="+".join)
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_options(device: str, head_dim: int, group: int, names: list[str], causal: bool) -> None:
    seqlen_q, seqlen_k = (90, 130) if device == "cpu" else (700, 1000)
    options = options_of(names, device, seqlen_q, seqlen_k)
    assert_repeatable(
        make_call(2, seqlen_q, seqlen_k, 4, 4 // group, head_dim, dtype=BF16, device=device, causal=causal, **options)
    )


@pytest.mark.parametrize("names", [*([name] for name in OPTIONS if name != "mask"), *TOGETHER[:-1]], ids="+".join)
@pytest.mark.parametrize("window_size", [(-1, -1), (-1, 0), (300, 40)], ids=str)
def test_options_of_many_tiles(device: str, window_size: tuple[int, int], names: list[str]) -> None:
    """More of keys than CTAs run at a time. CTAs wait for those before, also for those of which all keys are hidden."""
    seqlen, batch = (150, 2) if device == "cpu" else (2500, 2)
    options = options_of(names, device, seqlen, seqlen)
    assert_repeatable(
        make_call(batch, seqlen, seqlen, 4, 4, 128, dtype=BF16, device=device, window_size=window_size, **options)
    )


@pytest.mark.parametrize("option_of_heads", ["mask", "bias"])
def test_keys_that_heads_of_a_group_see_apart(device: str, option_of_heads: str) -> None:
    """With so many tiles of keys that a CTA has all heads of a group, and visits them again at each tile of queries."""
    seqlen_q, seqlen_k, heads_kv = (90, 150, 1) if device == "cpu" else (300, 2500, 16)
    make = {"mask": key_padding, "bias": hiding_bias}[option_of_heads]
    options = {option_of_heads: make(2, 2 * heads_kv, seqlen_k, device)}
    assert_repeatable(
        make_call(2, seqlen_q, seqlen_k, 2 * heads_kv, heads_kv, 128, dtype=BF16, device=device, **options)
    )


@pytest.mark.parametrize("hidden", [slice(0, 640), slice(256, 900), slice(600, None), slice(0, None)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_hidden_tiles_of_keys(device: str, dropout_p: float, causal: bool, hidden: slice) -> None:
    """Of which the gradients are 0, whatever stands there. CTAs that have nothing to add have turns all the same."""
    seqlen = 200 if device == "cpu" else 1100
    mask = torch.ones(2, 1, 1, seqlen, dtype=torch.bool, device=device)
    mask[1, ..., hidden] = False
    dropout = {"dropout_p": dropout_p, "rng_state": random_rng(device)} if dropout_p else {}
    call = make_call(2, seqlen, seqlen, 4, 2, 128, dtype=BF16, device=device, causal=causal, mask=mask, **dropout)
    for t in (call.k, call.v):
        t[1, hidden] = torch.nan
    assert_repeatable(call)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["softcap", "alibi", "dropout"])
def test_options_of_packed_sequences(device: str, name: str, causal: bool) -> None:
    lengths = [1, 70, 0, 150, 33] if device == "cpu" else [1, 700, 64, 0, 1500, 333, 128, 5]
    options = option(name, device, 0, 0)
    call = make_varlen_call(
        lengths, lengths, device, head_dim=128, heads_q=4, heads_kv=2, dtype=BF16, causal=causal, **options
    )
    assert_repeatable(call)
    assert_repeatable(call.with_options(max_seqlen_q=None, max_seqlen_k=None))


@pytest.mark.parametrize("inputs", ["q", "k", "v", "qk"], ids=str)
@pytest.mark.parametrize("names", [["softcap"], ["bias"], ["key padding"], ["dropout", "key padding"]], ids="+".join)
def test_some_gradients_alone_beside_options(device: str, names: list[str], inputs: str) -> None:
    options = options_of(names, device, 300, 400)
    call = make_call(2, 300, 400, 4, 2, 128, dtype=BF16, device=device, causal=True, deterministic=True, **options)
    assert_matches_oracle(call.with_random_gradients(), tuple(inputs))


@pytest.mark.parametrize("name", ["bias", "per-key bias", "per-key bias of heads"])
def test_the_gradient_of_a_bias(device: str, name: str) -> None:
    seqlen_q, seqlen_k = (90, 130) if device == "cpu" else (700, 1000)
    options = option(name, device, seqlen_q, seqlen_k)
    call = make_call(2, seqlen_q, seqlen_k, 4, 2, 128, dtype=BF16, device=device, deterministic=True, **options)
    call = call.with_random_gradients()
    inputs = ("q", "k", "v", "bias")
    first = assert_matches_oracle(call, inputs)
    for _ in range(2 if device == "cpu" else 20):
        assert_same_bits(run_library(call, inputs), first)


def test_the_global_switch_is_obeyed(device: str, dtype: torch.dtype) -> None:
    call = demanding_call(device, dtype)
    del call.options["deterministic"]
    torch.use_deterministic_algorithms(True)
    try:
        first = run_library(call, tuple(call.inputs()))
        for _ in range(5):
            assert_same_bits(run_library(call, tuple(call.inputs())), first)
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_number_of_threads_does_not_matter(dtype: torch.dtype, threads: None) -> None:
    call = demanding_call("cpu", dtype)
    results = []
    for count in (1, 2, 3, 8):
        torch.set_num_threads(count)
        results.append(run_library(call, tuple(call.inputs())))
    for result in results[1:]:
        assert_same_bits(result, results[0])


@pytest.mark.op("attention_decode")
def test_decoding(device: str, dtype: torch.dtype, threads: None) -> None:
    call = make_decode(
        4, 2, 700, dtype=dtype, device=device, cache_seqlens=int32([700, 3, 512, 0], device), window_right=0
    )
    for num_splits in (0, 1, 5):
        first = call.run(num_splits=num_splits)
        for count in (1, 2, 2):
            torch.set_num_threads(count)
            for got, want in zip(call.run(num_splits=num_splits), first, strict=True):
                assert torch.equal(bits(got), bits(want))


@pytest.mark.op("attention_decode")
def test_decoding_one_long_sequence(dtype: torch.dtype, threads: None) -> None:
    call = make_decode(1, 1, 8192, heads_q=1, heads_kv=1, dtype=dtype, device="cpu")
    results = []
    for count in (1, 8):
        torch.set_num_threads(count)
        results.append(call.run(num_splits=0))
    for one, eight in zip(*results, strict=True):
        assert torch.equal(bits(one), bits(eight))


def test_two_python_threads_at_once(device: str, dtype: torch.dtype) -> None:
    calls = [
        make_call(1, 90 + 7 * n, 120, dtype=dtype, device=device, causal=True).with_random_gradients() for n in range(4)
    ]
    expected = [run_library(call, ("q", "k", "v")) for call in calls]
    failures: list[BaseException] = []

    def work(n: int) -> None:
        try:
            for _ in range(20):
                assert_same_bits(run_library(calls[n], ("q", "k", "v")), expected[n])
        except BaseException as error:  # a thread's failure is the test's
            failures.append(error)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures, failures[0]
