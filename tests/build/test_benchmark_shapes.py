"""The benchmark of shapes: which they are, who takes part in them, and what stays out of them and why."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_ext
from benchmarks import option_calls, peers, report, shapes
from benchmarks.checks import WrongOutput
from benchmarks.pages import records
from benchmarks.pages.all_pages import FIGURES
from benchmarks.pages.figures import Gone
from benchmarks.pages.places import PERFORMANCE
from benchmarks.pages.shapes import SHAPES, SHAPES_SECTION
from benchmarks.peers import OURS, Step
from tests import oracle
from tests.build.benchmark_runs import chosen, record, run

pytestmark = pytest.mark.usefixtures("small_ceilings")


# Which shapes


def test_default_rows() -> None:
    found = shapes.problems(chosen("shapes"))
    assert len(set(found)) == len(found)
    by_group = {group: [p for p in found if p.group == group] for group in shapes.GROUPS}
    assert {(p.head_dim, p.batch, p.seqlen_q) for p in by_group["short"]} == {
        (64, 128, 64), (64, 64, 128), (64, 41, 197), (64, 32, 256), (64, 21, 384),
        (128, 64, 128), (128, 41, 197), (128, 32, 256),
    }  # fmt: skip
    chunks = {(p.seqlen_q, p.seqlen_k, p.heads_q, p.heads_kv) for p in by_group["prefill"]}
    assert {(512, 32768, 32, 8), (1024, 16384, 32, 8), (2048, 65536, 32, 8), (512, 8192, 16, 4)} < chunks
    assert len(chunks) == 17
    assert {p.page_size for p in by_group["cached"]} == {0, 16, 64, 256}
    assert {p.head_dim for p in by_group["cached"]} == {64, 128, 256}
    assert [p.label for p in by_group["cross"]] == ["2 x 1000 over 3500"]
    assert {p.label for p in by_group["wide"]} == {"4 x 1024", "16 x 1024"}
    assert {p.dtype for p in found} == {"bfloat16"}
    assert 0 < len(shapes.problems(chosen("shapes", "--quick"))) < len(found) / 2


def test_packs() -> None:
    packs = {(p.name, p.heads_q, p.head_dim): p for p in shapes.problems(chosen("shapes", "--groups", "packed"))}
    one_long = packs["16384 among 64 x 64", 32, 128]
    assert sorted(one_long.lengths) == [64] * 64 + [16384] and one_long.seqlen_q == 16384
    skewed = packs["skewed, 64 to 8192", 16, 64]
    assert (min(skewed.lengths), max(skewed.lengths), sum(skewed.lengths)) == (64, 8192, 32768)
    assert packs["4096 x 256", 4, 128].without_max and not one_long.without_max


def test_work_counts_visible_pairs() -> None:
    chunk = shapes.Problem("prefill", 2, 3, 10, 4, 2, 8, True, "float32")
    assert chunk.flops("forward") == 4 * 8 * 4 * 2 * (3 * 7 + 3 * 3 / 2)
    assert chunk.flops("backward") == 2.5 * chunk.flops("forward")
    full = shapes.Problem("cross", 2, 3, 10, 4, 2, 8, False, "float32")
    assert full.flops("forward") == 4 * 8 * 4 * 2 * 30
    pack = shapes.Problem("packed", 3, 5, 5, 4, 4, 8, True, "float32", runs=((2, 4), (1, 5)))
    assert pack.flops("forward") == 4 * 8 * 4 * (16 + 12.5)
    assert (pack.as_dense().batch, pack.as_dense().lengths) == (2, [])  # 13 tokens in sequences of 5


def test_selection(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    assert run("shapes", "--groups", "cross", "cached", "--directions", "forward", "--json", str(file)) == 0
    rows = report.read(file).rows
    assert {row.problem["group"] for row in rows} == {"cross", "cached"}
    assert {row.problem["direction"] for row in rows} == {"forward"}
    assert shapes.problems(chosen("shapes", "--groups", "cached", "--directions", "backward")) == []


# Who takes part


def test_each_row_says_what_ran(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    run("shapes", "--groups", "cached", "packed", "--json", str(file))
    rows = report.read(file).rows
    assert all(row.kernel == f"cpu/{row.problem['direction']}" for row in rows)
    assert "| cpu/forward |" in capsys.readouterr().out
    packed = [row for row in rows if row.problem["group"] == "packed"]
    assert all(0 < row.figures["% of dense"] and shapes.DENSE in row.measured for row in packed)
    assert any(shapes.NO_MAX in row.measured for row in packed)
    for row in rows:
        assert ("sdpa" in row.missing) == bool(row.problem["page_size"] or row.problem["runs"])
        assert set(row.ratios()) == row.measured.keys() - {OURS, shapes.DENSE, shapes.NO_MAX}


def flash_attn_3() -> ModuleType:
    """Its names for what this library has under flash-attn's."""
    module = ModuleType("a_package")

    def with_kvcache(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor | None = None, **options: Any
    ) -> Any:
        return flash_ext.flash_attn_with_kvcache(q, k_cache, v_cache, block_table=page_table, **options)

    module.__dict__.update(
        flash_attn_func=flash_ext.flash_attn_func,
        flash_attn_varlen_func=flash_ext.flash_attn_varlen_func,
        flash_attn_with_kvcache=with_kvcache,
    )
    return module


