"""What makes a run of a benchmark a record, what a record says of where it comes from, and how two are compared."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path

import pytest
import torch

import flash_ext
from benchmarks import (
    arguments,
    gpu_state,
    origins,
    provenance,
    report,
)
from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.report import Row
from benchmarks.timing import Effort
from tests.build.benchmark_runs import record, row, timings

pytestmark = pytest.mark.usefixtures("small_ceilings")

ROOT = Path(__file__).resolve().parents[2]


def test_command_is_printed_without_folders() -> None:
    command = ["benchmarks", "options", "--json", "/home/me/a.json", "--plot=/home/me/b.png", "--only", "bias (1, h"]
    printed = provenance.printable_command(command)
    assert printed == "python -m benchmarks options --json a.json --plot=b.png --only 'bias (1, h'"


def test_commit_outside_of_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    assert provenance.commit() == flash_ext.build_info()["git_commit"]
    monkeypatch.setenv("PATH", "")
    assert provenance.commit() == flash_ext.build_info()["git_commit"]


RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


def test_recorded_runs_can_be_read() -> None:
    assert RESULTS
    for path in RESULTS:
        assert report.read(path).rows


def test_recorded_runs_can_be_relied_on() -> None:
    """But for those of the first schema, which did not say."""
    for kept in (report.read(path) for path in RESULTS):
        if kept.schema != report.SCHEMA:
            continue
        origin = kept.provenance
        assert not origin["trial"] and not origin["commit"].endswith("dirty")
        assert origin["rounds"]["fewest"] >= provenance.RECORD_ROUNDS
        for kept_row in kept.rows:
            assert all(s["calls"] >= provenance.RECORD_ROUNDS for s in kept_row.spread.values())


# Recorded before rows were refused for it; no page has the first two.
UNSTEADY = {
    ("h200_module.json", "forward, bfloat16, 32 x 512 x 768, 12 heads", "attn_mask, bool", "flash_ext"),
    ("h200_module.json", "forward, bfloat16, 32 x 512 x 768, 12 heads", "attn_mask, float", "flash_ext"),
    ("h200_host.json", "bfloat16, 1 x 128 x 4 x 64", "forward and backward", "fa3"),
}


def test_recorded_runs_are_steady() -> None:
    """A figure whose quartiles are a quarter of it apart says how busy the machine was."""
    found = {
        (path.name, kept_row.table, kept_row.label, name)
        for path in RESULTS
        for kept_row in report.read(path).rows
        for name in kept_row.unsteady()
    }
    assert found == UNSTEADY


# What is a record


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A repository with a kernel and a page, whose libraries are built."""
    for file in ("csrc/kernel.cpp", "docs/page.md"):
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text("first")
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    built_from = git(tmp_path, "rev-parse", "HEAD").strip()
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.setattr(flash_ext, "build_info", lambda: {"git_commit": built_from})
    return tmp_path


ENOUGH = Effort(most=30, fewest=12, budget_ms=1)


def test_what_is_committed_and_built_is_a_record(checkout: Path) -> None:
    assert provenance.why_no_record(ENOUGH) is None
    (checkout / "docs" / "page.md").write_text("second")
    git(checkout, "commit", "-am", "second")
    assert provenance.why_no_record(ENOUGH) is None


def test_few_rounds_are_no_record(checkout: Path) -> None:
    assert provenance.why_no_record(Effort(most=11, fewest=11, budget_ms=1)) == "11 rounds are fewer than 12"
    assert arguments.EFFORT.fewest >= 12 > arguments.QUICK_EFFORT.fewest


def test_a_changed_checkout_is_no_record(checkout: Path) -> None:
    (checkout / "csrc" / "other.cpp").write_text("untracked")
    assert provenance.why_no_record(ENOUGH) == "no commit holds csrc/other.cpp"
    (checkout / "docs" / "page.md").write_text("changed")
    assert "the sources differ from their commit" in (provenance.why_no_record(ENOUGH) or "")


