"""A run as it is printed, drawn, kept and compared.

Every figure that is measured is one of which less is better: milliseconds, microseconds, MiB. A ratio is always what a
peer needs over what flash_ext needs: above 1, flash_ext is faster. That nobody is faster is claimed only where the
lower quartile of the rounds' ratios is above 1, too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypedDict

from benchmarks.origins import words_of
from benchmarks.peers import OURS
from benchmarks.provenance import headline
from benchmarks.timing import MOST_SPREAD, Sample, Timings

SCHEMA = "flash_ext.benchmarks/2"
READABLE_SCHEMAS = ("flash_ext.benchmarks/1", SCHEMA)  # the first has no spread, ratios and sustained
OF_MATMUL = "% of matmul"
BUSY = "*"  # behind a share of the ceiling above 100
DRAWN_AS_BARS = frozenset({"options", "host"})
DRAWN_LOGARITHMIC = frozenset({"memory", "decode"})
PANELS_IN_A_ROW = 4


class Spread(TypedDict):
    """Quartiles of what was measured, and of how many readings."""

    lower: float
    upper: float
    calls: int


def spread_of(sample: Sample) -> Spread:
    lower, upper = sample.quartiles
    return {"lower": lower, "upper": upper, "calls": len(sample.values)}


@dataclass
class Row:
    """One problem, and what each candidate needed for it."""

    table: str  # under which heading it stands
    label: str  # what tells it from the others of the table
    problem: dict[str, Any]  # every number that defines it
    measured: dict[str, float]  # by candidate, in the record's unit
    shown: dict[str, float] = field(default_factory=dict)  # the same in the record's shown_unit; empty: as measured
    figures: dict[str, float] = field(default_factory=dict)  # other columns
    missing: dict[str, str] = field(default_factory=dict)  # candidates that did not take part, and why
    spread: dict[str, Spread] = field(default_factory=dict)  # of measured
    ratio_spread: dict[str, Spread] = field(default_factory=dict)  # by peer: of the rounds' ratios
    sustained: dict[str, float] = field(default_factory=dict)  # as measured, in loops without pause; often not asked
    kernel: str = ""  # of ours, as explain() names it; often not asked

    @staticmethod
    def timed(timings: Timings, **fields_of_row: Any) -> Row:
        """A row of what was timed; ``fields_of_row``: the others."""
        samples = timings.bursts
        mine = samples.get(OURS)
        peers = {} if mine is None else {name: sample for name, sample in samples.items() if not is_ours(name)}
        return Row(
            measured=timings.medians(),
            spread={name: spread_of(sample) for name, sample in samples.items()},
            ratio_spread={name: spread_of(sample.over(samples[OURS])) for name, sample in peers.items()},
            sustained=dict(timings.sustained),
            **fields_of_row,
        )

    def ratios(self) -> dict[str, float]:
        """By peer; other forms of ours are none."""
        return _ratios(self.measured)

    def sustained_ratios(self) -> dict[str, float]:
        """The same of loops without pause; empty where these were not asked for."""
        return _ratios(self.sustained)

    def lower_ratios(self) -> dict[str, float]:
        """By peer: the lower quartile of the ratios; their median of a record that has no quartiles."""
        return {name: self.ratio_spread[name]["lower"] if self.ratio_spread else r for name, r in self.ratios().items()}

    def unsteady(self) -> dict[str, float]:
        """Candidates whose quartiles are too far apart to rely on, and how far, as a part of the median."""
        apart = {name: (s["upper"] - s["lower"]) / self.measured[name] for name, s in self.spread.items()}
        return {name: share for name, share in apart.items() if share > MOST_SPREAD}


def _ratios(times: Mapping[str, float]) -> dict[str, float]:
    mine = times.get(OURS)
    return {} if mine is None else {name: value / mine for name, value in times.items() if not is_ours(name)}


@dataclass
class Record:
    """A whole run. ``unit`` and ``shown_unit``: of ``Row.measured`` and ``Row.shown``."""

    benchmark: str
    unit: str
    shown_unit: str
    label_title: str
    provenance: dict[str, Any] = field(default_factory=dict)
    ceilings: dict[str, float] = field(default_factory=dict)  # ceilings.measure_ceilings
    rows: list[Row] = field(default_factory=list)
    schema: str = SCHEMA

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def why_no_record(record: Record) -> str | None:
    """Why nobody could rely on what was measured; None: it can be a record."""
    for row in record.rows:
        for name, share in row.unsteady().items():
            where = f"{row.table}, {row.label}: {name}"
            return f"{where} has quartiles {share:.0%} of its median apart, more than {MOST_SPREAD:.0%}"
    return None


def read(path: Path) -> Record:
    """A record that ``Record.write`` wrote, now or when its rows had fewer fields.

    Raises:
        ValueError: it is something else.
    """
    try:
        content = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict) or content.get("schema") not in READABLE_SCHEMAS:
        raise ValueError(f"{path} is not a record of this tool ({SCHEMA})")
    _check_fields(path, "the record", content, Record)
    for number, row in enumerate(content["rows"]):
        _check_fields(path, f"row {number}", row, Row)
    return Record(**{**content, "rows": [Row(**row) for row in content["rows"]]})


def _check_fields(path: Path, what: str, content: Mapping[str, Any], of: type[Record] | type[Row]) -> None:
    known = {f.name for f in fields(of)}
    required = {f.name for f in fields(of) if f.default is MISSING and f.default_factory is MISSING}
    if not required <= set(content) <= known:
        raise ValueError(f"{path}: {what} has the fields {sorted(content)}, expected {sorted(known)}")


def markdown(record: Record) -> str:
    """Headline, a table for each heading, a summary."""
    lines = [headline(record.provenance), f"`{record.provenance['command']}`"]
    if record.provenance["peers"]:
        lines.append("peers: " + "; ".join(_peers(record.provenance)))
    if record.ceilings:
        lines.append("ceilings: " + ", ".join(_ceiling(*item) for item in record.ceilings.items()))
    for title in tables(record):
        rows = [row for row in record.rows if row.table == title]
        lines += [
            "",
            f"**{title}** ({record.shown_unit})",
            "",
            *table_of(rows, record.label_title, record.provenance["device"]),
        ]
    if any(_beats_ceiling(row, record.provenance["device"]) for row in record.rows):
        lines += ["", f"{BUSY} the machine was busy: the matrix product that is the ceiling ran slower than it can"]
    lines += summary(record) + _missing(record)
    return "\n".join(lines)


def _peers(provenance: Mapping[str, Any]) -> list[str]:
    """Who took part, and where it comes from as far as it is known."""
    origins = {name: words_of(of) for name, of in provenance.get("peer_origins", {}).items()}
    return [
        f"{name} = {title}" + (f" ({origins[name]})" if origins.get(name) else "")
        for name, title in provenance["peers"].items()
    ]


def tables(record: Record) -> list[str]:
    return list(dict.fromkeys(row.table for row in record.rows))


def _ceiling(name: str, value: float) -> str:
    kind, _, unit = name.rpartition("_")
    return f"{kind.replace('_', ' ')} {number(value)} {'TFLOP/s' if unit == 'tflops' else 'TB/s'}"


def _beats_ceiling(row: Row, device: str) -> bool:
    """float32 on a GPU may: its products are of 16 bits there, and cuBLAS's not."""
    return row.figures.get(OF_MATMUL, 0) > 100 and (device == "cpu" or row.problem.get("dtype") != "float32")