@pytest.mark.parametrize("module", [flash_ext, flash_attn_3()], ids=lambda module: module.__name__)
def test_packages_take_part_everywhere(module: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "a_package", module)
    package = partial(peers._flash_attn_package, "a package", "a_package", "of-nobody", "no.module")
    monkeypatch.setitem(peers.PEERS, "fa3", package)
    monkeypatch.setattr(peers, "NEEDS_CUDA", frozenset())
    file = tmp_path / "run.json"
    run("shapes", "--peers", "fa3", "--json", str(file))
    for row in report.read(file).rows:
        assert "fa3" in row.measured, row.missing


def test_a_wrong_page_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    original = flash_ext.decode

    def other_pages(*args: Tensor, block_table: Tensor | None = None, **options: Any) -> Any:
        return original(*args, block_table=None if block_table is None else block_table.flip(1), **options)

    monkeypatch.setattr(flash_ext, "decode", other_pages)
    with pytest.raises(WrongOutput, match="flash_ext: out is off by"):
        run("shapes", "--groups", "cached")


@pytest.mark.parametrize("name", ["flash_ext no max_seqlen", "flash_ext dense"])
def test_other_forms_of_ours_are_checked_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = flash_ext.attention

    def attention(*args: Tensor, **options: Any) -> Any:
        out = original(*args, **options)
        unbounded = "max_seqlen_q" in options and options["max_seqlen_q"] is None
        wrong = unbounded if name == shapes.NO_MAX else options.get("cu_seqlens_q") is None
        return out * 1.01 if wrong else out

    monkeypatch.setattr(flash_ext, "attention", attention)
    with pytest.raises(WrongOutput, match=f"{name}: out is off by"):
        run("shapes", "--groups", "packed")


# How peers are called


def chunk(causal: bool = True) -> oracle.Call:
    q, k, v = torch.randn(2, 3, 4, 16), *torch.randn(2, 2, 9, 2, 16)
    return oracle.Call(q, k, v, {"causal": causal})


def test_sdpa_sees_the_last_key_with_the_last_query() -> None:
    call = chunk()
    expected = flash_ext.attention(call.q, call.k, call.v, causal=True)
    torch.testing.assert_close(option_calls.sdpa_with_options(call)(call.inputs()), expected)
    step = Step(call.q, call.k, call.v, oracle.int32([9, 9]), causal=True)
    torch.testing.assert_close(peers.sdpa_decode(step)(), expected)
    with pytest.raises(RuntimeError, match="takes no pages"):
        peers.sdpa_decode(Step(call.q, call.k, call.v, causal=True, block_table=oracle.int32([0])))()


def test_cudnn_has_no_causal_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, enabled in (("flash_sdp", False), ("mem_efficient_sdp", False), ("cudnn_sdp", True)):
        monkeypatch.setattr(torch.backends.cuda, f"{name}_enabled", lambda enabled=enabled: enabled)
    q, k = (SimpleNamespace(shape=(2, n, 4, 16), is_cuda=True) for n in (3, 9))
    call: Any = SimpleNamespace(q=q, k=k, options={"causal": True})
    with pytest.raises(RuntimeError, match="aligns a causal mask with the first key"):
        option_calls.sdpa_with_options(call)({})


def packed_call(heads_kv: int, **options: object) -> oracle.Call:
    ends = oracle.cumulative([3, 6])
    q, k, v = torch.randn(9, 4, 16), torch.randn(9, heads_kv, 16), torch.randn(9, heads_kv, 16)
    lengths = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 6, "max_seqlen_k": 6}
    return oracle.Call(q, k, v, {**lengths, "causal": True, **options})


def varlen_by_flag(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):  # type: ignore[no-untyped-def]
    return flash_ext.flash_attn_varlen_func(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, causal=is_causal)


def varlen_by_window(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1), enable_gqa=False):  # type: ignore[no-untyped-def]
    assert enable_gqa == (q.shape[1] != k.shape[1])
    return flash_ext.flash_attn_varlen_func(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, window_size=window_size)


