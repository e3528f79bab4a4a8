"""How ``benchmarks`` finds, loads and calls packages of others."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import decode, models, peers, report
from benchmarks.__main__ import BENCHMARKS
from benchmarks.extensions import import_lazily, undefined_symbols
from benchmarks.pages import records
from benchmarks.pages.decode import decode_cells, serving_cells
from benchmarks.peers import FA3_METADATA, OURS, Step
from flash_ext.integrations.flash_attn import interface_3
from tests import oracle
from tests.build.benchmark_runs import record, run

# A module of a build that lacks a kernel: it can be imported, and called where it does not need that kernel.
EXTENSION = """
#include <Python.h>
extern int kernel_that_was_not_linked(void);
int needs_the_kernel(void) { return kernel_that_was_not_linked(); }
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "partial_extension", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_partial_extension(void) { return PyModule_Create(&definition); }
"""
PACKAGE = """
import partial_extension
def flash_attn_func(q, k, v, causal=False): ...
def flash_attn_with_kvcache(q, k_cache, v_cache, page_table=None): ...
"""


@pytest.fixture
def partial_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package whose extension has an undefined symbol, and can be found."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    include = sysconfig.get_paths()["include"]
    if compiler is None or not (Path(include) / "Python.h").exists():
        pytest.skip("there is no compiler, or no Python.h")
    (tmp_path / "partial_package.py").write_text(PACKAGE)
    source = tmp_path / "partial_extension.c"
    source.write_text(EXTENSION)
    flags = ["-shared", "-fPIC", "-Wl,-z,lazy", f"-I{include}"]
    subprocess.run([compiler, *flags, "-o", str(source.with_suffix(".so")), str(source)], check=True)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("partial_package", "partial_extension"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "partial_package"


def test_a_build_of_some_kernels_is_a_peer(partial_package: str) -> None:
    with pytest.raises(ImportError, match="kernel_that_was_not_linked"):
        importlib.import_module(partial_package)
    peer = peers._flash_attn_package("a package", partial_package, "of-nobody", "partial_extension")
    assert peer is not None and "sha256" in peer.origin
    file = sys.modules["partial_extension"].__file__
    assert file is not None
    assert undefined_symbols(file, "kernel_that_was_not_linked") == ("kernel_that_was_not_linked",)


def test_binding_is_lazy_for_one_import_alone(partial_package: str, tmp_path: Path) -> None:
    flags = sys.getdlopenflags()
    (tmp_path / "reads_flags.py").write_text("import sys; flags = sys.getdlopenflags()")
    (tmp_path / "raises.py").write_text("raise ImportError('for a reason of its own')")
    found = import_lazily("reads_flags").flags
    assert found & os.RTLD_LAZY and not found & os.RTLD_NOW
    assert sys.getdlopenflags() == flags
    with pytest.raises(ImportError, match="for a reason of its own"):
        import_lazily("raises")
    assert sys.getdlopenflags() == flags
    assert import_lazily(partial_package).__name__ == partial_package and sys.getdlopenflags() == flags


class RecordedFA3(ModuleType):
    """FlashAttention-3's functions, as this library has them, and what they were called with."""

    def __init__(self) -> None:
        super().__init__("recorded_fa3")
        self.flash_attn_func = interface_3.flash_attn_func
        self.made: list[tuple[dict[str, Any], Tensor]] = []
        self.passed: list[Tensor | None] = []

    def get_scheduler_metadata(self, *sizes: Any, **options: Any) -> Tensor:
        names = ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_kv", "head_dim", "cache_seqlens")
        found = interface_3.get_scheduler_metadata(*sizes, **options)
        self.made.append(({**dict(zip(names, sizes, strict=True)), **options}, found))
        return found

    def flash_attn_with_kvcache(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor | None = None, **options: Any
    ) -> Any:
        self.passed.append(options.get("scheduler_metadata"))
        return interface_3.flash_attn_with_kvcache(q, k_cache, v_cache, page_table=page_table, **options)