def table_of(rows: Sequence[Row], label_title: str, device: str) -> list[str]:
    """A markdown table of rows with the same heading."""
    candidates = candidates_of(rows)
    peers = any(row.ratios() for row in rows)
    figures = list(dict.fromkeys(name for row in rows for name in row.figures))
    ratios = ["/ best peer"] + (["/ fa2"] if "fa2" in candidates else []) if peers else []
    sustained = [name for name in candidates if any(name in row.sustained for row in rows)]
    sustained_ratio = ["/ best peer, sustained"] if any(row.sustained_ratios() for row in rows) else []
    kernel = ["kernel"] if any(row.kernel for row in rows) else []
    titles = [*candidates, *ratios, *figures, *(f"{name}, sustained" for name in sustained), *sustained_ratio, *kernel]
    lines = [line([label_title, *titles]), "| --- |" + " ---: |" * len(titles)]
    for row in rows:
        values = row.shown or row.measured
        cells = [row.label, *(number(values.get(name)) for name in candidates)]
        if peers:
            cells.append(ratio(best_ratio(row)))
            cells += [ratio(row.ratios().get("fa2"))] if "fa2" in candidates else []
        busy = {OF_MATMUL: BUSY} if _beats_ceiling(row, device) else {}
        cells += [number(row.figures.get(name)) + busy.get(name, "") for name in figures]
        cells += [number(shown_sustained(row, name)) for name in sustained]
        cells += [ratio(min(row.sustained_ratios().values(), default=None))] if sustained_ratio else []
        lines.append(line([*cells, *([row.kernel or "-"] if kernel else [])]))
    return lines


