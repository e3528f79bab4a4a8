"""``doctor``: what is installed, which kernels run where, what of torch is replaced, and what is wrong with it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import flash_ext._plan as _plan
from flash_ext._build_info import build_info
from flash_ext.functional import attention
from flash_ext.integrations import sdpa_provider, torchvision_swin
from flash_ext.planning import describe_device, problem_of
from flash_ext.torch_private import attention_registry, has_kernel

_OPERATIONS = ("forward", "backward", "decode")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_PROBE = dict(batch=4, seqlen_q=2048, seqlen_k=2048, heads_q=16, heads_kv=16, head_dim=128, head_dim_v=128)
_LIBRARIES = ("transformers", "diffusers", "timm", "torchvision", "flash-attn", "flash-attn-3")
_TOLERANCE = 2e-2  # of the check that kernels run at all, in bfloat16 on numbers of the size of 1


@dataclass(frozen=True)
class Problem:
    """Something that keeps kernels of this library from running, or slows them down, and what to do about it."""

    what: str
    mend: str

    def __str__(self) -> str:
        return f"{self.what}: {self.mend}"


@dataclass(frozen=True)
class Diagnosis:
    """What ``doctor`` found. ``print`` it."""

    installed: tuple[str, ...]
    devices: tuple[str, ...]  # each with the kernel of each operation
    replaced: tuple[str, ...]  # of torch and of other libraries, right now
    problems: tuple[Problem, ...]

    def __str__(self) -> str:
        sections = {
            "Installed": self.installed,
            "Devices and their kernels": self.devices,
            "Replaced in this process": self.replaced or ("nothing",),
            "Problems": self.problems or ("none",),
        }
        return "\n".join(f"{title}\n" + "\n".join(f"  {line}" for line in lines) for title, lines in sections.items())

    __repr__ = __str__


def doctor() -> Diagnosis:
    """Looks at the installation and at this process. Runs one small call on each device; changes nothing.

    Returns:
        A ``Diagnosis``, to be printed, with a line for each problem that says how it is mended.
        ``python -m flash_ext doctor`` prints it.

    Raises:
        Nothing: what goes wrong becomes a problem in the result.
    """
    devices = list(_devices())
    problems = [
        *_problems_of_the_build(),
        *_problems_of_settings(),
        *(problem for device in devices for problem in _problems_of(device)),
        *_problems_of_the_provider(),
    ]
    return Diagnosis(
        installed=tuple(_installed()),
        devices=tuple(line for device in devices for line in _kernels_of(device)),
        replaced=tuple(_replaced()),
        problems=tuple(problems),
    )


# ---- What is there --------------------------------------------------------------------------------------------------


def _installed() -> Iterator[str]:
    build = build_info()
    commit = f", commit {build['git_commit'][:12]}" if build["git_commit"] else ""
    yield f"flash_ext {build['version']}{commit}, in {Path(__file__).parent}"
    yield f"built by {build['compiler']} for torch >= {build['torch_target']}, CPUs with {', '.join(build['cpu_isas'])}"
    if build["nvcc"]:
        yield f"CUDA kernels by nvcc {build['nvcc']} for {', '.join(build['cuda_archs'])}"
    else:
        yield "no CUDA kernels"
    cuda = f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}" if torch.version.cuda else "no CUDA"
    yield f"torch {torch.__version__} ({cuda}), Python {platform.python_version()}"
    if found := [described for name in _LIBRARIES if (described := _version_of(name))]:
        yield f"libraries: {', '.join(found)}"


def _version_of(library: str) -> str:
    """With its name, or an empty string; of flash-attn also whose it is."""
    try:
        found = importlib.metadata.distribution(library)
    except importlib.metadata.PackageNotFoundError:
        return ""
    ours = type(found).__module__.split(".")[0] == "flash_ext"
    return f"{library} {found.version}{' (the names alone, by as_flash_attn())' if ours else ''}"


def _devices() -> Iterator[torch.device]:
    yield torch.device("cpu")
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        yield torch.device("cuda", index)


def _name(device: torch.device) -> str:
    if device.type == "cpu":
        return f"cpu, {torch.get_num_threads()} threads"
    properties = torch.cuda.get_device_properties(device)
    return f"{device}, {properties.name}, compute capability {properties.major}.{properties.minor}"


def _kernels_of(device: torch.device) -> Iterator[str]:
    yield _name(device)
    for operation in _OPERATIONS:
        kernels: dict[str, list[str]] = {}
        for dtype in _DTYPES:
            kernels.setdefault(_kernel(operation, device, dtype), []).append(str(dtype).removeprefix("torch."))
        kernels.pop("", None)
        found = "; ".join(f"{kernel} ({', '.join(dtypes)})" for kernel, dtypes in kernels.items())
        yield f"  {operation}: {found or 'none'}"


def _kernel(operation: str, device: torch.device, dtype: torch.dtype) -> str:
    """Of a plain call, or an empty string."""
    probe = _plan.Problem(operation=operation, **describe_device(device, dtype))
    if not _has_library(device) or not _plan.supports(probe)[0]:
        return ""
    x = torch.empty(1, 1, 1, 8, device=device, dtype=dtype)
    described = problem_of(x, x, x, operation)
    for name, size in _PROBE.items():
        setattr(described, name, size)
    kernel: str = _plan.make_plan(described).kernel
    return kernel


def _has_library(device: torch.device) -> bool:
    return has_kernel("flash_ext::attention_forward", device.type.upper())


# ---- What is replaced -----------------------------------------------------------------------------------------------


def _replaced() -> Iterator[str]:
    activation = sdpa_provider.Activation.current
    if activation is not None:
        for key in ("CPU", "CUDA"):
            operators = [f"aten::{operator}" for operator, at in activation.overridden if at.endswith(key)]
            if operators:
                yield f"torch on {key}: {', '.join(operators)}; flash_ext.deactivate() puts them back"
    other = attention_registry.current_flash_attention_impl()
    if other not in (None, sdpa_provider.NAME):
        yield f"torch's flash attention on CUDA: by {other}"
    for title, calls in (
        ("served", sdpa_provider.calls_served()),
        ("gone on to torch", sdpa_provider.reasons_passed_on()),
    ):
        if calls:
            yield f"calls {title} so far: {', '.join(f'{name} {count}' for name, count in sorted(calls.items()))}"
    if torchvision_swin.is_installed():
        yield f"{torchvision_swin.MODULE}.{torchvision_swin.FUNCTION}"
    yield from _replaced_modules()
    yield from _registered_in_transformers()


def _replaced_modules() -> Iterator[str]:
    """Modules under the names of other libraries whose functions are ours."""
    for name in ("flash_attn", "flash_attn_interface"):
        module = sys.modules.get(name)
        if module is not None and _is_ours(getattr(module, "flash_attn_func", None)):
            yield f"the module {name} is flash_ext's"


def _registered_in_transformers() -> Iterator[str]:
    """Names of attn_implementation that lead here. transformers is asked only where it is imported already."""
    modeling: ModuleType | None = sys.modules.get("transformers.modeling_utils")
    functions: Any = getattr(modeling, "ALL_ATTENTION_FUNCTIONS", None)
    if functions is None:
        return
    names = [name for name in functions.valid_keys() if _is_ours(functions.get(name))]
    if names:
        yield f"transformers: attn_implementation {', '.join(repr(name) for name in names)}"


def _is_ours(function: Callable[..., Any] | None) -> bool:
    module: str = getattr(function, "__module__", None) or ""
    return module.split(".")[0] == "flash_ext"


# ---- What is wrong --------------------------------------------------------------------------------------------------


def _problems_of_the_build() -> Iterator[Problem]:
    build = build_info()
    if torch.version.cuda and not build["nvcc"]:
        yield Problem(
            "torch has CUDA and flash_ext was built without",
            "put nvcc on the PATH or set CUDA_HOME, and install flash_ext again with FLASH_EXT_CUDA=1",
        )
    if build["nvcc"] and not torch.version.cuda:
        yield Problem("flash_ext has CUDA kernels and this torch has no CUDA", "install a torch with CUDA")
    if torch.version.cuda and not torch.cuda.is_available():
        yield Problem("torch sees no GPU", "see to the driver (nvidia-smi) and to CUDA_VISIBLE_DEVICES")


def _problems_of_settings() -> Iterator[Problem]:
    for special in _plan.SPECIAL_ARCHITECTURES:
        if os.environ.get(special.environment) == "0":
            yield Problem(f"{special.environment}=0 keeps {special.family} GPUs from their own kernels", "unset it")
    if os.environ.get("FLASH_EXT_CHECK") == "1":
        yield Problem("FLASH_EXT_CHECK=1 waits for the GPU in every call with lengths on the device", "unset it")
    if os.environ.get("FLASH_EXT_CPU_ISA"):
        yield Problem(f"FLASH_EXT_CPU_ISA={os.environ['FLASH_EXT_CPU_ISA']} chooses the CPU's kernels", "unset it")


def _problems_of(device: torch.device) -> Iterator[Problem]:
    if not _has_library(device):
        return  # the build's problem
    described = describe_device(device, torch.bfloat16)
    ok, reason = _plan.supports(_plan.Problem(operation="forward", **described))
    if not ok:
        yield Problem(f"{_name(device)} has no kernels ({reason})", "torch's own attention runs there")
        return
    for special in _plan.SPECIAL_ARCHITECTURES:
        of_this_gpu = special.compute_capability == described["compute_capability"]
        if of_this_gpu and special.target not in build_info()["cuda_archs"]:
            mend = f"install flash_ext again with FLASH_EXT_ARCHS='{special.target};80'"
            yield Problem(f"{_name(device)} runs kernels for older GPUs", mend)
    if error := _error_of_a_call(device):
        yield Problem(f"{_name(device)} does not compute: {error}", "install flash_ext again for this torch and GPU")


def _error_of_a_call(device: torch.device) -> str:
    """Of forward and backward against plain torch, or an empty string."""
    generator = torch.Generator().manual_seed(0)
    try:
        q, k, v = (
            torch.randn(1, 70, 2, 64, generator=generator).to(device, torch.bfloat16).requires_grad_() for _ in range(3)
        )
        with torch.enable_grad():
            out = attention(q, k, v)
            assert isinstance(out, torch.Tensor)
            scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * q.shape[-1] ** -0.5
            expected = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.float())
            pairs = zip(
                (out, *torch.autograd.grad(out.float().sum(), (q, k, v))),
                (expected, *torch.autograd.grad(expected.sum(), (q, k, v))),
                strict=True,
            )
            worst = max((ours.float() - right.float()).abs().max().item() for ours, right in pairs)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "" if worst < _TOLERANCE else f"a small call is wrong by {worst:.2g}"


def _problems_of_the_provider() -> Iterator[Problem]:
    if not sdpa_provider.is_active():
        return
    if attention_registry.current_flash_attention_impl() != sdpa_provider.NAME:
        yield Problem(
            f"{attention_registry.current_flash_attention_impl()} was put in place of flash_ext's flash operators",
            "flash_ext.deactivate(), or torch.nn.attention.activate_flash_attention_impl('flash_ext')",
        )
    backends = torch.backends.cuda
    fused = backends.flash_sdp_enabled() or backends.mem_efficient_sdp_enabled() or backends.cudnn_sdp_enabled()
    if not fused:
        yield Problem(
            "all fused backends of scaled_dot_product_attention are switched off, and calls go to torch's math",
            "torch.backends.cuda.enable_flash_sdp(True)",
        )
    if torch.backends.mha.get_fastpath_enabled():
        yield Problem(
            "in inference torch's fast path of nn.TransformerEncoderLayer and nn.MultiheadAttention computes attention "
            "with a mask itself",
            "flash_ext.convert(model), or torch.backends.mha.set_fastpath_enabled(False)",
        )
