"""What a transformers mask says, kept as rules (window, padding, documents) instead of a (q_length, kv_length) matrix.

transformers describes a mask by a function of indices that it puts together from a few parts of its own. Those parts
are recognised here by their code; a mask with any other part becomes the dense matrix that transformers makes of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers.masking_utils as hf
from torch import Tensor

from flash_ext.torch_private import tree_map_only, without_torch_function

MaskFunction = Callable[..., Any]


# ---- The rules a mask function is made of ---------------------------------------------------------------------------


class Rule(NamedTuple):
    """Key j is visible to query i where -left <= j - i <= right (-1: unlimited), both in one document."""

    left: int = -1
    right: int = -1
    documents: Tensor | None = None  # (batch, length), equal numbers = one document
    inside_documents: bool = False  # i and j count from the start of their document


def _code(function: Any) -> CodeType | None:
    return getattr(function, "__code__", None)


def _made_by(name: str, *arguments: Any) -> CodeType | None:
    """The code of the functions that a maker of transformers returns; None where this version has no such maker."""
    maker = getattr(hf, name, None)
    return None if maker is None else _code(maker(*arguments))


_ALL_OF = _made_by("and_masks", hf.causal_mask_function)
_WINDOW = _made_by("sliding_window_overlay", 1)
_WINDOW_OF_BOTH_SIDES = _made_by("sliding_window_bidirectional_overlay", 1)
_DOCUMENTS = _made_by("packed_sequence_mask_function", None)
_INSIDE_DOCUMENTS = _made_by("remap_positions_for_packed_sequence", None, None)


def read_rule(mask_function: MaskFunction) -> Rule | None:
    """The rule of a mask function, or None if something in it is unknown."""
    rule = _read(mask_function)
    return None if rule is None or (rule.inside_documents and rule.documents is None) else rule


def _read(function: Any) -> Rule | None:
    if function is hf.causal_mask_function:
        return Rule(right=0)
    if function is hf.bidirectional_mask_function:
        return Rule()
    code = _code(function)
    if code is None:
        return None
    captured = _captured(function)
    if code is _ALL_OF:
        return _read_all(captured["mask_functions"])
    if code is _WINDOW and captured["sliding_window"] > 0:
        return Rule(left=captured["sliding_window"] - 1)
    if code is _WINDOW_OF_BOTH_SIDES and captured["sliding_window"] >= 0:
        return Rule(left=captured["sliding_window"], right=captured["sliding_window"])
    if code is _DOCUMENTS:
        return Rule(documents=captured["packed_sequence_mask"])
    if code is _INSIDE_DOCUMENTS:
        # Positions rise by one within a document, so distances are those of the indices.
        inner = _read(captured["mask_function"])
        return None if inner is None else inner._replace(inside_documents=True)
    return None


def _captured(function: FunctionType) -> dict[str, Any]:
    cells = function.__closure__ or ()
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))


def _read_all(functions: tuple[MaskFunction, ...]) -> Rule | None:
    """What all of them show."""
    whole = Rule()
    for function in functions:
        rule = _read(function)
        if rule is None or (rule.documents is not None and whole.documents is not None):
            return None
        whole = Rule(
            _narrower(whole.left, rule.left),
            _narrower(whole.right, rule.right),
            rule.documents if whole.documents is None else whole.documents,
            whole.inside_documents or rule.inside_documents,
        )
    return whole


def _narrower(a: int, b: int) -> int:
    return max(a, b) if min(a, b) < 0 else min(a, b)


# ---- Masks that are rules -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Visibility:
    """Key j is visible to query i where i + offset - left <= j <= i + offset + right, and all else that is given.

    Attributes:
        left, right: -1 = unlimited.
        offset: where the diagonal lies; on the device where only that knows it.
        padding: bool (batch, kv_length), True = a token; None: nothing is padding.
        documents: (batch, length), equal numbers = one document, ascending; queries and keys are the same tokens.
        cu_seqlens: int32, where each document of the flattened batch begins, and the end.
    """

    left: int
    right: int
    offset: int | Tensor
    padding: Tensor | None = None
    documents: Tensor | None = None
    cu_seqlens: Tensor | None = None

    def dense(self, batch: int, q_length: int, kv_length: int, device: torch.device) -> Tensor:
        """bool (batch, 1, q_length, kv_length), True = visible."""
        j = torch.arange(kv_length, device=device)
        distance = j - torch.arange(q_length, device=device)[:, None] - self.offset
        visible = torch.ones(q_length, kv_length, dtype=torch.bool, device=device)
        if self.left >= 0:
            visible = visible & (distance >= -self.left)
        if self.right >= 0:
            visible = visible & (distance <= self.right)
        if self.documents is not None:
            visible = visible & (self.documents[:, :, None] == self.documents[:, None, :])
        if self.padding is not None:
            visible = visible & self.padding[:, None, :]
        return visible.expand(batch, q_length, kv_length)[:, None]

    def to(self, device: torch.device) -> Visibility:
        """The same with its tensors on ``device``."""
        names = ("offset", "padding", "documents", "cu_seqlens")
        tensors = {name: value for name in names if isinstance(value := getattr(self, name), Tensor)}
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in tensors.items()}
        return replace(self, **moved)


_ATEN = torch.ops.aten
_KEEP_RULES = {_ATEN.detach.default, _ATEN.alias.default, _ATEN.clone.default}
# Operations besides views that make a mask of a mask, and those that read bool masks as such.
_MAKE_A_MASK = {"index", "index_select", "clone", "_to_copy", "cat", "stack", "repeat"}
_READ_A_MASK = {"bitwise_and", "bitwise_or", "bitwise_not", "bitwise_xor"}
_READ_A_MASK |= {"logical_and", "logical_or", "logical_not", "logical_xor"}
_READ_A_MASK |= {"where", "all", "any", "sum", "equal", "_local_scalar_dense"}


class VisibilityMask(Tensor):
    """A bool mask (batch, 1, q_length, kv_length), True = visible, that is not written out until somebody needs it.

    ``flash_ext``'s attention reads ``visibility``. What combines bool masks gets the dense one, so that a model may do
    with it what it does with SDPA's. All else is refused: a model that adds its mask to scores, or fills them where it
    is True, computes attention by itself and expects another kind of mask.
    """

    visibility: Visibility | None
    _dense: Tensor | None

    @staticmethod
    def of_rules(visibility: Visibility, batch: int, q_length: int, kv_length: int, device: Any) -> VisibilityMask:
        return _wrap((batch, 1, q_length, kv_length), torch.device(device), visibility, None)

    def dense(self) -> Tensor:
        """The mask as a plain tensor."""
        if self._dense is not None:
            return self._dense
        assert self.visibility is not None
        batch, _, q_length, kv_length = self.shape
        return self.visibility.dense(batch, q_length, kv_length, self.device)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"VisibilityMask({tuple(self.shape)}, {self.visibility})"

    __torch_function__ = without_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, VisibilityMask) and first.visibility is not None:
            if func in _KEEP_RULES:
                return _wrap(tuple(first.shape), first.device, first.visibility, None)
            if func is _ATEN._to_copy.default and kwargs.get("dtype") in (None, torch.bool):
                device = kwargs.get("device") or first.device
                return _wrap(tuple(first.shape), device, first.visibility.to(device), None)
        name = func.overloadpacket._qualified_op_name.removeprefix("aten::")
        makes_a_mask = func.is_view or name in _MAKE_A_MASK
        if not makes_a_mask and name not in _READ_A_MASK:
            raise RuntimeError(
                f"flash_ext: this model does {name}() with its attention mask, so it does not attend through "
                "transformers' AttentionInterface. Use attn_implementation='eager', or 'sdpa' where the model has it."
            )
        args, kwargs = tree_map_only(VisibilityMask, VisibilityMask.dense, (args, kwargs))
        result = func(*args, **kwargs)
        if makes_a_mask and isinstance(result, Tensor) and result.dtype == torch.bool:
            return _wrap(tuple(result.shape), result.device, None, result)
        return result


def _wrap(
    shape: tuple[int, ...], device: torch.device, visibility: Visibility | None, dense: Tensor | None
) -> VisibilityMask:
    mask: VisibilityMask = torch.Tensor._make_wrapper_subclass(VisibilityMask, shape, dtype=torch.bool, device=device)
    mask.visibility, mask._dense = visibility, dense
    return mask


# ---- What transformers calls ----------------------------------------------------------------------------------------


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = hf.causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    **others: Any,
) -> Tensor | None:
    """A mask for ``transformers.AttentionMaskInterface``: a ``VisibilityMask`` where its rules are known.

    Nothing is read from a GPU, but for the number of documents, which transformers itself waits for just before.

    Args:
        batch_size, q_length, kv_length: of the mask.
        q_offset, kv_offset: the index of the first query and of the first key.
        mask_function: (batch, head, query, key) -> bool, of indices.
        attention_mask: (batch, length), True = a token, counted as keys are.
        allow_is_causal_skip, allow_is_bidirectional_skip, **others: as for transformers' ``sdpa_mask``.
        device: of the mask.

    Returns:
        None where every query sees every key; a plain bool mask (batch, 1, q_length, kv_length) where a graph is being
        traced, for a single query of a compiled decoding step, and for rules that are not known; else a
        ``VisibilityMask``.

    Raises:
        Nothing of its own.
    """
    sizes: dict[str, Any] = dict(batch_size=batch_size, q_length=q_length, kv_length=kv_length)
    sizes |= dict(q_offset=q_offset, kv_offset=kv_offset)
    sizes |= dict(attention_mask=attention_mask, device=device)
    if hf.is_tracing(attention_mask):
        skips = dict(allow_is_causal_skip=allow_is_causal_skip, allow_is_bidirectional_skip=allow_is_bidirectional_skip)
        if mask_function is hf.bidirectional_mask_function and attention_mask is not None:
            padding = _padding(attention_mask, kv_length, kv_offset)
            return padding[:, None, None, :].expand(batch_size, 1, q_length, kv_length)
        return hf.sdpa_mask(mask_function=mask_function, **sizes, **skips, **others)
    offset = q_offset - kv_offset
    compiled_step = q_length == 1 and (isinstance(offset, Tensor) or not allow_is_causal_skip)
    rule = None if compiled_step else read_rule(mask_function)
    if rule is None or not _fits(rule, offset, attention_mask, q_length, kv_length):
        skips = dict(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        mask = hf.sdpa_mask(mask_function=mask_function, **sizes, **skips, **others)
        return mask if compiled_step else _wrap(tuple(mask.shape), mask.device, None, mask)
    visibility = _visibility(rule, offset, attention_mask, q_length, kv_length, kv_offset)
    if (rule.right != 0 and allow_is_bidirectional_skip) or (q_length == 1 and rule.right == 0):
        if _shows_all(visibility, q_length, kv_length):
            return None
    return VisibilityMask.of_rules(visibility, batch_size, q_length, kv_length, device)


def _padding(attention_mask: Tensor, kv_length: int, kv_offset: int) -> Tensor:
    """bool (batch, kv_length): keys that a mask does not reach are no tokens."""
    missing = kv_offset + kv_length - attention_mask.shape[-1]
    return F.pad(attention_mask, (0, max(missing, 0)))[:, kv_offset : kv_offset + kv_length].bool()


def _fits(rule: Rule, offset: int | Tensor, attention_mask: Tensor | None, q_length: int, kv_length: int) -> bool:
    """Whether a ``Visibility`` can say it."""
    if rule.documents is not None:
        whole = isinstance(offset, int) and offset == 0 and q_length == kv_length and attention_mask is None
        return whole and tuple(rule.documents.shape[1:]) == (q_length,)
    # Of a diagonal that the host does not know, only the end of the keys can be moved: to what the last query sees.
    return isinstance(offset, int) or rule.right == 0


def _visibility(
    rule: Rule, offset: int | Tensor, attention_mask: Tensor | None, q_length: int, kv_length: int, kv_offset: int
) -> Visibility:
    if rule.documents is not None:
        return Visibility(
            rule.left, rule.right, 0, documents=rule.documents, cu_seqlens=_starts_of_documents(rule.documents)
        )
    padding = None if attention_mask is None else _padding(attention_mask, kv_length, kv_offset)
    if padding is not None and padding.device.type == "cpu":
        reached = kv_length
        if rule.right == 0:
            reached = min(kv_length, int(offset) + q_length)
        padding = None if bool(padding[:, :reached].all()) else padding
    return Visibility(rule.left, rule.right, offset, padding)


def _starts_of_documents(documents: Tensor) -> Tensor:
    """int32 (documents + 1), where each document begins in the flattened batch; one does not go on in the next row."""
    starts = F.pad(documents.diff(dim=-1) != 0, (1, 0), value=True).flatten().nonzero().flatten()
    return F.pad(starts, (0, 1), value=documents.numel()).to(torch.int32)


def _shows_all(visibility: Visibility, q_length: int, kv_length: int) -> bool:
    if visibility.padding is not None or visibility.documents is not None or isinstance(visibility.offset, Tensor):
        return False
    left, right, offset = visibility.left, visibility.right, visibility.offset
    reaches_left = left < 0 or q_length - 1 + offset - left <= 0
    reaches_right = right < 0 or offset + right >= kv_length - 1
    return reaches_left and reaches_right