def test_libraries_of_other_sources_are_no_record(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (checkout / "csrc" / "kernel.cpp").write_text("second")
    git(checkout, "commit", "-am", "second")
    assert (provenance.why_no_record(ENOUGH) or "").endswith("whose sources are others: build again")
    for built_from, reason in (
        (None, "nobody knows which commit the libraries are from"),
        ("1+dirty", "the libraries"),
    ):
        monkeypatch.setattr(flash_ext, "build_info", lambda built_from=built_from: {"git_commit": built_from})
        assert reason in (provenance.why_no_record(ENOUGH) or "")


def test_what_is_no_record_is_kept_as_a_trial_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(arguments, "why_no_record", lambda effort: "for some reason")
    asked = ["host", "--device", "cpu", "--calls", "1", "--json", str(tmp_path / "run.json")]
    with pytest.raises(SystemExit):
        main(asked)
    assert "this would be no record: for some reason (--trial keeps it" in capsys.readouterr().err
    assert main([*asked, "--trial"]) == 0
    assert report.read(tmp_path / "run.json").provenance["trial"]


def steady(*quartiles: float) -> Row:
    found = row(flash_ext=100.0)
    found.spread = {"flash_ext": {"lower": quartiles[0], "upper": quartiles[1], "calls": 12}}
    return found


@pytest.mark.parametrize(("quartiles", "refused"), [((90.0, 115.0), False), ((90.0, 115.1), True)])
def test_what_scatters_is_no_record(
    quartiles: tuple[float, float],
    refused: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is only known behind the run: the run is kept as a trial, and says so."""
    found = record(steady(90.0, 110.0), steady(*quartiles))
    found.provenance["trial"] = False
    monkeypatch.setattr(arguments, "why_no_record", lambda effort: None)
    monkeypatch.setattr("benchmarks.__main__.run", lambda chosen, command: found)
    asked = ["host", "--device", "cpu", "--json", str(tmp_path / "run.json")]
    assert main(asked) == int(refused)
    assert ("has quartiles 25% of its median apart" in capsys.readouterr().err) == refused
    assert report.read(tmp_path / "run.json").provenance["trial"] == refused


def test_load_of_the_machine_is_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As it is before the run, which is a load itself."""
    monkeypatch.setattr("os.getloadavg", lambda: (1.234, 5.0, 6.0))
    assert main(["host", "--device", "cpu", "--calls", "1", "--trial", "--json", str(tmp_path / "run.json")]) == 0
    kept = report.read(tmp_path / "run.json")
    assert kept.provenance["load_average"] == 1.23
    assert ", load 1.23 before" in report.markdown(kept)


def test_environment_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_EXT_HOPPER", "0")
    monkeypatch.setenv("FLASH_EXT_CACHE", "/home/me/cache")
    found = provenance.environment()
    assert found["FLASH_EXT_HOPPER"] == "0" and found["FLASH_EXT_CACHE"] == "cache"
    assert all(name.startswith("FLASH_EXT_") for name in found)


def test_packages_that_a_benchmark_uses_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers, where models are those of transformers."""
    assert BENCHMARKS["models"].packages == ("transformers",)
    monkeypatch.setattr(provenance, "version", lambda name: {"transformers": "5.1", "triton": "3.2"}[name])
    for benchmark, expected in (("models", {"transformers": "5.1"}), ("host", {})):
        monkeypatch.setattr(provenance, "PackageNotFoundError", KeyError)
        packages = BENCHMARKS[benchmark].packages
        found = provenance.provenance(["x"], torch.device("cpu"), {}, {}, ENOUGH, True, packages)
        assert found["packages"] == {"triton": "3.2", **expected}


def test_origin_of_a_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    assert origins.package_origin("attention-of-somebody", None) == {}
    info = tmp_path / "attention_of_somebody-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: attention-of-somebody\nVersion: 1.2\n")
    (info / "direct_url.json").write_text('{"vcs_info": {"vcs": "git", "commit_id": "0123456789abcdef"}}')
    found = origins.package_origin("attention-of-somebody", report)
    assert found["version"] == "1.2" and found["commit"] == "0123456789ab" and len(found["sha256"]) == 12


def test_origin_of_what_is_built_by_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No distribution knows its commit: the environment says it. What pip installed is not taken for another."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COMMIT_OF_ATTENTION_OF_SOMEBODY", "fedcba98765432100123456789abcdef01234567")
    found = origins.package_origin("attention-of-somebody", report)
    assert found["commit"] == "fedcba987654" and "version" not in found
    info = tmp_path / "attention_of_somebody-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: attention-of-somebody\nVersion: 1.2\n")
    assert origins.package_origin("attention-of-somebody", None) == {"version": "1.2", "commit": "fedcba987654"}
    (info / "direct_url.json").write_text('{"vcs_info": {"vcs": "git", "commit_id": "0123456789abcdef"}}')
    assert origins.package_origin("attention-of-somebody", None)["commit"] == "0123456789ab"
    monkeypatch.setenv("COMMIT_OF_ATTENTION_OF_SOMEBODY", "the newest")
    with pytest.raises(ValueError, match="COMMIT_OF_ATTENTION_OF_SOMEBODY must be a commit"):
        origins.package_origin("attention-of-somebody", None)


def test_origins_are_shown() -> None:
    shown = record(row(flash_ext=1.0))
    shown.provenance |= {
        "peers": {"fa3": "FlashAttention-3", "other": "another", "by_hand": "a third"},
        "peer_origins": {
            "fa3": {"version": "3.0.0", "commit": "0123456789ab", "sha256": "c"},
            "by_hand": {"sha256": "d"},
        },
    }
    assert (
        "peers: fa3 = FlashAttention-3 (3.0.0, commit 0123456789ab); other = another; by_hand = a third (library d)\n"
        in report.markdown(shown)
    )


def test_state_of_the_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        gpu_state, "_command", lambda fields: ["sh", "-c", "printf '1980, 3201, 600.5, 50\n1755, 32'; :"]
    )
    with gpu_state.GpuState(torch.device("cuda")) as state:
        assert state._process is not None
        state._process.wait()
    summary = state.summary()
    assert summary["readings"] == 1 and summary["sm_clock_mhz"] == [1980, 1980, 1980] and summary["power_w"][1] == 600.5
    monkeypatch.setattr(gpu_state, "_command", lambda fields: ["there-is-no-such-program"])
    for device in ("cuda", "cpu"):
        with gpu_state.GpuState(torch.device(device)) as state:
            pass
        assert state.summary() == {}


def test_compare_tells_what_moved_from_what_scatters() -> None:
    def one(name: str, scale: float = 1.0, machine: float = 1.0) -> Row:
        ours = [machine * scale * ms for ms in (0.98, 1.0, 1.0, 1.02)]
        return Row.timed(timings(flash_ext=ours, fa2=[machine] * 4), table="t", label=name, problem={})

    before = record(one("same"), one("faster"), one("slower"))
    after = record(one("same", 1.005, 1.1), one("faster", 0.9, 1.1), one("slower", 1.1, 1.1))
    text, smallest = report.compare(before, after)
    assert [line.split("|")[-2].strip() for line in text.splitlines() if line.startswith("| t ")] == [
        "", "faster", "slower",
    ]  # fmt: skip
    assert "more than their spread: 1 faster, 1 slower" in text and smallest == pytest.approx(1 / 1.21)


def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    record(row("1", flash_ext=2.0, fa2=4.0), row("2", flash_ext=1.0), row("3", flash_ext=1.0)).write(before)
    record(row("1", flash_ext=1.0, fa2=3.2), row("2", flash_ext=1.25)).write(after)
    assert main(["compare", str(before), str(after)]) == 0
    printed = capsys.readouterr().out
    assert "| t | 1 | 2.00 | 1.00 | 2.00 | 1.25 | 1.60 | - |" in printed
    assert "| t | 2 | 1.00 | 1.25 | 0.80 | - | - | - |" in printed
    assert "geometric mean 1.265, smallest 0.800, 2 rows" in printed
    assert "1 rows are in one record only" in printed
    assert main(["compare", str(before), str(after), "--at-least", "0.75"]) == 0
    assert main(["compare", str(before), str(after), "--at-least", "0.97"]) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a record"),
        ('{"schema": "flash_ext.benchmarks/1"}', "has the fields"),
    ],
)
def test_what_is_no_record(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        report.read(tmp_path / "bad.json")


def test_record_of_the_first_schema(tmp_path: Path) -> None:
    content = json.loads(json.dumps(dataclasses.asdict(record(row(flash_ext=1.0)))))
    content["schema"] = "flash_ext.benchmarks/1"
    for name in ("spread", "ratio_spread", "sustained"):
        del content["rows"][0][name]
    (tmp_path / "old.json").write_text(json.dumps(content))
    (kept,) = report.read(tmp_path / "old.json").rows
    assert kept == row(flash_ext=1.0)
    content["rows"][0]["surprise"] = 1
    (tmp_path / "other.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="row 0 has the fields"):
        report.read(tmp_path / "other.json")


def test_records_of_different_benchmarks_are_not_compared(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot compare forward with decode"):
        report.compare(record(), record(benchmark="decode"))
