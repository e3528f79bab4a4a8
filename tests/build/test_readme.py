"""README.md and the pages: recipes run as they stand, files that are named exist, figures are those of the records."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "setup.py").exists())
README = (ROOT / "README.md").read_text()
PERFORMANCE = "docs/performance.md"
TIMES = "\N{MULTIPLICATION SIGN}"
NAMES = {"flash-ext": "flash_ext", "FlashAttention-3": "fa3", "FA3": "fa3", "FA2": "fa2", "cuDNN": "cudnn"}
HIDDEN = 2048
MOST_WORDS = 1400
RESULTS = ROOT / "benchmarks" / "results"
Row = dict[str, Any]


def test_recipes_run() -> None:
    recipes = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    assert len(recipes) >= 10
    names: dict[str, object] = {}
    for recipe in recipes:
        exec(compile(recipe, "README.md", "exec"), names)


# The tensors, and the group of one process, that the recipes of integrations.md speak of.
PRELUDE = """
import torch, flash_ext
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group, mesh = dist.group.WORLD, dist.device_mesh.init_device_mesh("cpu", (1,))
ids = torch.randint(100, (2, 8))
"""
BEFORE_EACH = """
x = torch.randn(2, 8, 64)
q, k, v = torch.randn(3, 1, 8, 4, 16)
"""


def test_recipes_of_integrations_run() -> None:
    """In the order of the page, in a process of their own: some of them change it."""
    pytest.importorskip("transformers")
    page = (ROOT / "docs" / "integrations.md").read_text()
    recipes = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    assert len(recipes) >= 8
    if importlib.util.find_spec("onnxscript") is None:
        recipes = [recipe.partition("written = ")[0] for recipe in recipes]
    program = PRELUDE + "".join(BEFORE_EACH + recipe for recipe in recipes) + "dist.destroy_process_group()\n"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


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
    for page in (ROOT / "docs" / "tuning").glob("*_sm*.md"):
        assert any(page.stem == name or page.stem.startswith(f"{name}_") for name in pages), page


# ---- Figures --------------------------------------------------------------------------------------------------------


def record(name: str) -> list[Row]:
    rows: list[Row] = json.loads((RESULTS / name).read_text())["rows"]
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
        rows = record(f"h200_{direction}.json")
        for size, cell in zip(header[1:], cells, strict=True):
            heads = {"heads_q": 16, "heads_kv": 4, "head_dim": 128}
            shown = find(rows, **heads, seqlen=int(size.split(TIMES)[1]), causal=mask == "causal")["shown"]
            assert cell == " / ".join(f"{shown[name]:.0f}" for name in ("flash_ext", "fa3", "cudnn", "fa2"))


def means_of_training(direction: str) -> dict[str, float]:
    rows = [r for r in record(f"h200_{direction}.json") if r["problem"]["dtype"] == "bfloat16"]
    rows = [
        r for r in rows if r["problem"]["heads_q"] == r["problem"]["heads_kv"] == HIDDEN // r["problem"]["head_dim"]
    ]
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
    """As both pages say: by the lower quartile of the ratios, where the record has it."""
    rows = report.read(RESULTS / "h200_forward.json").rows
    contested = [row for row in rows if row.problem["dtype"] == "bfloat16"]
    assert contested and all(min(row.lower_ratios().values()) > 1 for row in contested)


@pytest.mark.parametrize("text", [README, (ROOT / PERFORMANCE).read_text()], ids=["README", "performance"])
def test_table_of_decoding(text: str) -> None:
    header, *table = table_behind(text, "h200_decode.json")
    names = [NAMES[title] for title in header if title in NAMES]
    assert names[0] == "flash_ext" and len(names) >= 3
    for line in table:
        label, times = " ".join(line[: -len(names)]), line[-len(names) :]
        heads_q, heads_kv, batch, seqlen = map(int, re.findall(r"\d+", label))
        shape = {"heads_q": heads_q, "heads_kv": heads_kv, "head_dim": 128, "batch": batch, "seqlen": seqlen}
        measured = find(record("h200_decode.json"), **shape, workload=None)["measured"]
        assert times == [f"{measured[name]:.1f}" for name in names]


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


# ---- Figures in sentences, and whether any is left that no test looks at ---------------------------------------------


def costs(label: str, direction: str) -> list[str]:
    """In percent, head_dim 64 and 128."""
    rows = [r for r in record("h200_options.json") if r["problem"]["direction"] == direction and r["label"] == label]
    return [f"{row['figures']['% cost']:.0f}" for row in sorted(rows, key=lambda row: row["problem"]["head_dim"])]


def bounds(ratios: list[float], digits: int) -> list[str]:
    return [f"{value:.{digits}f}" for value in (min(ratios), max(ratios))]


def decode_bounds(peer: str) -> list[str]:
    """Of full caches at head_dim 128."""
    rows = [row for row in record("h200_decode.json") if row["problem"]["head_dim"] == 128]
    measured = [row["measured"] for row in rows if "workload" not in row["problem"]]
    return bounds([row[peer] / row["flash_ext"] for row in measured], 2)


def cpu_ratios(direction: str, **problem: Any) -> list[float]:
    """torch's time over ours."""
    wanted = {"direction": direction, **problem}.items()
    rows = [row["measured"] for row in record("cpu_xeon_avx512.json") if wanted <= row["problem"].items()]
    return [row["sdpa"] / row["flash_ext"] for row in rows]


def slowest_on_a_cpu(direction: str) -> str:
    """How many times as fast torch is at most, in bfloat16."""
    return f"{1 / min(cpu_ratios(direction, dtype='bfloat16')):.1f}"


def deterministic_times() -> list[str]:
    return [f"{1 + int(cost) / 100:.1f}" for cost in costs("deterministic", "backward")]


