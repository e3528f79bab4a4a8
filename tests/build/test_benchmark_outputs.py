"""The measuring tool looks at what it times: wrong outputs end a run, or leave a peer out."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_ext
from benchmarks import (
    checks,
    decode,
    option_calls,
    options,
    peers,
    report,
)
from benchmarks.checks import Expected, OnAverage, WrongOutput
from benchmarks.comparison import Comparison
from benchmarks.peers import OURS, Peer, sdpa, sdpa_decode
from benchmarks.timing import Candidate, CpuClock
from tests import oracle
from tests.build.benchmark_runs import COMMANDS, chosen, run

pytestmark = pytest.mark.usefixtures("small_ceilings")


def off_by_a_percent(*args: Tensor, **options: object) -> Tensor:
    out = original_attention(*args, **options)
    assert isinstance(out, Tensor)
    return out * 1.01


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient * 1.01


original_attention, original_decode = flash_ext.attention, flash_ext.decode


@pytest.mark.parametrize("benchmark", ["forward", "backward", "training", "shapes", "options", "memory", "host"])
def test_wrong_output_ends_the_run(benchmark: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(flash_ext, "attention", off_by_a_percent)
    with pytest.raises(WrongOutput, match="out is off by"):
        run(benchmark, "--json", str(tmp_path / "run.json"))
    assert not (tmp_path / "run.json").exists()


@pytest.mark.parametrize("benchmark", ["backward", "shapes", "options", "memory", "host"])
def test_wrong_gradient_ends_the_run(benchmark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def attention(q: Tensor, *args: Tensor, **options: object) -> object:
        return original_attention(WrongGradient.apply(q), *args, **options)

    monkeypatch.setattr(flash_ext, "attention", attention)
    with pytest.raises(WrongOutput, match="dq is off by"):
        run(benchmark)


def test_wrong_decode_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_ext, "decode", lambda *args, **options: original_decode(*args, **options) * 1.01)
    with pytest.raises(WrongOutput, match="out is off by"):
        run("decode")


def test_zeros_are_noticed_where_the_result_is_small(dtype: torch.dtype) -> None:
    call = oracle.Call(*(torch.randn(1, 2048, 1, 16, dtype=dtype) for _ in range(3)))
    with pytest.raises(WrongOutput):
        Expected(call).check("zeros", {"out": torch.zeros(1, 2048, 1, 16, dtype=dtype)})


def test_nan_in_a_head_that_is_not_compared() -> None:
    call = oracle.Call(*(torch.randn(1, 8, 3, 16) for _ in range(3)))
    out = original_attention(call.q, call.k, call.v)
    assert isinstance(out, Tensor)
    out[0, 3, 1] = torch.nan
    with pytest.raises(WrongOutput, match="not finite"):
        Expected(call).check("nan", {"out": out})


WINDOW = {"window_size": (9, 3)}


@pytest.mark.parametrize("options", [{}, {"causal": True}, WINDOW, {**WINDOW, "causal": True}])
def test_reference_in_chunks(options: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    assert_reference_alike(random_call((2, 50), (2, 50), options), 2 * 2 * 50 * 7, monkeypatch)


@pytest.mark.parametrize("options", [{}, WINDOW, {"causal": True}])
def test_reference_of_block_masks_in_chunks(options: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    call = random_call((2, 64), (2, 64), options)
    mask = flash_ext.BlockMask.from_blocks(torch.rand(4, 2) < 0.5, 64, 64, (16, 32))
    call = dataclasses.replace(call.with_options(block_mask=mask), block_visible=mask.to_dense())
    assert_reference_alike(call, 2 * 2 * 64 * 7, monkeypatch)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [((3, 9, 0, 3), (3, 9, 4, 3)), ((5, 5, 2), (7, 5, 7)), ((9, 2), (4, 2))], ids=str)
def test_reference_of_packs(
    causal: bool, lengths: tuple[tuple[int, ...], tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where lengths differ, and where a sequence has more queries than keys, or rows belong to none."""
    ends = [oracle.cumulative(of) for of in lengths]
    options = {"causal": causal, "cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1]}
    call = random_call((int(ends[0][-1]) + 2,), (int(ends[1][-1]) + 3,), options)
    assert_reference_alike(call, 2 * 7 * 3, monkeypatch, in_chunks=all(q <= k for q, k in zip(*lengths, strict=True)))


def random_call(lead_q: tuple[int, ...], lead_k: tuple[int, ...], options: dict[str, object]) -> oracle.Call:
    q, grad = (torch.randn(*lead_q, 2, 16, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(*lead_k, 1, 16, dtype=torch.float64) for _ in range(2))
    return oracle.Call(q, k, v, dict(options), grad_out=grad)


def assert_reference_alike(
    call: oracle.Call, chunk_scores: int, monkeypatch: pytest.MonkeyPatch, in_chunks: bool = True
) -> None:
    """What candidates are held against is what the oracle of the tests says, who has all scores in memory."""
    whole = oracle.run_reference(call, torch.float64, ("q", "k", "v"))
    if in_chunks:
        monkeypatch.setattr(oracle, "run_reference", None)
    monkeypatch.setattr(checks, "CHUNK_SCORES", chunk_scores)
    found = checks._run(call, torch.float64, ("q", "k", "v"))
    assert set(found) == {"out", "dq", "dk", "dv"}
    for name, value in found.items():
        torch.testing.assert_close(value, whole[name])


def test_wrong_peer_is_left_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = Peer("wrong", lambda q, k, v, causal: sdpa(q, k, v, causal) * 1.01, sdpa_decode)
    monkeypatch.setitem(peers.PEERS, "sdpa", lambda: wrong)
    assert run("forward") == 0
    captured = capsys.readouterr()
    assert "warning: sdpa: out is off by" in captured.err
    assert "- sdpa: not in forward" in captured.out and "math" in captured.out


def test_wrong_module_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    right = flash_ext.MultiheadAttention.forward

    def forward(*args: object, **options: object) -> object:
        out, weights = right(*args, **options)
        return out * 1.01, weights

    monkeypatch.setattr(flash_ext.MultiheadAttention, "forward", forward)
    with pytest.raises(WrongOutput, match="out is off by"):
        run("module")


def test_a_row_that_is_not_appended_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, **options: object) -> object:
        caches = (t.nan_to_num() if "k" in options else t for t in (k_cache, v_cache))
        return original_decode(q, *caches, **options)

    monkeypatch.setattr(flash_ext, "decode", attend)
    run("decode")
    with pytest.raises(WrongOutput, match="k_cache does not hold the new row"):
        run("decode", "--workloads", "append")


def test_a_call_that_spoils_the_next_is_noticed() -> None:
    class Stale(CpuClock):
        def repeatable(self, candidate: Candidate) -> Candidate:
            out = candidate()
            return Candidate(lambda: out)

    call = oracle.Call(*(torch.randn(1, 4, 1, 8) for _ in range(3)))
    attend = Candidate(lambda: original_attention(call.q, call.k, call.v))
    Comparison().add(OURS, attend, Expected(call), repeated_by=CpuClock(), required=True)
    with pytest.raises(WrongOutput):
        Comparison().add(OURS, attend, Expected(call), repeated_by=Stale(), required=True)


def test_dropout_is_right_on_average() -> None:
    torch.manual_seed(0)
    call = oracle.Call(*(torch.randn(2, 64, 2, 32) for _ in range(3)))
    expected = OnAverage(Expected(call))
    for p in (0.0, 0.3):
        out = original_attention(call.q, call.k, call.v, dropout_p=p)
        assert isinstance(out, Tensor)
        expected.check("right", {"out": out})
    with pytest.raises(WrongOutput, match=r"out is 0\.\d+ times what is expected on average"):
        expected.check("not scaled", {"out": 0.7 * out})


def test_every_workload_of_decoding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = partial(peers._flash_attn_package, "a package", "flash_ext", "of-nobody", "no.module")
    monkeypatch.setitem(peers.PEERS, "flash_attn", package)
    monkeypatch.setattr(peers, "NEEDS_CUDA", frozenset())
    file = tmp_path / "run.json"
    asked = ["--workloads", *decode.WORKLOADS, "--peers", "sdpa", "flash_attn", "--json", str(file)]
    run("decode", "--dtype", "float32", "bfloat16", *asked)
    measured = {kept.table.rpartition(", ")[2]: set(kept.measured) for kept in report.read(file).rows}
    assert {"ragged", "append", "rotary"} < set(measured) and len(measured) == 4
    assert all({OURS, "flash_attn"} <= names for names in measured.values()), measured
    assert "sdpa" in measured["append"] and "sdpa" not in measured["ragged"] | measured["rotary"]


def test_default_rows_of_decoding() -> None:
    found = decode.problems(chosen("decode"))
    assert {p.workload for p in found} == set(decode.WORKLOADS)
    assert any(p.head_dim == 256 and p.heads_q > p.heads_kv for p in found)
    assert len(set(found)) == len(found)
    asked = decode.problems(chosen("decode", "--contexts", "1x512", "--heads", "4/2", "--workloads", "append"))
    assert asked == [decode.Problem(1, 512, 4, 2, 128, "bfloat16", "append")]


def test_options_of_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = partial(peers._flash_attn_package, "a package", "flash_ext", "of-nobody", "no.module")
    monkeypatch.setitem(peers.PEERS, "flash_attn", package)
    assert names_of_options_with("flash_attn", monkeypatch, tmp_path / "run.json") == {
        "plain", "softcap", "ALiBi", "dropout 0.1", "causal", "window 4", "varlen, even", "varlen, uneven",
        "varlen, short", "varlen, one long", "varlen, 64 short", "varlen, one of 512 beside 63 of 16", "deterministic",
        "deterministic, causal", "deterministic, varlen, uneven",
    }  # fmt: skip


def test_flex_attention_takes_smaller_tiles_where_its_own_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []

    def too_large(q: Tensor, *rest: Any, **options: Any) -> Tensor:
        given.append(options.get("kernel_options", {}))
        if not given[-1]:
            raise RuntimeError("No valid triton configs. OutOfMemoryError: out of resource")
        return q

    monkeypatch.setattr(option_calls, "flex_attention", lambda: too_large)
    q = torch.zeros(1, 8, 2, 16)
    attend = option_calls.flex_plain(False, tuple(q.shape), tuple(q.shape), "cpu")
    for _ in range(2):
        attend({"q": q, "k": q, "v": q})
    assert given == [{}, option_calls.FLEX_SMALLER, option_calls.FLEX_SMALLER]


def test_options_of_flex_attention(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(option_calls, "flex_attention", lambda: flex_attention)  # compiling takes minutes
    forward = ("--directions", "forward")  # it has no backward on a CPU
    assert names_of_options_with("flex", monkeypatch, tmp_path / "run.json", *forward) == {
        "plain", "bias (1, h, q, k)", "bias (1, 1, q, k)", "bias (b, 1, 1, k)", "mask (1, 1, q, k)",
        "mask (b, 1, 1, k)", "padding (b, 1, 1, k), up to half", "softcap",
        "ALiBi", "causal", "window 4", "block mask, window 4", "block mask, all blocks",
    }  # fmt: skip


def test_dense_masks_of_long_sequences_are_not_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file, reason = tmp_path / "run.json", "torch SDPA is not asked with dense masks of more than 1000 pairs"
    monkeypatch.setattr(option_calls, "MADE_DENSE_LIMIT", 1000)
    run("sparse", "--directions", "forward", "--json", str(file))
    assert {kept.missing.get("sdpa") for kept in report.read(file).rows} == {reason}
    run("options", "--only", "mask (1", "bias (1", "causal", "--directions", "forward", "--json", str(file))
    assert all("sdpa" in kept.measured for kept in report.read(file).rows)


def names_of_options_with(peer: str, monkeypatch: pytest.MonkeyPatch, file: Path, *more: str) -> set[str]:
    """Of those that the peer takes part in, in all directions that they have."""
    monkeypatch.setattr(peers, "NEEDS_CUDA", frozenset())
    run("options", "--peers", peer, "--json", str(file), *more)
    rows = report.read(file).rows
    taken = {kept.label for kept in rows if peer in kept.measured}
    assert not taken & {kept.label for kept in rows if peer in kept.missing}
    return taken


def test_packed_sequences_are_checked_up_to_some() -> None:
    lengths = [5, 3, 9, 4]
    call = dataclasses.replace(oracle.make_varlen_call(lengths, lengths).with_random_gradients(), grad_lse=None)
    result = oracle.run_library(call, ("q", "k", "v"))
    expected = Expected(call, ("q", "k", "v"), batch_entries=2)
    del result["lse"]
    result["out"][8:], result["dk"][8:] = 3.0, 3.0
    expected.check("right in the first two", result)
    for name in ("out", "dk"):
        wrong = {**result, name: result[name].clone()}
        wrong[name][7] = 3.0
        with pytest.raises(WrongOutput, match=f"{name} is off"):
            expected.check("wrong", wrong)


def test_selected_options(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    run("options", "--only", "softcap", "plain", "--directions", "forward", "--json", str(file))
    plain, softcap = report.read(file).rows
    assert plain.label == options.PLAIN and plain.figures["% cost"] == 0
    assert softcap.label == "softcap" and softcap.figures["% cost"] != 0


def test_peer_that_cannot_is_left_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def cannot(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
        raise RuntimeError("no kernel for this\nand a long explanation")

    monkeypatch.setitem(
        peers.PEERS, "sdpa", lambda: Peer("cannot", cannot, lambda step: partial(cannot, *[step.q] * 3))
    )
    assert run("decode") == 0
    assert "no kernel for this" in capsys.readouterr().out


@pytest.mark.parametrize("benchmark", sorted(set(COMMANDS) - {"encoder", "masks", "models"}))  # none asks
def test_peers_alone_where_ours_is_not_supported(
    benchmark: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(flash_ext, "supports", lambda *args, **options: (False, "not yet"))
    assert run(benchmark, "--json", str(tmp_path / "run.json")) == 0
    assert "not yet" in capsys.readouterr().out
    for kept_row in report.read(tmp_path / "run.json").rows:
        assert kept_row.missing[OURS] == "not yet"
        assert not any(name.startswith(OURS) for name in kept_row.measured)


def test_ours_that_fails_ends_the_run() -> None:
    def fails() -> None:
        raise RuntimeError("broken")

    call = oracle.Call(*(torch.randn(1, 4, 1, 8) for _ in range(3)))
    with pytest.raises(RuntimeError, match="broken"):
        Comparison().add(OURS, Candidate(fails), Expected(call), required=True)
