"""PyTorch's own tests of its attention, without and with ``flash_ext.activate()``.

    python tools/pytorch_sdpa_tests.py pytorch/test/test_transformers.py [--at-most 60] [-n 4] [-- pytest's arguments]

The file comes from a checkout of PyTorch at the tag of the torch that is installed; ``pip install expecttest`` too. It
prints the tests that fail under ``activate()`` alone, and exits with 1 if there are any. ``--at-most`` takes a fixed
sample of about so many variants of each test. flash_ext is the one that Python imports here.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ACTIVATE, AT_MOST = "FLASH_EXT_TOOL_ACTIVATE", "FLASH_EXT_TOOL_AT_MOST"

# ---- In the process of the tests: a plugin of pytest ----------------------------------------------------------------


def pytest_configure(config: Any) -> None:
    if os.environ.get(ACTIVATE) == "1":
        import flash_ext

        flash_ext.activate()


def pytest_collection_modifyitems(items: list[Any]) -> None:
    at_most = int(os.environ.get(AT_MOST, "0"))
    if at_most == 0:
        return
    sizes = Counter(map(_test_of, items))
    items[:] = [item for item in items if zlib.crc32(item.name.encode()) % -(-sizes[_test_of(item)] // at_most) == 0]


def _test_of(item: Any) -> tuple[str, str]:
    """What the variants of a test have in common: their class, and the name up to the first number."""
    return item.nodeid.split("::")[1], re.split(r"\d", item.name)[0]


# ---- The two runs ---------------------------------------------------------------------------------------------------


def run(tests: Path, activate: bool, at_most: int, workers: str, arguments: list[str]) -> dict[str, str]:
    """Of each test that ran: "passed", "skipped" or "failed"."""
    here, root = Path(__file__).resolve().parent, Path(__file__).resolve().parents[1]
    path = os.pathsep.join([str(here), str(root), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, ACTIVATE: str(int(activate)), AT_MOST: str(at_most)}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider", "-p", Path(__file__).stem]
        command += ["-n", workers] if workers != "0" else []
        command += [f"--junitxml={report}", "--rootdir", str(tests.parent), tests.name, *arguments]
        ran = subprocess.run(command, cwd=tests.parent, env=environment, capture_output=True, text=True)
        if not report.exists():
            raise SystemExit(f"pytest failed to start:\n{ran.stdout[-4000:]}{ran.stderr[-4000:]}")
        cases = ElementTree.parse(report).getroot().iter("testcase")
        return {f"{case.get('classname')}::{case.get('name')}": _outcome(case) for case in cases}


def _outcome(case: ElementTree.Element) -> str:
    kinds = {child.tag for child in case}
    if kinds & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in kinds else "passed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", type=Path, help="PyTorch's test/test_transformers.py")
    parser.add_argument("--at-most", type=int, default=0, help="so many variants of a test, about; 0: all")
    parser.add_argument("-n", default="0", dest="workers", help="processes, by pytest-xdist")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, for_pytest = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    tests = options.tests.resolve()
    found = {}
    for activate in (False, True):
        found[activate] = run(tests, activate, options.at_most, options.workers, for_pytest)
        counts = Counter(found[activate].values())
        title = "under activate()" if activate else "torch alone"
        print(f"{title}: {', '.join(f'{counts[kind]} {kind}' for kind in ('passed', 'failed', 'skipped'))}", flush=True)
    worse = [name for name, outcome in found[True].items() if outcome == "failed" != found[False].get(name)]
    print(f"failed under activate() alone: {len(worse)}")
    for name in worse:
        print(f"  {name}")
    return int(bool(worse) or "passed" not in found[True].values())


if __name__ == "__main__":
    sys.exit(main())
