"""The compiled operators: importing this module loads them, and ``OPS`` is what torch makes of them."""

from __future__ import annotations

from pathlib import Path

import torch

from flash_ext._build_info import require_torch


def _load_libraries() -> None:
    """The CUDA library goes only into a torch that has CUDA: it needs symbols that no other has."""
    require_torch(torch.__version__)
    folder = Path(__file__).parent / "lib"
    names = ["libflash_ext_cpu.so"]
    if torch.version.cuda is not None and (folder / "libflash_ext_cuda.so").exists():
        names.append("libflash_ext_cuda.so")
    for name in names:
        try:
            torch.ops.load_library(str(folder / name))
        except OSError as error:
            raise ImportError(
                f"flash_ext: {folder / name} does not load under torch {torch.__version__} "
                f"(CUDA {torch.version.cuda}): {error.__cause__ or error}. Build flash_ext again against this torch."
            ) from error


_load_libraries()
OPS = torch.ops.flash_ext
