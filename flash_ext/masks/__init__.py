"""Block-sparse visibility: which blocks of keys each block of queries attends to, and a bitmap where not all pairs."""

from flash_ext.masks.block_mask import BlockMask
from flash_ext.masks.dense import MaskMod

__all__ = ["BlockMask", "MaskMod"]