def shown_sustained(row: Row, name: str) -> float | None:
    """In the unit of what is shown: a rate falls as the time grows."""
    if name not in row.sustained:
        return None
    return row.shown[name] * row.measured[name] / row.sustained[name] if row.shown else row.sustained[name]


def candidates_of(rows: Iterable[Row]) -> list[str]:
    """Ours first, the others in the order of the first row that has them."""
    names = dict.fromkeys(name for row in rows for name in row.measured)
    return sorted(names, key=lambda name: not is_ours(name))


def is_ours(name: str) -> bool:
    """Of the library there can be several forms in a row."""
    return name.startswith(OURS)


def best_ratio(row: Row) -> float | None:
    return min(row.ratios().values(), default=None)


def line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def number(value: float | None) -> str:
    """Three digits, or as many as stand before the point."""
    return "-" if value is None else f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def summary(record: Record) -> list[str]:
    """Of bursts and of loops without pause, and in how many rows no peer is faster in bursts."""
    bursts = _summary(record, "peer over flash_ext", Row.ratios)
    loops = _summary(record, "the same without pause", Row.sustained_ratios)
    return [*bursts, "", none_faster(record.rows), *loops] if bursts else []


def _summary(record: Record, what: str, ratios: Callable[[Row], dict[str, float]]) -> list[str]:
    """Geometric mean and smallest of the ratios, for each heading and over all; empty where there are none."""
    peers = [name for name in candidates_of(record.rows) if not is_ours(name)]
    groups = [(title, [row for row in record.rows if row.table == title]) for title in tables(record)]
    groups += [("all", record.rows)] if len(groups) > 1 else []
    lines = ["", f"**{what}: geometric mean (smallest)**", "", line(["", *peers, "best peer"])]
    lines.append("| --- |" + " ---: |" * (len(peers) + 1))
    found = False
    for title, rows in groups:
        of_rows = [found_of for row in rows if (found_of := ratios(row))]
        columns = [[of_row[peer] for of_row in of_rows if peer in of_row] for peer in peers]
        columns.append([min(of_row.values()) for of_row in of_rows])
        found |= any(columns)
        lines.append(line([title, *(f"{geometric_mean(c):.2f} ({min(c):.2f})" if c else "-" for c in columns)]))
    return lines if found else []


def none_faster(rows: Iterable[Row]) -> str:
    """In how many rows flash_ext is faster than every peer by its median, and in how many the spread bears it out."""
    compared = [row for row in rows if row.ratios()]
    by_median = sum(min(row.ratios().values()) > 1 for row in compared)
    for_certain = sum(min(row.lower_ratios().values()) > 1 for row in compared)
    spread = f", in {for_certain} by the lower quartile too" if any(row.ratio_spread for row in compared) else ""
    return f"no peer is faster in {by_median} of {len(compared)} rows{spread}"


