"""Writes the ninja file: one object per source with its header dependencies, one shared library per target."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

REPORT_SCRIPT = Path(__file__).resolve().parent / "ptxas_report.py"

# A library is linked beside its place and then moved there, so that a process never maps a half-written file.
_RULES = """\
ninja_required_version = 1.5
builddir = {build_dir}

rule cxx
  command = {cxx} $flags -MD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = CXX $in

rule nvcc_cxx
  command = {nvcc} $flags -MD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = NVCC $in

rule nvcc
  command = {report} $out.ptxas {nvcc} $flags -MD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = NVCC $in

rule link
  command = {cxx} -shared -o $out.part $in $flags && mv -f $out.part $out
  description = LINK $out

rule nvcc_link
  command = {nvcc} -shared -o $out.part $in $flags && mv -f $out.part $out
  description = LINK $out
"""


@dataclass(frozen=True)
class Object:
    source: Path
    flags: Sequence[str]
    nvcc: bool = False


@dataclass(frozen=True)
class SharedLibrary:
    output: Path
    objects: Sequence[Object]
    link_flags: Sequence[str]
    nvcc: bool = False


def _escape(path: Path | str) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def _shell(arguments: Iterable[str]) -> str:
    return shlex.join(arguments).replace("$", "$$")


def _object_path(build_dir: Path, library: SharedLibrary, source: Path, root: Path) -> Path:
    return build_dir / library.output.name.split(".")[0] / source.relative_to(root).with_suffix(".o")


def ninja_text(
    libraries: Sequence[SharedLibrary], build_dir: Path, root: Path, cxx: Sequence[str], nvcc: str | None
) -> str:
    # The interpreter that an isolated environment was made from: the path of the environment's own changes from build
    # to build, and with it would every command.
    report = _shell([str(Path(sys.executable).resolve()), str(REPORT_SCRIPT)])
    commands = {"cxx": _shell(cxx), "nvcc": _shell([nvcc or "false"]), "report": report}
    lines = [_RULES.format(build_dir=_escape(build_dir), **commands)]
    paths: dict[tuple[object, ...], str] = {}  # libraries share what they compile with the same flags
    for library in libraries:
        objects = []
        for obj in library.objects:
            key = (obj.source, obj.nvcc, *obj.flags)
            if key not in paths:
                paths[key] = _escape(_object_path(build_dir, library, obj.source, root))
                rule = "cxx"
                if obj.nvcc:
                    rule = "nvcc" if obj.source.suffix == ".cu" else "nvcc_cxx"
                lines.append(f"build {paths[key]}: {rule} {_escape(obj.source)}\n  flags = {_shell(obj.flags)}")
            objects.append(paths[key])
        rule = "nvcc_link" if library.nvcc else "link"
        lines.append(f"build {_escape(library.output)}: {rule} {' '.join(objects)}")
        lines.append(f"  flags = {_shell(library.link_flags)}\n")
    return "\n".join(lines)