@pytest.mark.parametrize("varlen_attn", [varlen_by_flag, varlen_by_window])
def test_varlen_of_torch(varlen_attn: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arguments differ between versions."""
    pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    call = packed_call(heads_kv=4)
    expected = flash_ext.attention(call.q, call.k, call.v, **call.options)
    torch.testing.assert_close(option_calls.fa2_with_options(call)(call.inputs()), expected)
    grouped = option_calls.fa2_with_options(packed_call(heads_kv=2))
    if varlen_attn is varlen_by_flag:
        with pytest.raises(RuntimeError, match="has no enable_gqa"):
            grouped({})
    else:
        grouped(packed_call(heads_kv=2).inputs())
    for options, reason in (({"max_seqlen_k": None}, "needs max_seqlen_k"), ({"softcap": 3.0}, "has no softcap")):
        with pytest.raises(RuntimeError, match=reason):
            option_calls.fa2_with_options(packed_call(heads_kv=4, **options))({})


# A library that was linked without some kernels

PARTIAL_BUILD = """
struct Params; struct Stream;
namespace cutlass { struct bfloat16_t; struct half_t; }
template <int, class, int, int, bool split, bool paged, bool, bool> void run_mha_fwd_(Params&, Stream*);
template <> void run_mha_fwd_<90, cutlass::bfloat16_t, 64, 64, false, false, false, true>(Params&, Stream*) {}
void run(Params& params, Stream* stream) {
  run_mha_fwd_<90, cutlass::bfloat16_t, 64, 64, false, false, false, true>(params, stream);
  run_mha_fwd_<90, cutlass::bfloat16_t, 64, 64, false, true, false, true>(params, stream);
  run_mha_fwd_<90, cutlass::bfloat16_t, 128, 128, true, false, false, true>(params, stream);
}
"""


@pytest.fixture
def partial_build(tmp_path: Path) -> ModuleType:
    source, file = tmp_path / "partial.cpp", tmp_path / "partial.so"
    source.write_text(PARTIAL_BUILD)
    if shutil.which("g++") is None:
        pytest.skip("there is no compiler")
    subprocess.run(["g++", "-shared", "-fPIC", "-o", str(file), str(source)], check=True)
    assert ctypes.CDLL(None).dlopen(str(file).encode(), os.RTLD_LAZY) != 0
    module = ModuleType("partial")
    module.__file__ = str(file)
    return module


def test_a_kernel_that_is_not_linked_is_seen(partial_build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calling it would end the process."""
    step = partial(Step, cache_seqlens=oracle.int32([9, 9]), causal=True)
    for head_dim, paged, lacks in ((64, False, False), (64, True, True), (128, False, True), (256, True, False)):
        q, cache = torch.randn(2, 3, 4, head_dim).bfloat16(), torch.randn(2, 9, 4, head_dim).bfloat16()
        table = oracle.int32([[0], [1]]) if paged else None
        asked = step(q, cache, cache, block_table=table)
        assert peers.lacks_a_kernel(partial_build, asked) == lacks
        assert not peers.lacks_a_kernel(None, asked)
        if lacks:
            monkeypatch.setitem(sys.modules, "partial", partial_build)
            peer = peers._flash_attn_package("a package", "flash_ext", "of-nobody", "partial")
            assert peer is not None
            with pytest.raises(RuntimeError, match=f"built without some kernels of head_dim {head_dim}"):
                peer.decode(asked)()


# On the page


def test_a_section_comes_with_its_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is asked of the page before there is one; after the next one its figures are others."""
    section, page = SHAPES_SECTION, (records.ROOT / PERFORMANCE).read_text()
    assert (section in FIGURES) == (records.RESULTS / SHAPES).exists() == (section.behind in page)
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    record_shapes(tmp_path / SHAPES, forward=1.21, backward=0.9)
    first = section.apply(page)
    assert first == section.apply(first) and first.count(section.behind) == 1
    assert "\n| short, 16 heads of 64, full | 1.10 (1.00) | 0.90 (0.90) |\n" in first
    assert "\nheads. By `python -m benchmarks shapes --rounds 12`,\n" in first
    assert first.index(section.behind) < first.index(section.before)
    record_shapes(tmp_path / SHAPES, forward=1.44, backward=1.1)
    second = section.apply(first)
    assert "\n| short, 16 heads of 64, full | 1.20 (1.00) | 1.10 (1.10) |\n" in second
    assert second.replace("1.20 (1.00) | 1.10 (1.10)", "1.10 (1.00) | 0.90 (0.90)") == first
    with pytest.raises(Gone):
        section.apply("nothing of the kind")


def record_shapes(file: Path, forward: float, backward: float) -> None:
    """Of two forwards, one of which takes a peer as long as us, and of a backward; of a call without peers."""

    def shape(label: str, direction: str, fa3: float) -> report.Row:
        problem = {"direction": direction, "dtype": "bfloat16"}
        times = {"flash_ext": 1.0, "fa3": fa3, "cudnn": 2.0}
        return report.Row(f"short, {direction}, bfloat16, 16 heads of 64, full", label, problem, times)

    rows = [shape("1", "forward", 1.0), shape("2", "forward", forward), shape("1", "backward", backward)]
    rows.append(report.Row("packed, forward, bfloat16", "alone", rows[0].problem, {"flash_ext": 1.0}))
    kept = record(*rows, benchmark="shapes")
    kept.provenance["command"] = "python -m benchmarks shapes --rounds 12 --json h200_shapes.json"
    kept.write(file)
