"""README.md and the pages: recipes run as they stand, figures are those of the records. What the pages name and link to
is checked by tools/check_pages.py."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import flash_ext
from benchmarks.pages import records
from benchmarks.pages.all_pages import FIGURES
from benchmarks.pages.figures import Commands, Gone, Section, Sentence, Table, substituted
from benchmarks.pages.modules import encoder_rows
from benchmarks.pages.options import readme_option_cells
from benchmarks.pages.places import PERFORMANCE
from benchmarks.pages.places import README as README_PAGE
from benchmarks.pages.records import TIMES, times_as_fast
from benchmarks.pages.training import contested_forwards
from benchmarks.report import Row, Spread
from tests.build.benchmark_runs import record

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "setup.py").exists())
README = (ROOT / "README.md").read_text()


def test_recipes_run() -> None:
    recipes = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    assert len(recipes) >= 9
    for way in ("flash_ext.activated()", "attn_implementation=register()", "flash_ext.as_flash_attn()"):
        assert any(way in recipe for recipe in recipes)
    names: dict[str, object] = {}
    if importlib.util.find_spec("transformers") is None:
        recipes = [recipe for recipe in recipes if "import register" not in recipe]
    for recipe in recipes:
        exec(compile(recipe, "README.md", "exec"), names)


def test_more_recipes_run() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    names: dict[str, Any] = {"torch": torch, "flash_ext": flash_ext}
    for recipe in re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL):
        exec(compile(recipe, "recipes.md", "exec"), names)
        if "prefix_k" in recipe:  # as prompts that each have a copy of the prefix
            k, v = (torch.cat([names[f"prefix_{x}"].expand(4, -1, -1, -1), names[x]], dim=1) for x in "kv")
            out, lse = flash_ext.attention(names["q"], k, v, causal=True, return_lse=True)
            torch.testing.assert_close((names["out"], names["lse"]), (out, lse))
    assert names["weights"].shape == (2, 4, 30, 30)


# The tensors, and the group of one process, that the recipes of integrations.md speak of.
PRELUDE = """
import torch, flash_ext
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group, mesh = dist.group.WORLD, dist.device_mesh.init_device_mesh("cpu", (1,))
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


# ---- Figures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("figure", FIGURES, ids=str)
def test_figures_are_those_of_the_records(figure: Table | Sentence | Commands) -> None:
    """`python -m benchmarks.pages --write` puts them there."""
    text = (ROOT / figure.page).read_text()
    assert figure.apply(text) == text


def test_encoders_that_gain_little_on_a_cpu() -> None:
    """The rows that docs/performance.md names, with the reason."""
    found = {
        (row["problem"]["dtype"], row["label"].partition(",")[0])
        for row in encoder_rows("cpu_epyc_encoder.json")
        if row["measured"]["torch"] < 1.05 * row["measured"]["flash_ext"]
    }
    sizes = [(dtype, size) for dtype in ("bfloat16", "float32") for size in ("16 x 128", "16 x 197")]
    assert found == set(sizes)
    text = " ".join((ROOT / PERFORMANCE).read_text().split())
    assert f"16 {TIMES} 128 and the ViT gain under 5 % in both dtypes" in text


def test_a_forward_that_a_peer_may_win_is_counted() -> None:
    """By the lower quartile of the ratios: README and the page on performance say how many there are."""
    page = " ".join((ROOT / PERFORMANCE).read_text().split())
    lost = len(contested_forwards())
    assert f"in {lost} of them a peer may be faster" in page
    assert f"the fastest in {36 - lost} of 36 training shapes" in README


