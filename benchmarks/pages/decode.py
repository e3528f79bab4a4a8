"""Figures of decoding: ``h200_decode.json``."""

from __future__ import annotations

import re

from benchmarks.pages.records import NAMES, find, per_cent_less, record_of, rows_of


def decode_rows() -> list[str]:
    """How many, and how many of them torch's backends take part in."""
    rows = rows_of("h200_decode.json")
    by_peer = {peer: sum(peer in row["measured"] for row in rows) for peer in ("fa3", "fa2", "cudnn")}
    assert by_peer["fa3"] == len(rows) and by_peer["fa2"] == by_peer["cudnn"]
    return [str(len(rows)), str(by_peer["fa2"])]


def decodes_lost_to_cudnn() -> list[str]:
    """In how many of how many rows it takes less time, and how much less at most: in per cent, rounded up."""
    ratios = [row.ratios()["cudnn"] for row in record_of("h200_decode.json").rows if "cudnn" in row.measured]
    return [str(sum(ratio < 1 for ratio in ratios)), str(len(ratios)), str(per_cent_less(min(ratios)))]


def decode_cells(header: list[str], line: list[str]) -> list[str]:
    titles = [title for title in header if title in (*NAMES, "paged", "read")]
    labels = line[: len(header) - len(titles)]  # a column that is new has no cells yet
    heads_q, heads_kv, batch, seqlen = map(int, re.findall(r"\d+", " ".join(labels[:2])))
    shape = {"heads_q": heads_q, "heads_kv": heads_kv, "head_dim": 128, "batch": batch, "seqlen": seqlen}
    row = find(rows_of("h200_decode.json"), **shape, workload=None)
    times = {title: row["measured"][name] for title, name in NAMES.items() if name in row["measured"]}
    times |= {"paged": row["measured"]["flash_ext paged"], "read": row["figures"]["read us"]}
    return [*labels, *(f"{times[title]:.1f}" for title in titles)]


def serving_cells(header: list[str], line: list[str]) -> list[str]:
    """As an engine decodes: the workload, heads and head_dim, and batch x context say which row."""
    heads_q, heads_kv, head_dim, batch, seqlen = map(int, re.findall(r"\d+", " ".join(line[1:3])))
    shape = {"heads_q": heads_q, "heads_kv": heads_kv, "head_dim": head_dim, "batch": batch, "seqlen": seqlen}
    measured = find(rows_of("h200_decode.json"), **shape, workload=None if line[0] == "full" else line[0])["measured"]
    times = [measured.get(NAMES[title]) for title in header[3:]]
    return [*line[:3], *("" if time is None else f"{time:.1f}" for time in times)]
