"""README.md: its recipes run as they stand, one after the other, and its figures are those of the recorded runs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
TIMES = "\N{MULTIPLICATION SIGN}"
Row = dict[str, Any]


def test_recipes_run() -> None:
    recipes = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    assert len(recipes) >= 10
    names: dict[str, object] = {}
    for recipe in recipes:
        exec(compile(recipe, "README.md", "exec"), names)


def test_files_and_modules_that_are_named_exist() -> None:
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", *map(str, (ROOT / "docs").rglob("*.md")))]
    for page in pages:
        text = page.read_text()
        for name in re.findall(r"`((?:docs|csrc|tests|benchmarks|tools|flash_ext|build_support|\.ci)/[\w./]*)`", text):
            assert (ROOT / name).exists() or name.endswith(".so"), f"{page.name} names {name}"
        for module in re.findall(r"python -m (benchmarks[.\w]*)", text):
            path = ROOT / module.replace(".", "/")
            assert path.is_dir() or path.with_suffix(".py").exists(), f"{page.name} names {module}"


# ---- Figures --------------------------------------------------------------------------------------------------------


def record(name: str) -> list[Row]:
    rows: list[Row] = json.loads((ROOT / "benchmarks" / "results" / name).read_text())["rows"]
    return rows


def find(rows: list[Row], **problem: Any) -> Row:
    (row,) = (r for r in rows if all(r["problem"].get(name) == value for name, value in problem.items()))
    return row


def table_behind(text: str, mention: str) -> Iterator[list[str]]:
    """Cells of the first table behind a mention, its header first."""
    lines = text[text.index(mention) :].splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("| "))
    for line in lines[first:]:
        if not line.startswith("|"):
            return
        if not line.startswith("| ---"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize(
    ("page", "file"),
    [
        ("README.md", "h200_forward.json"),
        ("README.md", "h200_backward.json"),
        ("docs/tuning/forward_sm90.md", "h200_forward.json"),
    ],
)
def test_table_of_training(page: str, file: str) -> None:
    rows = [row for row in record(file) if row["problem"]["dtype"] == "bfloat16"]
    header, *table = table_behind((ROOT / page).read_text(), file)
    assert len(table) == 6
    for label, *cells in table:
        head_dim, mask = label.split()
        for seqlen, cell in zip(header[1:], cells, strict=True):
            heads = 2048 // int(head_dim)
            problem = {"seqlen": int(seqlen), "head_dim": int(head_dim), "causal": mask == "causal", "heads_kv": heads}
            shown = find(rows, **problem)["shown"]
            assert cell == " / ".join(f"{shown[name]:.0f}" for name in ("flash_ext", "fa3", "cudnn", "fa2"))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_means_of_training(direction: str) -> None:
    rows = [r for r in record(f"h200_{direction}.json") if r["problem"]["dtype"] == "bfloat16"]
    rows = [r for r in rows if r["problem"]["heads_q"] == r["problem"]["heads_kv"]]
    text = README[README.index(f"**{direction.capitalize()}, H200.**") :]
    stated = re.search(r"over the 36: ([\d.]+) times\s+FlashAttention-3, ([\d.]+) times cuDNN, ([\d.]+) times", text)
    assert stated and len(rows) == 36
    for peer, number in zip(("fa3", "cudnn", "fa2"), stated.groups(), strict=True):
        logs = [math.log(row["measured"][peer] / row["measured"]["flash_ext"]) for row in rows]
        decimals = len(number.partition(".")[2])
        assert f"{math.exp(sum(logs) / 36):.{decimals}f}" == number


def test_table_of_decoding() -> None:
    _, *table = table_behind(README, "h200_decode.json")
    for heads, size, *cells in table:
        (heads_q, heads_kv), (batch, seqlen) = (map(int, re.findall(r"\d+", text)) for text in (heads, size))
        row = find(record("h200_decode.json"), heads_q=heads_q, heads_kv=heads_kv, batch=batch, seqlen=seqlen)
        assert cells == [f"{row['measured'][name]:.1f}" for name in ("flash_ext", "fa2", "cudnn")]


def test_table_of_options() -> None:
    header, *table = table_behind(README, "h200_options.json")
    for direction, *cells in table:
        rows = [row for row in record("h200_options.json") if row["problem"]["direction"] == direction]
        for label, cell in zip(header[1:], cells, strict=True):
            costs = [row["figures"]["% cost"] for row in rows if row["label"] == label]
            assert cell == " / ".join(f"{cost:.0f}" for cost in costs)


def test_table_of_the_cpu() -> None:
    rows = record("cpu_xeon_avx512.json")
    _, *table = table_behind(README, "cpu_xeon_avx512.json")
    for size, mask, *cells in table:
        batch, seqlen, heads, head_dim = map(int, size.split(f" {TIMES} "))
        shape = {"batch": batch, "seqlen": seqlen, "heads_q": heads, "head_dim": head_dim, "dtype": "float32"}
        for direction, found in (("forward", cells[:3]), ("backward", cells[3:])):
            measured = find(rows, **shape, causal=mask == "causal", direction=direction)["measured"]
            ours, theirs = measured["flash_ext"], measured["sdpa"]
            assert found == [f"{ours:.1f}", f"{theirs:.1f}", f"{theirs / ours:.2f}{TIMES}"]


def test_figures_of_host_and_memory() -> None:
    text = README[README.index("**Host and memory") :]
    host = {row["label"]: row["measured"] for row in record("h200_host.json")}
    (numbers,) = re.findall(r"takes (\d+) µs of a CPU's time, (\d+) where .*?SDPA: (\d+) and (\d+);", text)
    calls = [host["without grad"], host["with grad"]]
    assert [int(n) for n in numbers] == [round(call[name]) for name in ("flash_ext", "sdpa") for call in calls]
    (mebibytes,) = re.findall(r"at 65536 tokens take (\d+) MiB beside their\s+inputs, FA2 (\d+)", text)
    peak = find(record("h200_memory.json"), seqlen=65536, direction="forward and backward")["measured"]
    assert [int(n) for n in mebibytes] == [round(peak["flash_ext"]), round(peak["fa2"])]
