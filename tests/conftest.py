"""Devices, dtypes, seeds, markers: what every test has in common."""

from __future__ import annotations

import ctypes
import os
import random
import shlex
import zlib
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch

SEED_VARIABLE = "FLASH_EXT_TEST_SEED"
SLOW_VARIABLE = "FLASH_EXT_SLOW_TESTS"
REQUIRE_CUDA_VARIABLE = "FLASH_EXT_REQUIRE_CUDA"
DTYPES = (torch.float32, torch.bfloat16)  # on CUDA each has kernels of its own

hypothesis.settings.register_profile("quick", max_examples=40, deadline=None)
hypothesis.settings.register_profile("long", max_examples=1500, deadline=None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help=f"run the tests marked slow too (or {SLOW_VARIABLE}=1)")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes minutes or gigabytes; runs with --run-slow")
    config.addinivalue_line("markers", "op(name): which operator decides whether the test runs on CUDA")
    # Set before the workers of pytest-xdist start, so that all of them draw from one seed.
    os.environ.setdefault(SEED_VARIABLE, str(random.SystemRandom().randrange(2**31)))
    if run_slow(config):
        os.environ[SLOW_VARIABLE] = "1"
    if os.environ.get(REQUIRE_CUDA_VARIABLE, "0") == "1":
        require_cuda()
    hypothesis.settings.load_profile("long" if run_slow(config) else "quick")
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
    fill_fresh_memory_with_garbage()


def run_slow(config: pytest.Config) -> bool:
    return config.getoption("--run-slow") or os.environ.get(SLOW_VARIABLE, "0") == "1"


def require_cuda() -> None:
    """A run that is meant for a GPU does not pass by leaving out all that needs one."""
    if devices("attention_forward") != ["cpu", "cuda"]:
        raise pytest.UsageError(
            f"{REQUIRE_CUDA_VARIABLE}=1, but there is no GPU (torch.cuda.is_available() is "
            f"{torch.cuda.is_available()}) or the build has no CUDA kernels"
        )


def fill_fresh_memory_with_garbage() -> None:
    """glibc's malloc then returns 0x7f bytes: NaN in float16, huge in the others. Scratch cannot pass for zero."""
    m_perturb = -6
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(m_perturb, 0x80)


def pytest_report_header() -> str:
    return f"{SEED_VARIABLE}={os.environ[SEED_VARIABLE]}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = {item for item in items if has_no_kernel(item)}
    if not run_slow(config):
        left_out |= {item for item in items if item.get_closest_marker("slow")}
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def devices(op: str) -> list[str]:
    """The devices that are there and have a kernel of the operator."""
    import flash_ext  # noqa: F401  registers the operators

    on_cuda = torch._C._dispatch_has_kernel_for_dispatch_key(f"flash_ext::{op}", "CUDA")
    return ["cpu", "cuda"] if torch.cuda.is_available() and on_cuda else ["cpu"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("op")
        present = devices(marker.args[0] if marker else "attention_forward")
        if "kernel_family" in metafunc.fixturenames:
            cases = [(device, family) for device in present for family in kernel_families(device)]
            ids = ["-".join(filter(None, case)) for case in cases]
            metafunc.parametrize(("device", "kernel_family"), cases, ids=ids, indirect=["kernel_family"])
        else:
            metafunc.parametrize("device", present)


def kernel_families(device: str) -> list[str]:
    """The folders of csrc/kernels whose kernels a device can run: some GPUs have their own beside those for all."""
    if device == "cpu":
        return [""]
    from flash_ext import _plan, build_info

    major, minor = torch.cuda.get_device_capability()
    own = [
        f"sm{special.compute_capability}"
        for special in _plan.SPECIAL_ARCHITECTURES
        if special.compute_capability == 10 * major + minor
        and special.target in build_info()["cuda_archs"]
        and os.environ.get(special.environment) != "0"
    ]
    return [*own, "sm80"]


@pytest.fixture
def kernel_family(request: pytest.FixtureRequest) -> Iterator[str]:
    """Of the kernels that the test's calls run, "" on a CPU: a test that uses it runs once for each on a GPU."""
    family: str = getattr(request, "param", "")
    if not family:
        yield family
        return
    before = torch.ops.flash_ext.use_own_kernels(family != "sm80")
    yield family
    torch.ops.flash_ext.use_own_kernels(before)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Of q, k and v, in tests that do not say which dtypes they run with."""
    return request.param


def has_no_kernel(item: pytest.Item) -> bool:
    """float64 is for the CPU."""
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return parameters.get("device") == "cuda" and parameters.get("dtype") is torch.float64


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Every run draws other numbers; the same seed and test draw the same."""
    torch.manual_seed(int(os.environ[SEED_VARIABLE]) ^ zlib.crc32(item.nodeid.encode()))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """A test that fails says how to run it again, with the numbers and problems that it drew."""
    report = yield
    if report.failed:
        report.sections.append(("again", replay_command(item)))
    return report


def replay_command(item: pytest.Item) -> str:
    settings = {name: value for name, value in sorted(os.environ.items()) if name.startswith("FLASH_EXT_")}
    return (
        f"{' '.join(f'{name}={value}' for name, value in settings.items())} python -m pytest {shlex.quote(item.nodeid)}"
    )
