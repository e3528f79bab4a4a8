"""README.md and the pages: recipes run as they stand, files that are named exist, figures are those of the records."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "setup.py").exists())
README = (ROOT / "README.md").read_text()
PERFORMANCE = "docs/performance.md"
TIMES = "\N{MULTIPLICATION SIGN}"
HIDDEN = 2048
MOST_WORDS = 1400
Row = dict[str, Any]


def test_recipes_run() -> None:
    recipes = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    assert len(recipes) >= 10
    names: dict[str, object] = {}
    for recipe in recipes:
        exec(compile(recipe, "README.md", "exec"), names)


def test_readme_is_short() -> None:
    assert len(README.split()) <= MOST_WORDS


def test_files_and_modules_that_are_named_exist() -> None:
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", *map(str, (ROOT / "docs").rglob("*.md")))]
    for page in pages:
        text = page.read_text()
        for name in re.findall(r"`((?:docs|csrc|tests|benchmarks|tools|flash_ext|build_support|\.ci)/[\w./]*)`", text):
            assert (ROOT / name).exists() or name.endswith(".so"), f"{page.name} names {name}"
        for module in re.findall(r"python -m (benchmarks[.\w]*)", text):
            path = ROOT / module.replace(".", "/")
            assert path.is_dir() or path.with_suffix(".py").exists(), f"{page.name} names {module}"


def test_links_between_pages_lead_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_kernel_has_a_page() -> None:
    pages = {page.stem for page in (ROOT / "docs" / "kernels").glob("*.md")}
    assert pages >= {"cpu", "decode_sm80", "weights_sm80"}
    assert {page.stem for page in (ROOT / "docs" / "tuning").glob("*_sm*.md")} <= pages


# ---- Figures --------------------------------------------------------------------------------------------------------


def record(name: str) -> list[Row]:
    rows: list[Row] = json.loads((ROOT / "benchmarks" / "results" / name).read_text())["rows"]
    return rows


def find(rows: list[Row], **problem: Any) -> Row:
    (row,) = (r for r in rows if all(r["problem"].get(name) == value for name, value in problem.items()))
    return row


def training_row(direction: str, head_dim: int, size: str, mask: str, dtype: str = "bfloat16") -> Row:
    """Of a cell; ``size`` is "batch x seqlen", or the length alone."""
    rows = record(f"h200_{direction}.json")
    seqlen = int(size.split(TIMES)[-1])
    shape = {"head_dim": head_dim, "seqlen": seqlen, "heads_kv": HIDDEN // head_dim}
    return find(rows, dtype=dtype, causal=mask == "causal", **shape)


def section(page: str, heading: str) -> str:
    return (ROOT / page).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def tables(text: str) -> list[list[list[str]]]:
    """Cells of each table, its header first."""
    found = re.findall(r"(?:^\|.*\n)+", text + "\n", flags=re.MULTILINE)
    return [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if "---" not in line]
        for table in found
    ]


def table_behind(text: str, mention: str) -> Iterator[list[str]]:
    """Cells of the first table behind a mention, its header first."""
    return iter(tables(text[text.index(mention) :])[0])


@pytest.mark.parametrize(
    ("page", "file"),
    [
        (PERFORMANCE, "h200_forward.json"),
        (PERFORMANCE, "h200_backward.json"),
        ("docs/tuning/forward_sm90.md", "h200_forward.json"),
        ("docs/tuning/backward_sm90.md", "h200_backward.json"),
    ],
)
def test_table_of_training(page: str, file: str) -> None:
    direction = file.removeprefix("h200_").removesuffix(".json")
    header, *table = table_behind((ROOT / page).read_text(), file)
    assert len(table) == 6
    for label, *cells in table:
        head_dim, mask = label.split()
        for seqlen, cell in zip(header[1:], cells, strict=True):
            shown = training_row(direction, int(head_dim), seqlen, mask)["shown"]
            assert cell == " / ".join(f"{shown[name]:.0f}" for name in ("flash_ext", "fa3", "cudnn", "fa2"))


def test_table_of_training_in_readme() -> None:
    names = ("flash_ext", "fa3", "cudnn", "fa2")
    _, *table = table_behind(README, "Training, causal")
    for label, *cells in table:
        head_dim, size = label.split(", ")
        rows = [training_row(direction, int(head_dim), size, "causal") for direction in ("forward", "backward")]
        assert cells == [" + ".join(f"{row['measured'][name]:.2f}" for row in rows) for name in names]


def test_tables_of_float32() -> None:
    _, *table = table_behind(README, "float32, full, 4")
    names = ("flash_ext", "efficient")
    for head_dim, *cells in table:
        rows = [training_row(d, int(head_dim), "4096", "full", "float32") for d in ("forward", "backward")]
        assert cells == [" + ".join(f"{row['measured'][name]:.2f}" for row in rows) for name in names]
    header, *table = tables(section(PERFORMANCE, "float32"))[0]
    for label, *cells in table:
        head_dim, mask = label.split()
        for title, cell in zip(header[1:], cells, strict=True):
            direction, size = title.split(", ")
            measured = training_row(direction, int(head_dim), size, mask, "float32")["measured"]
            assert cell == " / ".join(f"{measured[name]:.2f}" for name in names)


def test_table_of_grouped_heads() -> None:
    header, *table = tables(section(PERFORMANCE, "Grouped heads"))[0]
    for label, *cells in table:
        direction, mask = label.split()
        rows = [row for row in record(f"h200_{direction}.json") if row["problem"]["heads_kv"] == 4]
        for size, cell in zip(header[1:], cells, strict=True):
            shown = find(rows, seqlen=int(size.split(TIMES)[1]), causal=mask == "causal")["shown"]
            assert cell == " / ".join(f"{shown[name]:.0f}" for name in ("flash_ext", "fa3", "cudnn", "fa2"))


def means_of_training(direction: str) -> dict[str, float]:
    rows = [r for r in record(f"h200_{direction}.json") if r["problem"]["dtype"] == "bfloat16"]
    rows = [r for r in rows if r["problem"]["heads_q"] == r["problem"]["heads_kv"]]
    assert len(rows) == 36
    ratios = {peer: [r["measured"][peer] / r["measured"]["flash_ext"] for r in rows] for peer in rows[0]["measured"]}
    return {peer: math.exp(sum(map(math.log, values)) / 36) for peer, values in ratios.items()}


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_means_of_training(direction: str) -> None:
    text = section(PERFORMANCE, direction.capitalize())
    times = r"([\d.]+) times\s+{}"
    pattern = ", ".join(times.format(name) for name in ("FlashAttention-3", "cuDNN", "FA2", "efficient"))
    stated = re.search(r"over the 36: " + pattern, text)
    assert stated
    means = means_of_training(direction)
    for peer, number in zip(("fa3", "cudnn", "fa2", "efficient"), stated.groups(), strict=True):
        assert f"{means[peer]:.{len(number.partition('.')[2])}f}" == number


def test_means_of_training_in_readme() -> None:
    stated = re.search(
        r"\(([\d.]+) and ([\d.]+) times as a mean\); the backward is at ([\d.]+) and ([\d.]+) times", README
    )
    assert stated
    means = [means_of_training(direction)[peer] for direction in ("forward", "backward") for peer in ("fa3", "cudnn")]
    assert [f"{mean:.2f}" for mean in means] == list(stated.groups())


def test_nobody_has_a_faster_forward() -> None:
    """As both pages say."""
    rows = [r for r in record("h200_forward.json") if r["problem"]["dtype"] == "bfloat16"]
    assert all(min(r["measured"], key=r["measured"].__getitem__) == "flash_ext" for r in rows)


@pytest.mark.parametrize("text", [README, (ROOT / PERFORMANCE).read_text()], ids=["README", "performance"])
def test_table_of_decoding(text: str) -> None:
    _, *table = table_behind(text, "h200_decode.json")
    for line in table:
        *label, ours, fa2, cudnn = line
        heads_q, heads_kv, batch, seqlen = map(int, re.findall(r"\d+", " ".join(label)))
        row = find(record("h200_decode.json"), heads_q=heads_q, heads_kv=heads_kv, batch=batch, seqlen=seqlen)
        assert [ours, fa2, cudnn] == [f"{row['measured'][name]:.1f}" for name in ("flash_ext", "fa2", "cudnn")]


@pytest.mark.parametrize("file", ["h200_options.json", "h200_options_sm80.json"])
def test_table_of_options(file: str) -> None:
    header, *table = table_behind((ROOT / PERFORMANCE).read_text(), file)
    for direction, *cells in table:
        rows = [row for row in record(file) if row["problem"]["direction"] == direction]
        for label, cell in zip(header[1:], cells, strict=True):
            costs = [row["figures"]["% cost"] for row in rows if row["label"] == label]
            assert cell == " / ".join(f"{cost:.0f}" for cost in costs)


def test_table_of_options_in_readme() -> None:
    names = {
        "and its gradient": "bias (1, h, q, k), its gradient",
        "key padding": "mask (b, 1, 1, k)",
    }
    header, *table = table_behind(README, "h200_options.json")
    for direction, *cells in table:
        rows = [r for r in record("h200_options.json") if r["problem"]["direction"] == direction]
        times = {row["label"]: row["measured"]["flash_ext"] for row in rows if row["problem"]["head_dim"] == 128}
        for label, cell in zip(header[1:], cells, strict=True):
            time = times.get(names.get(label, label))
            assert cell == ("" if time is None else f"{time:.2f}")


def test_table_of_the_cpu() -> None:
    rows = record("cpu_xeon_avx512.json")
    _, *table = table_behind((ROOT / PERFORMANCE).read_text(), "cpu_xeon_avx512.json")
    for size, mask, *cells in table:
        batch, seqlen, heads, head_dim = map(int, size.split(f" {TIMES} "))
        shape = {"batch": batch, "seqlen": seqlen, "heads_q": heads, "head_dim": head_dim, "dtype": "float32"}
        for direction, found in (("forward", cells[:3]), ("backward", cells[3:])):
            measured = find(rows, **shape, causal=mask == "causal", direction=direction)["measured"]
            ours, theirs = measured["flash_ext"], measured["sdpa"]
            assert found == [f"{ours:.1f}", f"{theirs:.1f}", f"{theirs / ours:.2f}{TIMES}"]


def test_table_of_the_host() -> None:
    header, *table = tables(section(PERFORMANCE, "Host and memory"))[0]
    host = {row["label"]: row["measured"] for row in record("h200_host.json")}
    for name, *cells in table:
        assert cells == [f"{host[call][name]:.0f}" for call in header[1:]]
    (ours, torchs) = re.findall(r"`scaled_dot_product_attention`: (\d+) µs of host time, torch's own (\d+)", README)[0]
    call = host["without grad"]
    assert [ours, torchs] == [f"{call[n]:.0f}" for n in ("flash_ext.scaled_dot_product_attention", "sdpa")]


def test_figures_of_memory() -> None:
    text = section(PERFORMANCE, "Host and memory")
    (mebibytes,) = re.findall(r"at 65536 tokens take (\d+) MiB beside their\s+inputs, FA2 (\d+)", text)
    peak = find(record("h200_memory.json"), seqlen=65536, direction="forward and backward")["measured"]
    assert [int(n) for n in mebibytes] == [round(peak["flash_ext"]), round(peak["fa2"])]
