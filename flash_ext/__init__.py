"""Exact attention for PyTorch that never writes the score matrix to memory.

``attention`` is the main function. ``scaled_dot_product_attention`` and the ``flash_attn_*`` functions do the same with
other libraries' signatures. ``activate`` and ``convert`` switch existing models over. docs/architecture.md shows how
the package is built.
"""

import flash_ext._torch  # noqa: F401  must come before everything that imports torch
from flash_ext._build_info import build_info
from flash_ext.bert_padding import (
    index_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)
from flash_ext.conversion import convert
from flash_ext.diagnosis import doctor
from flash_ext.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from flash_ext.functional import (
    attention,
    attention_weights,
    decode,
    draw_rng_state,
    merge,
)
from flash_ext.integrations import flop_counter as _flop_counter
from flash_ext.integrations import sdpa_provider as _sdpa_provider
from flash_ext.integrations.flash_attn import as_flash_attn
from flash_ext.integrations.sdpa_provider import activate, activated, deactivate
from flash_ext.masks import BlockMask
from flash_ext.modules import MultiheadAttention
from flash_ext.planning import explain, supports
from flash_ext.sdpa import scaled_dot_product_attention

__version__: str = build_info()["version"]

_flop_counter.register()
_sdpa_provider.register()

__all__ = [
    "BlockMask",
    "MultiheadAttention",
    "activate",
    "activated",
    "as_flash_attn",
    "attention",
    "attention_weights",
    "build_info",
    "convert",
    "deactivate",
    "decode",
    "doctor",
    "draw_rng_state",
    "explain",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "index_first_axis",
    "merge",
    "pad_input",
    "scaled_dot_product_attention",
    "supports",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]