@pytest.fixture
def fa3(monkeypatch: pytest.MonkeyPatch) -> RecordedFA3:
    """In the place of the package, on a CPU too."""
    module = RecordedFA3()
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    monkeypatch.setattr(peers, "NEEDS_CUDA", frozenset())
    return module


@pytest.mark.usefixtures("small_ceilings")
def test_metadata_is_made_once_a_step(fa3: RecordedFA3, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    run("decode", "--workloads", *decode.WORKLOADS, "--peers", FA3_METADATA, "--json", str(file))
    rows = report.read(file).rows
    assert [set(row.measured) >= {OURS, FA3_METADATA} for row in rows] == [True] * len(decode.WORKLOADS)
    assert len(fa3.made) == len(rows)
    sizes = {"batch": 2, "seqlen_q": 1, "seqlen_k": 48, "heads_q": 4, "heads_kv": 2, "head_dim": 16}
    for row, (asked, _) in zip(rows, fa3.made, strict=True):
        appended = 1 if row.problem.get("workload") in ("append", "rotary") else 0
        assert asked.items() >= {**sizes, "max_seqlen_k_new": appended, "qkv_dtype": torch.float32}.items()
        assert not asked["causal"] and asked["page_size"] is None
    made = [found.data_ptr() for _, found in fa3.made]
    passed = [metadata.data_ptr() for metadata in fa3.passed if metadata is not None]
    assert len(passed) == len(fa3.passed) and sorted(set(passed)) == sorted(made)


@pytest.mark.usefixtures("small_ceilings")
def test_without_metadata_the_package_makes_it(fa3: RecordedFA3) -> None:
    run("decode", "--peers", "fa3")
    assert fa3.passed and not fa3.made and not any(metadata is not None for metadata in fa3.passed)


def test_metadata_of_a_chunk_over_pages(fa3: RecordedFA3) -> None:
    q, pages = torch.randn(2, 3, 4, 16), torch.randn(5, 16, 2, 16)
    step = Step(q, pages, pages, oracle.int32([20, 33]), causal=True, block_table=oracle.int32([[0, 4, 2], [1, 3, 2]]))
    peer = peers.PEERS[FA3_METADATA]()
    assert peer is not None
    call = peer.decode(step)
    expected = peers.ours().decode(step)()
    for _ in range(2):
        torch.testing.assert_close(call(), expected)
    ((asked, found),) = fa3.made
    assert fa3.passed == [found, found]
    assert (asked["seqlen_q"], asked["seqlen_k"], asked["page_size"], asked["causal"]) == (3, 48, 16, True)
    assert asked["cache_seqlens"] is step.cache_seqlens
    with pytest.raises(RuntimeError, match="lengths of caches, which the step does not have"):
        peer.decode(Step(q, pages, pages))


def test_packages_without_metadata(fa3: RecordedFA3, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention-2 has none; steps over caches are asked with it where it can be had, nothing else is."""
    device = torch.device("cuda")
    assert BENCHMARKS["decode"].also_peers == decode.ALSO_PEERS
    assert FA3_METADATA in peers.find_peers(None, device, also=decode.ALSO_PEERS)
    assert FA3_METADATA not in peers.find_peers(None, device)
    package = ModuleType("flash_attn_interface")
    package.__dict__.update(
        flash_attn_func=fa3.flash_attn_func, flash_attn_with_kvcache=interface_3.flash_attn_with_kvcache
    )
    monkeypatch.setitem(sys.modules, "flash_attn_interface", package)
    found = peers.find_peers(None, device, also=decode.ALSO_PEERS)
    assert "fa3" in found and FA3_METADATA not in found


def test_fa3_in_the_place_of_sdpa(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whole models call it where it takes their calls; with a mask or bias it is left out."""
    pytest.importorskip("transformers")
    monkeypatch.setitem(peers.PEERS, "fa3", lambda: replace(peers.ours(), title="FlashAttention-3"))
    monkeypatch.setattr(peers, "NEEDS_CUDA", frozenset())
    torchs_own = F.scaled_dot_product_attention
    names = [name for name, *_ in models.CPU_SIZES]
    assert run("models", "--models", *names, "--json", str(tmp_path / "run.json")) == 0
    assert F.scaled_dot_product_attention is torchs_own
    kept = report.read(tmp_path / "run.json")
    assert kept.provenance["peers"].items() >= {"fa3": "FlashAttention-3", "torch": models.PEERS["torch"]}.items()
    rows = {row.problem["model"]: row for row in kept.rows}
    assert {model for model, row in rows.items() if "fa3" in row.measured} == {"GPT-2", "DiT", "ViT"}
    for model in ("BERT", "T5"):
        assert rows[model].missing["fa3"] == "FlashAttention-3 takes no mask or bias"


@pytest.mark.parametrize(
    "options", [{"dropout_p": 0.1}, {"scale": 1.0}, {"is_causal": True}], ids=lambda options: next(iter(options))
)
def test_what_it_would_compute_otherwise_raises(options: dict[str, Any]) -> None:
    """Its causal mask is aligned with the last key, SDPA's with the first."""
    q, k = torch.randn(1, 2, 3, 16), torch.randn(1, 2, 5, 16)
    with models.in_place_of_sdpa(peers.ours()):
        torch.testing.assert_close(F.scaled_dot_product_attention(q, k, k), oracle_of(q, k))
        with pytest.raises(NotImplementedError, match=f"^flash_ext .*{next(iter(options))}"):
            F.scaled_dot_product_attention(q, k, k, **options)


def test_groups_of_heads_need_the_word_that_torch_needs() -> None:
    q, k = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 3, 16)
    with models.in_place_of_sdpa(peers.ours()):
        grouped = F.scaled_dot_product_attention(q, k, k, enable_gqa=True)
        torch.testing.assert_close(grouped, oracle_of(q, k.repeat_interleave(2, 1)))
        with pytest.raises(NotImplementedError, match="SDPA with enable_gqa alone"):
            F.scaled_dot_product_attention(q, k, k)


def test_a_model_that_keeps_torchs_function_is_not_timed() -> None:
    q = torch.randn(1, 2, 3, 16)
    torchs_own = F.scaled_dot_product_attention
    with (
        pytest.raises(RuntimeError, match="nothing called flash_ext: the model keeps torch's function"),
        models.in_place_of_sdpa(peers.ours()),
    ):
        torchs_own(q, q, q)
    with pytest.raises(ZeroDivisionError), models.in_place_of_sdpa(peers.ours()):
        raise ZeroDivisionError
    assert F.scaled_dot_product_attention is torchs_own


def test_models_that_are_not_for_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run("models", "--models", "BERT-large")
    assert "argument --models: expected of BERT, GPT-2, T5, DiT, ViT on this device" in capsys.readouterr().err


def oracle_of(q: Tensor, k: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ k


def test_pages_can_have_a_column_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shape = {"batch": 32, "seqlen": 8192, "heads_q": 32, "heads_kv": 8, "head_dim": 128}
    times = {OURS: 259.44, "fa3": 264.81, FA3_METADATA: 250.06, f"{OURS} paged": 260.0}
    record(report.Row("t", "32 x 8192", shape, times, figures={"read us": 252.0})).write(tmp_path / "h200_decode.json")
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    header = ["query heads / key heads", "batch x context", "flash-ext", "FA3", "FA3 with metadata"]
    found = ["259.4", "264.8", "250.1"]
    assert decode_cells(header, ["32 / 8", "32 x 8192", "", "", ""]) == ["32 / 8", "32 x 8192", *found]
    labels = ["full", "32 / 8, 128", "32 x 8192"]
    assert serving_cells(["", *header], [*labels, "", "", ""]) == [*labels, *found]