def _missing(record: Record) -> list[str]:
    """Who did not take part, each reason once."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in record.rows:
        for name, reason in row.missing.items():
            reasons.setdefault((name, reason), []).append(f"{row.table} {row.label}")
    return [""] * bool(reasons) + [
        f"- {name}: not in {places[0]}{f' and {len(places) - 1} more' if len(places) > 1 else ''}: {reason}"
        for (name, reason), places in reasons.items()
    ]


def compare(before: Record, after: Record) -> tuple[str, float | None]:
    """What became of each row, in a table, and the smallest of the ratios (None: no row is in both).

    The peers of both runs tell how much of it is the machine: "steady" is the ratio over theirs. "moved" says what
    became faster or slower by more than its spread: with the machine's part taken out, the quartiles of the two runs
    enclose ranges that do not overlap.
    """
    if before.benchmark != after.benchmark:
        raise ValueError(f"cannot compare {before.benchmark} with {after.benchmark}")
    lines = [f"before: {headline(before.provenance)}", f"after:  {headline(after.provenance)}"]
    lines += [f"{before.benchmark}: {OURS} before over after, in {before.unit}; above 1, it became better", ""]
    lines += [line(["table", before.label_title, "before", "after", "before / after", "peers", "steady", "moved"])]
    lines += ["| --- | --- |" + " ---: |" * 5 + " --- |"]
    earlier = {_key(row): row for row in before.rows}
    ratios, moved = [], []
    for row in after.rows:
        old = earlier.get(_key(row))
        if old is None or OURS not in old.measured or OURS not in row.measured:
            continue
        change = old.measured[OURS] / row.measured[OURS]
        common = [old.measured[name] / row.measured[name] for name in row.ratios() if name in old.measured]
        peers = geometric_mean(common) if common else None
        ratios.append(change)
        moved.append(_moved(old, row, peers or 1.0))
        cells = [number(old.measured[OURS]), number(row.measured[OURS]), ratio(change), ratio(peers)]
        lines.append(line([row.table, row.label, *cells, ratio(change / peers if peers else None), moved[-1]]))
    if not ratios:
        return "\n".join([*lines, "", "no row is in both records"]), None
    lines += ["", f"geometric mean {geometric_mean(ratios):.3f}, smallest {min(ratios):.3f}, {len(ratios)} rows"]
    if "-" not in moved:
        lines += [f"more than their spread: {moved.count('faster')} faster, {moved.count('slower')} slower"]
    alone = len(before.rows) + len(after.rows) - 2 * len(ratios)
    lines += [f"{alone} rows are in one record only"] if alone else []
    return "\n".join(lines), min(ratios)


def _moved(before: Row, after: Row, machine: float) -> str:
    """``machine``: what the peers needed before over what they need now."""
    if OURS not in before.spread or OURS not in after.spread:
        return "-"
    old, new = before.spread[OURS], after.spread[OURS]
    if new["upper"] < old["lower"] / machine:
        return "faster"
    return "slower" if new["lower"] > old["upper"] / machine else ""


def _key(row: Row) -> str:
    return json.dumps([row.table, row.label, row.problem], sort_keys=True)


def plot(record: Record, path: Path) -> None:
    """A panel for each heading."""
    from matplotlib.figure import Figure

    titles = tables(record)
    across = min(PANELS_IN_A_ROW, len(titles))
    down = -(-len(titles) // across)
    figure = Figure(figsize=(5 * across, 3.6 * down), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).flat
    for axes, title in zip(panels, titles, strict=False):
        draw = _bars if record.benchmark in DRAWN_AS_BARS else _lines
        draw(axes, record, [row for row in record.rows if row.table == title])
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    for axes in list(figure.axes)[len(titles) :]:
        axes.set_visible(False)
    figure.suptitle(headline(record.provenance), fontsize=9)
    figure.savefig(path, dpi=150)


def _lines(axes: Any, record: Record, rows: Sequence[Row]) -> None:
    for name in candidates_of(rows):
        values = [(row.shown or row.measured).get(name, math.nan) for row in rows]
        axes.plot(range(len(rows)), values, "o-", label=name, linewidth=2.5 if name == OURS else 1.2)
    axes.set_xticks(range(len(rows)), [row.label for row in rows], rotation=45, ha="right", fontsize=8)
    axes.set(xlabel=record.label_title, ylabel=record.shown_unit)
    if record.benchmark in DRAWN_LOGARITHMIC:
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])


def _bars(axes: Any, record: Record, rows: Sequence[Row]) -> None:
    names = candidates_of(rows)
    height = 0.8 / len(names)
    for number_of_bar, name in enumerate(names):
        values = [(row.shown or row.measured).get(name, math.nan) for row in rows]
        axes.barh([at + number_of_bar * height for at in range(len(rows))], values, height, label=name)
    axes.set_yticks(range(len(rows)), [row.label for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(record.shown_unit)
