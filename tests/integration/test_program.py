"""``python -m flash_ext run``: a program runs as Python itself runs it, and its attention is this library's."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import flash_ext

ATTENTION = """
import torch
q = torch.ones(1, 1, 4, 8)
torch.nn.functional.scaled_dot_product_attention(q, q, q)
"""
# What a program can see of how it was started, and how long it is __main__.
CIRCUMSTANCES = """
import atexit, inspect, json, os, pickle, sys, threading
import neighbour
class Own: pass
def late():
    threading.main_thread().join()
    print(pickle.dumps(Own()).hex()[:4], flush=True)
atexit.register(lambda: print(sys.modules["__main__"].Own.__name__, flush=True))
os.chdir("/")
seen = [__name__, __file__, __package__, str(__spec__), type(__builtins__).__name__, type(__loader__).__name__]
seen += [sys.argv, sys.path[:2], sys.modules["__main__"].neighbour.VALUE, inspect.getsource(late)]
print(json.dumps(seen), flush=True)
threading.Thread(target=late).start()
"""
FOLDER = """
import json, os, sys
print(json.dumps([__name__, sys.argv, *map(os.path.abspath, sys.path[:2])]))
"""
SPAWNS = """
import multiprocessing
def square(x):
    return x * x
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(square, [3]))
"""


def python(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = str(Path(flash_ext.__file__).parents[1])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return python("-m", "flash_ext", "run", *arguments, folder=folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Programs in a folder of their own, below the one that commands run in."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "neighbour.py").write_text("VALUE = 7")
    (programs / "circumstances.py").write_text(CIRCUMSTANCES)
    (programs / "attention.py").write_text(ATTENTION)
    return tmp_path


def test_attention_is_computed_here(folder: Path) -> None:
    ran = run("--report", "programs/attention.py", folder=folder)
    assert (ran.returncode, ran.stdout) == (0, "")
    assert "calls computed: _scaled_dot_product_flash_attention_for_cpu 1; left to torch: none" in ran.stderr


def test_nothing_is_printed_without_report(folder: Path) -> None:
    ran = run("programs/attention.py", folder=folder)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def test_a_program_without_attention(folder: Path) -> None:
    (folder / "nothing.py").write_text("")
    found = run("--report", "nothing.py", folder=folder).stderr
    assert "made no call of torch's attention" in found and "set_fastpath_enabled(False)" in found


def test_the_report_says_why_a_call_is_torchs(folder: Path) -> None:
    (folder / "large.py").write_text(ATTENTION.replace("4, 8", "4, 264"))
    found = run("--report", "large.py", folder=folder).stderr
    assert "calls computed: none; left to torch: _scaled_dot_product_flash_attention_for_cpu (head_dim must be" in found
    assert "got 264 of query and 264 of value) 1\n" in found


@pytest.mark.parametrize("arguments", [("--report", "-m", "x y", "--", "run"), ("--", "--report")], ids=str)
def test_a_file_is_started_as_by_python(folder: Path, arguments: tuple[str, ...]) -> None:
    command = ("programs/circumstances.py", *arguments)
    ours, pythons = run(*command, folder=folder), python(*command, folder=folder)
    assert (ours.returncode, ours.stderr) == (0, "")
    assert ours.stdout == pythons.stdout


def test_modules_and_folders_have_pythons_arguments_and_path(folder: Path) -> None:
    programs = folder / "programs"
    (programs / "__main__.py").write_text(FOLDER)
    for command, place in ((("programs", "--report"), folder), (("-m", "programs", "--report"), folder)):
        ours, pythons = run(*command, folder=place), python(*command, folder=place)
        assert ours.returncode == 0, ours.stderr
        assert json.loads(ours.stdout) == json.loads(pythons.stdout), command


@pytest.mark.parametrize(("program", "code"), [("raise SystemExit(3)", 3), ("raise KeyError('here')", 1)])
def test_how_a_program_ends_is_how_it_ends(folder: Path, program: str, code: int) -> None:
    (folder / "ends.py").write_text(program)
    ran = run("--report", "ends.py", folder=folder)
    assert ran.returncode == code
    assert ("KeyError: 'here'" in ran.stderr) == ("KeyError" in program)
    assert "flash_ext: the program made no call" in ran.stderr


def test_a_program_may_spawn_processes(folder: Path) -> None:
    (folder / "spawns.py").write_text(SPAWNS)
    ran = run("spawns.py", folder=folder)
    assert (ran.returncode, ran.stdout) == (0, "[9]\n"), ran.stderr


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="the real one is installed")
def test_the_names_of_flash_attn(folder: Path) -> None:
    (folder / "imports.py").write_text("import flash_attn\nprint(flash_attn.flash_attn_func.__module__)")
    assert run("imports.py", folder=folder).returncode != 0
    assert run("--flash-attn", "imports.py", folder=folder).stdout == "flash_ext.flash_attn_interface\n"


def test_flash_attention_itself_is_hidden_on_request(folder: Path) -> None:
    (folder / "flash_attn.py").write_text("def flash_attn_func(): ...")
    (folder / "imports.py").write_text("import flash_attn\nprint(flash_attn.flash_attn_func.__module__)")
    refused = run("--flash-attn", "imports.py", folder=folder)
    assert refused.returncode == 1 and "Traceback" not in refused.stderr
    assert "flash_attn is installed already" in refused.stderr and "--flash-attn --force" in refused.stderr
    hidden = run("--flash-attn", "--force", "imports.py", folder=folder)
    assert hidden.stdout == "flash_ext.flash_attn_interface\n"


def test_under_torchrun(folder: Path) -> None:
    program = ATTENTION + "import os, sys\nos.write(1, f'rank {os.environ[\"RANK\"]} of {sys.argv[1]}\\n'.encode())"
    (folder / "ranks.py").write_text(program)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    ran = python(*launcher, "-m", "flash_ext", "run", "--report", "ranks.py", "2", folder=folder)
    assert sorted(ran.stdout.split("\n")) == ["", "rank 0 of 2", "rank 1 of 2"], ran.stderr
    assert ran.stderr.count("flash_ext: calls computed: ") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the following arguments are required: PROGRAM"),
        (("missing.py",), "argument PROGRAM: there is no missing.py; a module's name comes after -m"),
        (("--force", "missing.py"), "argument --force: only with --flash-attn"),
        (("--reports", "missing.py"), "unrecognized arguments: --reports"),
    ],
)
def test_wrong_arguments(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    ran = run(*arguments, folder=folder)
    assert ran.returncode == 2
    assert message in ran.stderr and "Traceback" not in ran.stderr
