"""Compares the pages with the records, or corrects them."""

from __future__ import annotations

import argparse
import difflib
import sys

from benchmarks import pages
from benchmarks.pages.all_pages import FIGURES
from benchmarks.pages.figures import Gone
from benchmarks.pages.records import ROOT


def main() -> int:
    parser = argparse.ArgumentParser(description=pages.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the records' figures into the pages")
    chosen = parser.parse_args()
    wrong = []
    for page in dict.fromkeys(figure.page for figure in FIGURES):
        before = after = (ROOT / page).read_text()
        for figure in (figure for figure in FIGURES if figure.page == page):
            try:
                after = figure.apply(after)
            except Gone as error:
                wrong.append(str(error))
        if after != before:
            changes = difflib.unified_diff(before.splitlines(), after.splitlines(), page, "as recorded", "", "", 0, "")
            print("\n".join(changes))
            wrong += [] if chosen.write else [f"{page} does not say what the records say"]
        if chosen.write:
            (ROOT / page).write_text(after)
    print("\n".join(wrong) or "the pages say what the records say", file=sys.stderr if wrong else sys.stdout)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
