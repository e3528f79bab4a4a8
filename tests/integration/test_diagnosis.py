"""``flash_ext.doctor()`` and ``python -m flash_ext doctor``."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import subprocess
import sys
import types

import pytest
import torch

import flash_ext
from flash_ext import diagnosis
from flash_ext.integrations import torchvision_swin


def test_names_what_is_installed_and_what_runs_where() -> None:
    found = flash_ext.doctor()
    text = str(found)
    assert flash_ext.__version__ in text and torch.__version__ in text
    assert "forward: cpu/forward (bfloat16, float16, float32, float64)" in text
    if torch.cuda.is_available():
        assert torch.cuda.get_device_name() in text
    assert repr(found) == text


def test_names_what_is_replaced() -> None:
    assert not flash_ext.doctor().replaced or "torch on" not in str(flash_ext.doctor().replaced)
    with flash_ext.activated():
        text = str(flash_ext.doctor())
        assert "aten::_scaled_dot_product_flash_attention_for_cpu, " in text
        assert "aten::scaled_dot_product_attention" in text
    assert "aten::" not in str(flash_ext.doctor())


def test_names_modules_that_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("flash_attn")
    module.flash_attn_func = flash_ext.flash_attn_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    assert "the module flash_attn is flash_ext's" in flash_ext.doctor().replaced

    functions = {"flashext": flash_ext.flash_attn_func, "sdpa": torch.softmax}

    class Functions:
        def valid_keys(self) -> list[str]:
            return list(functions)

        def get(self, name: str) -> object:
            return functions[name]

    modeling = types.ModuleType("transformers.modeling_utils")
    modeling.ALL_ATTENTION_FUNCTIONS = Functions()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", modeling)
    assert "transformers: attn_implementation 'flashext'" in flash_ext.doctor().replaced


class Version:
    def __init__(self, version: str) -> None:
        self.version = version


def test_names_model_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """And whether flash-attn is the real one."""
    there = {"transformers": Version("5.1"), "timm": Version("1.2"), "flash-attn": Version("2.8")}

    def distribution(name: str) -> Version:
        if name not in there:
            raise importlib.metadata.PackageNotFoundError(name)
        return there[name]

    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "distribution", distribution)
        assert "libraries: transformers 5.1, timm 1.2, flash-attn 2.8" in flash_ext.doctor().installed
        there.clear()
        assert not any(line.startswith("libraries") for line in flash_ext.doctor().installed)
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(flash_ext.as_flash_attn(force=True).undo)
        found = next(line for line in flash_ext.doctor().installed if line.startswith("libraries"))
        assert "flash-attn 2.8.3 (the names alone, by as_flash_attn())" in found


def test_names_what_is_replaced_in_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType(torchvision_swin.MODULE)
    module.shifted_window_attention = torchvision_swin.shifted_window_attention  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, torchvision_swin.MODULE, module)
    assert "torchvision.models.swin_transformer.shifted_window_attention" in flash_ext.doctor().replaced


def problems() -> str:
    return "\n".join(map(str, flash_ext.doctor().problems))


def test_a_problem_has_its_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not monkeypatch.setenv: the libraries must not see it.
    monkeypatch.setattr(os, "environ", {**os.environ, "FLASH_EXT_CHECK": "1", "FLASH_EXT_HOPPER": "0"})
    assert "FLASH_EXT_CHECK=1" in problems() and "FLASH_EXT_HOPPER=0" in problems()
    monkeypatch.setattr(diagnosis, "_error_of_a_call", lambda device: "it is broken")
    assert "does not compute: it is broken: install flash_ext again" in problems()


def test_fused_backends_that_are_switched_off() -> None:
    with flash_ext.activated(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert "torch.backends.cuda.enable_flash_sdp(True)" in problems()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert "enable_flash_sdp" not in problems()


def test_a_build_without_cuda_beside_a_torch_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    build = {**flash_ext.build_info(), "nvcc": None, "cuda_archs": []}
    monkeypatch.setattr(diagnosis, "build_info", lambda: build)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "install flash_ext again with FLASH_EXT_CUDA=1" in problems()


def test_a_wrong_result_is_a_problem(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert diagnosis._error_of_a_call(torch.device(device)) == ""
    monkeypatch.setattr(diagnosis, "attention", lambda q, k, v: flash_ext.attention(q, k, v) + 1)
    assert "a small call is wrong by" in diagnosis._error_of_a_call(torch.device(device))


def test_command() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "flash_ext", "doctor"], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode in (0, 1), run.stderr
    assert run.stdout.startswith("Installed\n") and "\nProblems\n" in run.stdout
    assert (run.returncode == 0) == run.stdout.endswith("Problems\n  none\n")
    usage = subprocess.run(
        [sys.executable, "-m", "flash_ext", "doctor", "--help"], capture_output=True, text=True, timeout=300, check=True
    )
    assert "python -m flash_ext doctor" in usage.stdout
