"""``python -m flash_ext``: a tiny run from beginning to end, and its errors."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flash_ext
from flash_ext.__main__ import parse
from flash_ext.demo import gpt, measure, text, training

TINY = ["--device", "cpu", "--steps", "2", "--seqlen", "16", "--lengths", "64", "96"]


def run_demo(*arguments: str, first_on_path: Path | None = None) -> subprocess.CompletedProcess[str]:
    package = Path(flash_ext.__file__).parent
    path = os.pathsep.join(str(folder) for folder in (first_on_path, package.parent) if folder is not None)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "flash_ext", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_tiny_run_says_everything_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "curves.png"
    ran = run_demo(*TINY, "--plot", str(picture))
    assert ran.returncode == 0, ran.stderr
    assert f"{gpt.NUM_LAYERS} nn.MultiheadAttention converted" in ran.stdout
    assert ran.stderr == "", "a progress bar is for a terminal"
    assert re.search(r"^step 2 of 2: loss flash_ext \S+, SDPA \S+$", ran.stdout, re.MULTILINE)
    assert "bytes decoded" in ran.stdout
    furthest = re.search(r"furthest apart\s+(\S+)", ran.stdout)
    assert furthest and float(furthest[1]) < 1e-4
    for name in measure.IMPLEMENTATIONS:
        assert name in ran.stdout
    assert re.search(r"^ *64 \|", ran.stdout, re.MULTILINE) and re.search(r"^ *96 \|", ran.stdout, re.MULTILINE)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_numpy_nothing_is_said_of_it(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\", name='numpy')")
    ran = run_demo(*TINY, first_on_path=tmp_path)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_models_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[int] = []
    loss_of = training.loss_of

    def watched(model: gpt.GPT, *batch: torch.Tensor) -> torch.Tensor:
        if model.training and torch.is_grad_enabled():
            order.append(id(model))
        return loss_of(model, *batch)

    monkeypatch.setattr(training, "loss_of", watched)
    cpu = torch.device("cpu")
    models = {name: training.make_model(16, 0, cpu, with_flash_ext=name == "ours") for name in ("ours", "theirs")}
    words = text.standard_library()
    runs = training.train(models, words, words, steps=4, seed=0)
    ours, theirs = (id(model) for model in models.values())
    assert order == [ours, theirs, theirs, ours] * 2
    assert runs["ours"].losses == pytest.approx(runs["theirs"].losses, abs=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps: must be at least 1, got 0"),
        (["--steps", "many"], "--steps: invalid"),
        (["--seqlen", "3"], "--seqlen: must be at least"),
        (["--seqlen", "100000000"], "--seqlen: must be at most"),
        (["--lengths", "-1"], "--lengths: must be at least 1, got -1"),
        (["--device", "tpu"], "--device: must be cpu, cuda or cuda:N, got tpu"),
        (["--device", "meta"], "--device: must be cpu, cuda or cuda:N, got meta"),
        (["--plot", "/there/is/no/such/folder/out.png"], "--plot: there is no folder"),
        (["--plot", "out.txt"], "--plot: must end in .png"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        parse(arguments)
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


def test_help_names_the_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"])
    assert "python -m flash_ext doctor" in " ".join(capsys.readouterr().out.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_where_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--device", "cuda"])
    assert "--device: cuda: torch sees no GPU" in capsys.readouterr().err


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        parse(["--plot", "out.png"])
    assert "pip install matplotlib" in capsys.readouterr().err


def test_batches_repeat_with_the_seed() -> None:
    words = text.standard_library()
    for (a, b), (c, d) in zip(*([next(text.batches(words, 2, 8, seed=3))] for _ in range(2)), strict=True):
        assert torch.equal(a, c) and torch.equal(b, d)
        assert torch.equal(a[:, 1:], b[:, :-1])


def test_decoding_equals_the_forward() -> None:
    model = training.make_model(32, seed=1, device=torch.device("cpu"), with_flash_ext=True)
    tokens, logits = gpt.generate(model, torch.arange(5), 32, temperature=1.0, seed=2)
    assert tokens.shape == (1, 32) and torch.equal(tokens[0, :5], torch.arange(5))
    with torch.inference_mode():
        torch.testing.assert_close(logits, model(tokens), atol=1e-4, rtol=1e-4)


def test_implementations_agree() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 40, measure.HEADS, measure.HEAD_DIM) for _ in range(3))
    outs = [attend(q, k, v) for attend in measure.IMPLEMENTATIONS.values()]
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], atol=1e-5, rtol=1e-5)


def test_quadratic_memory_is_seen() -> None:
    measured = measure.measure([1024], torch.device("cpu"))
    scores = 4 * measure.HEADS * 1024**2  # bytes
    assert measured["unfused"][0].peak - measured["flash_ext"][0].peak > scores
    assert measured["flash_ext"][0].peak < scores
