"""``python -m flash_ext run``: a program as it is, with torch's attention computed by this library."""

from __future__ import annotations

import argparse
import builtins
import io
import os
import runpy
import sys
import zipfile
from collections import Counter
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import flash_ext
from flash_ext.integrations import sdpa_provider

_EPILOG = """\
With torchrun, which starts each process:  torchrun --nproc-per-node 8 -m flash_ext run train.py
Processes that the program spawns by itself start without it; forked ones, as of a DataLoader, have it.
torch is imported before the program begins: set variables that torch reads then outside of it.
"""
_WITHOUT_CALLS = (
    "In inference, nn.TransformerEncoderLayer and nn.MultiheadAttention may bypass it: "
    "torch.backends.mha.set_fastpath_enabled(False). Of a model that writes out its attention, "
    "flash_ext.convert(model) says what can be done"
)


def main(arguments: Sequence[str]) -> None:
    """Runs the program that ``arguments`` name. What it raises, SystemExit too, goes on to the caller.

    A source file finds ``sys.argv``, ``sys.path`` and ``__main__`` as if Python itself had started it. Modules, folders
    and archives are run by ``runpy``, which takes ``__main__`` away again when their code ends.
    """
    options = _parse(arguments)
    flash_ext.activate()
    if options.flash_attn:
        _take_names(options.force)
    try:
        program, *rest = options.program
        _run(program, rest, options.module)
    finally:
        if options.report and os.environ.get("RANK", "0") == "0":
            print(describe_calls(), file=sys.stderr)
            if options.flash_attn:
                print("flash_ext: calls by the names of flash_attn are not counted", file=sys.stderr)


def _take_names(force: bool) -> None:
    try:
        flash_ext.as_flash_attn(force=force)
    except RuntimeError as error:
        sys.exit(f"{error} (here: --flash-attn --force)")


def describe_calls() -> str:
    """Which calls of torch's attention came here so far, how many of them this library computed, and why not all."""
    served, passed_on = sdpa_provider.calls_served(), sdpa_provider.reasons_passed_on()
    if not served and not passed_on:
        return f"flash_ext: the program made no call of torch's attention. {_WITHOUT_CALLS}"
    return f"flash_ext: calls computed: {_list(served)}; left to torch: {_list(passed_on)}"


def _list(calls: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(calls.items())) or "none"


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m flash_ext run",
        description="Runs a Python program under flash_ext.activate(): F.scaled_dot_product_attention, and what is "
        "built on it, is computed by flash_ext. The program is not changed.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-m", dest="module", action="store_true", help="PROGRAM is the name of a module")
    parser.add_argument(
        "--flash-attn",
        action="store_true",
        help="the modules flash_attn and flash_attn_interface are flash_ext's too (as_flash_attn())",
    )
    parser.add_argument("--force", action="store_true", help="--flash-attn, also where FlashAttention is installed")
    parser.add_argument("--report", action="store_true", help="print, at the end, how many calls were computed here")
    parser.add_argument(
        "program",
        metavar="PROGRAM",
        nargs=argparse.PARSER,  # what comes behind it is its own, "--" too
        help="a file, a folder or archive with __main__.py, or a module; then its own arguments",
    )
    options = parser.parse_args(arguments)
    if options.force and not options.flash_attn:
        parser.error("argument --force: only with --flash-attn")
    if not options.module and not Path(options.program[0]).exists():
        parser.error(f"argument PROGRAM: there is no {options.program[0]}; a module's name comes after -m")
    return options


def _run(program: str, arguments: Sequence[str], is_module: bool) -> None:
    sys.argv = [program, *arguments]
    path = Path(program).absolute()
    if is_module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    elif path.is_dir() or path.suffix == ".pyc" or zipfile.is_zipfile(path):
        if _has_folder_first():
            del sys.path[0]  # of `python -m`; runpy puts the program's there
        runpy.run_path(program, run_name="__main__")
    else:
        if _has_folder_first():
            sys.path[0] = str(path.resolve().parent)
        _run_source(path)


def _has_folder_first() -> bool:
    """Whether Python has put the current folder at the beginning of ``sys.path``, as it does for ``-m``."""
    return not (getattr(sys.flags, "safe_path", False) or sys.flags.isolated)


def _run_source(path: Path) -> None:
    """As ``__main__``, for good: threads and atexit handlers may run later."""
    main = ModuleType("__main__")
    main.__dict__.update(__file__=str(path), __builtins__=builtins, __package__=None)
    main.__loader__ = SourceFileLoader("__main__", str(path))
    sys.modules["__main__"] = main
    with io.open_code(str(path)) as file:
        code = compile(file.read(), str(path), "exec", dont_inherit=True)
    exec(code, main.__dict__)