def test_bounds_are_of_all_rows_and_of_the_lower_quartile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Who writes "1.1 to 2 times as fast" is right in three rounds of four, and leaves out no row that a peer wins."""

    def kept(label: str, lower: float, median: float, **problem: int) -> Row:
        spread = {"peer": Spread(lower=lower, upper=2 * median, calls=12)}
        return Row("t", label, problem, {"flash_ext": 1.0, "peer": median}, ratio_spread=spread)

    alone = Row("t", "without the peer", {}, {"flash_ext": 1.0})
    record(kept("1", 1.04, 1.2, n=1), kept("2", 0.93, 1.01, n=2), kept("3", 1.5, 2.0, n=1), alone).write(
        tmp_path / "r.json"
    )
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    assert times_as_fast("r.json", "peer") == ["0.93", "2.00"]
    assert times_as_fast("r.json", "peer", n=1) == ["1.04", "2.00"]


def test_every_sentence_takes_its_bounds_from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "bounds_of_speed", lambda rows, peer: ["low", "high"])
    sentences = [figure for figure in FIGURES if isinstance(figure, Sentence)]
    claims = [sentence for sentence in sentences if re.search(r"to.*times.*as.*fast", sentence.pattern)]
    assert len(claims) >= 4
    for sentence in claims:
        assert set(sentence.values()) == {"low", "high"}, sentence


def test_peers_stand_beside_options_where_they_are_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = [
        Row("t", label, {"direction": direction, "head_dim": 128}, {"flash_ext": 1.0, **peers})
        for direction, label, peers in (
            ("forward", "bias (1, h, q, k)", {"efficient": 2.0}),
            ("backward", "bias (1, h, q, k), its gradient", {"efficient": 3.0, "flex": 4.0}),
        )
    ]
    record(*rows).write(tmp_path / "h200_options.json")
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    header = ["", "flash-ext", "torch, efficient", "FlexAttention"]
    name = "bias with gradient"
    assert readme_option_cells(header, [name]) == [name, "1.00 + 1.00", "2.00 + 3.00", ""]


@pytest.mark.parametrize("kind", [Table, Sentence])
def test_a_figure_that_is_another_is_seen(kind: type) -> None:
    """And put right; what is gone is an error."""
    for figure in (figure for figure in FIGURES if isinstance(figure, kind)):
        text = (ROOT / figure.page).read_text()
        assert figure.apply(with_other_digits(figure, text)) == text
        with pytest.raises(Gone):
            figure.apply("nothing of the kind")


def with_other_digits(figure: Any, text: str) -> str:
    """Each digit of its figures is another, those that say which row it is are not."""
    if isinstance(figure, Table):
        start, end = figure.place(text)
        header, rule, *lines = text[start:end].splitlines(keepends=True)
        head, bar, last = lines[-1].rstrip("|\n").rpartition("|")
        changed = head + bar + re.sub(r"\d", lambda digit: str((int(digit[0]) + 1) % 10), last) + "|\n"
        return text[:start] + "".join([header, rule, *lines[:-1], changed]) + text[end:]
    found = re.compile(figure.pattern).search(text, text.find(figure.behind))
    return substituted(text, found, ["7" for _ in found.groups()])


# What nobody measures, or nobody records: sizes, requirements, how long a build takes, a bound that a test above has.
NOT_MEASURED = (
    r"head_dim 64 / 128",
    r"the ViT gain under 5 %",
    r"Python ≥ [\d.]+",
    r"torch ≥ [\d.]+",
    r"compute capability ≥ [\d.]+",
    r"nvcc ≥ [\d.]+",
    r"\d+ to \d+ minutes on two cores",
)
FIGURE = re.compile(r"\d+\.\d+|\d+ (?:µs|ms|MiB|MB|%|times|TFLOP/s|TB/s)|\d+ (?:to|/) \d+")
OF_WORDS = ("Which way in", "What runs where")  # sections whose tables hold no figures


@pytest.mark.parametrize("page", [README_PAGE, PERFORMANCE])
def test_no_figure_is_left_out(page: str) -> None:
    """A figure that is new on these pages needs a rule in benchmarks/pages, and a record."""
    rules = [figure for figure in FIGURES if figure.page == page]
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    for heading in OF_WORDS:
        text = re.sub(rf"^## {heading}\n.*?^(?=## )", "", text, flags=re.MULTILINE | re.DOTALL)
    for section in (rule for rule in rules if isinstance(rule, Section)):  # all of it is the record's
        start = text.index(section.behind)
        text = text[:start] + text[text.index("\n## ", start + 1) :]
    tables = [rule for rule in rules if isinstance(rule, Table) and not isinstance(rule, Section)]
    assert len(re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)) == len(tables)
    text = re.sub(r"^\|.*$", "", text, flags=re.MULTILINE)
    for sentence in (*(rule.pattern for rule in rules if isinstance(rule, Sentence)), *NOT_MEASURED):
        text = re.sub(sentence, "", text)
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)
    assert FIGURE.findall(text) == []