def software() -> list[str]:
    """Of all records of the H200 alike, as far as a sentence names them: torch, cuDNN, CUDA."""
    origins = [report.read(path).provenance for path in RESULTS.glob("h200_*.json")]
    (found,) = {(o["torch"][:4], ".".join(o["cudnn"].split(".")[:2]), o["cuda"]) for o in origins}
    return list(found)


def window_costs() -> list[str]:
    labels = ("window 512", "block mask, window 512", "causal")
    return [cost for label in labels for direction in ("forward", "backward") for cost in costs(label, direction)]


PAIR = r"(\d+) / (\d+)"
SENTENCES: dict[tuple[str, str], Callable[[], list[str]]] = {
    ("README.md", r"up to ([\d.]+) times as fast there"): lambda: [slowest_on_a_cpu("forward")],
    ("README.md", r"on Hopper: ([\d.]+) to ([\d.]+) times the backward"): deterministic_times,
    ("README.md", r"torch ([\d.]+), cuDNN ([\d.]+);"): lambda: software()[:2],
    (PERFORMANCE, r"torch ([\d.]+), cuDNN ([\d.]+), CUDA ([\d.]+)\."): software,
    (PERFORMANCE, r"([\d.]+) to ([\d.]+) times as fast as FA2"): lambda: decode_bounds("fa2"),
    (PERFORMANCE, r"([\d.]+) to ([\d.]+) times as fast as cuDNN"): lambda: decode_bounds("cudnn"),
    (PERFORMANCE, rf"gradient of a bias takes the backward to {PAIR} %"): lambda: costs(
        "bias (1, h, q, k), its gradient", "backward"
    ),
    (PERFORMANCE, rf"`deterministic` to {PAIR} %"): lambda: costs("deterministic", "backward"),
    (
        PERFORMANCE,
        rf"a window of 512 costs {PAIR} % forward and {PAIR} % backward, the same window as a block mask {PAIR} and "
        rf"{PAIR}, a causal mask {PAIR} and {PAIR}\.",
    ): window_costs,
    (PERFORMANCE, r"ratios are ([\d.]+) to ([\d.]+) forward and ([\d.]+) to ([\d.]+) backward"): lambda: [
        *bounds(cpu_ratios("forward", dtype="float32", head_dim=128), 2),
        *bounds(cpu_ratios("backward", dtype="float32", head_dim=128), 2),
    ],
    (PERFORMANCE, r"AVX-512, torch ([\d.]+), ms"): lambda: [
        report.read(RESULTS / "cpu_xeon_avx512.json").provenance["torch"][:4]
    ],
    (PERFORMANCE, r"up to ([\d.]+) times as fast forward and ([\d.]+) times backward"): lambda: [
        slowest_on_a_cpu("forward"),
        slowest_on_a_cpu("backward"),
    ],
}


@pytest.mark.parametrize(("page", "sentence"), SENTENCES)
def test_figures_of_a_sentence(page: str, sentence: str) -> None:
    stated = re.search(sentence, (ROOT / page).read_text())
    assert stated, f"{page} does not say so any more"
    assert list(stated.groups()) == SENTENCES[page, sentence]()


def test_commands_are_those_of_the_records() -> None:
    """Where a page names the file that a command was recorded in."""
    stated = re.findall(r"by\s+`([^`]+)`, in\s+`benchmarks/results/([\w.]+)`", (ROOT / PERFORMANCE).read_text())
    assert len(stated) >= 6
    for command, file in stated:
        recorded = re.sub(r" --json \S+", "", report.read(RESULTS / file).provenance["command"])
        assert command == recorded, file


# What the tests above have looked at, besides SENTENCES.
CHECKED_TABLES = {
    "README.md": {"How fast": 4},
    PERFORMANCE: {
        "Forward": 1, "Backward": 1, "Grouped heads": 1, "float32": 1, "Decoding": 1, "What options cost": 2,
        "Host and memory": 1, "CPU": 1,
    },
}  # fmt: skip
CHECKED_SENTENCES = (
    r"\([\d.]+ and [\d.]+ times as a mean\); the backward is at [\d.]+ and [\d.]+ times",
    r"over the 36: (?:[\d.]+ times\s+[\w-]+(?:, |[.;]))+",
    r"`scaled_dot_product_attention`: \d+ µs of host time, torch's own \d+",
    r"at 65536 tokens take \d+ MiB beside their\s+inputs, FA2 \d+",
)
# What nobody measures, or nobody records: sizes, requirements, how long a build takes.
NOT_MEASURED = (
    r"head_dim 64 / 128",
    r"Python ≥ [\d.]+",
    r"torch ≥ [\d.]+",
    r"compute capability ≥ [\d.]+",
    r"takes a minute without nvcc, \d+ to \d+ on two cores",
)
FIGURE = re.compile(r"\d+\.\d+|\d+ (?:µs|ms|MiB|MB|%|times|TFLOP/s|TB/s)|\d+ (?:to|/) \d+")


@pytest.mark.parametrize("page", ["README.md", PERFORMANCE])
def test_no_figure_is_left_out(page: str) -> None:
    """A figure that is new on these pages needs a test, and a record."""
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    counted = {heading: len(tables(section(page, heading))) for heading in re.findall(r"^## (.+)$", text, re.MULTILINE)}
    with_figures = {h: n for h, n in counted.items() if n and h not in ("Which way in", "What runs where")}
    assert with_figures == CHECKED_TABLES[page]
    text = re.sub(r"^\|.*$", "", text, flags=re.MULTILINE)
    for sentence in (*(s for p, s in SENTENCES if p == page), *CHECKED_SENTENCES, *NOT_MEASURED):
        text = re.sub(sentence, "", text)
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)
    assert FIGURE.findall(text) == []
