"""What is timed has to be right first: outputs are held against the oracle of the tests.

As in the tests, the error may be twice that of the same mathematics by plain PyTorch in the input dtype (three times
with softcap), plus rounding. Rounding counts in units of the largest number of the result itself: the mean of thousands
of values is small, and next to a bound for numbers around one a kernel that writes zeros would pass. The reference
computes in float32 (float64 for float32 inputs), for the first and the last key head and the query heads that share it,
in all batch entries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from tests import oracle, reference

CHUNK_SCORES = 2**25  # scores of the reference that are in memory at a time, times about ten for its intermediates
ROUNDING = {torch.float16: 2, torch.bfloat16: 2, torch.float32: 32, torch.float64: 4096}  # in eps of the largest number
AVERAGE_WITHIN = 0.05  # of one, the projection of what dropout left
AVERAGE_NOISE = 4  # over the root of how many numbers there are: what dropout adds to that at most
CHUNKED = frozenset({"causal", "window_size", "block_mask"})  # options that the reference takes in chunks of queries
PACKED = frozenset({"causal", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"})
HEAD_DIMENSION_OF_OPTION = {"bias": 1, "mask": 1, "alibi_slopes": -1, "sink": 0}

Result = dict[str, Tensor]  # "out" and, for each input that has a gradient, "d" + its name


class WrongOutput(RuntimeError):
    """An output misses the bound."""


class Checker(Protocol):
    def check(self, who: str, result: Result) -> None:
        """Raises WrongOutput."""


@dataclass(frozen=True)
class ExpectedOutput:
    """The right "out", in a wider dtype, and what plain PyTorch makes in the dtype that is timed."""

    ref: Tensor
    low: Tensor

    def check(self, who: str, result: Result) -> None:
        """Raises WrongOutput."""
        check_bound(f"{who}: out", result["out"], self.ref, self.low)


@dataclass(frozen=True)
class _Share:
    """What a key head's share of the result has to be."""

    head_kv: int
    ref: Result
    low: Result


class Expected:
    """The right result of a call, for some of its heads."""

    def __init__(
        self,
        call: oracle.Call,
        gradients_of: Sequence[str] = (),
        heads_kv: Sequence[int] | None = None,
        batch_entries: int | None = None,
    ):
        """``heads_kv``: the key heads that are looked at; None: the first and the last. ``batch_entries``: so many of
        the first ones, or of the first packed sequences; None: all."""
        self._call, self._gradients_of, self._batch = call, tuple(gradients_of), slice(batch_entries)
        if call.varlen and batch_entries is not None:
            self._call, self._batch = _first_sequences(call, batch_entries)
        chosen = {0, call.k.shape[-2] - 1} if heads_kv is None else set(heads_kv)
        self._shares = [self._share(head_kv) for head_kv in sorted(chosen)]

    def _share(self, head_kv: int) -> _Share:
        cut = _cut_call(self._call, head_kv, self._batch)
        exact = torch.float64 if cut.dtype in (torch.float32, torch.float64) else torch.float32
        with exact_matmuls():
            ref = _run(cut, exact, self._gradients_of)
        return _Share(head_kv, ref, _run(cut, cut.dtype, self._gradients_of))

    def check(self, who: str, result: Result) -> None:
        """Raises WrongOutput."""
        factor = 3.0 if self._call.options.get("softcap") else 2.0
        for share in self._shares:
            for name, got in _cut_result(self._call, result, share.head_kv, self._batch).items():
                check_bound(f"{who}: {name}", got, share.ref[name], share.low[name], factor)
        check_finite(who, result)

    def check_on_average(self, who: str, result: Result) -> None:
        """Raises WrongOutput where the result is not this one with noise of mean zero added."""
        for share in self._shares:
            for name, got in _cut_result(self._call, result, share.head_kv, self._batch).items():
                check_share(f"{who}: {name}", got, share.ref[name])
        check_finite(who, result)


@dataclass(frozen=True)
class OnAverage:
    """What dropout makes of a result, whose numbers are its own: without bias, it is what there is without dropout."""

    without_dropout: Expected

    def check(self, who: str, result: Result) -> None:
        self.without_dropout.check_on_average(who, result)


def check_share(what: str, got: Tensor, ref: Tensor) -> None:
    """Raises WrongOutput where ``got`` is not ``ref`` and noise, whose projection onto ``ref`` is near one."""
    if got.shape != ref.shape:
        raise WrongOutput(f"{what} has shape {tuple(got.shape)}, expected {tuple(ref.shape)}")
    share = float((got.to(ref.dtype) * ref).sum() / ref.square().sum())
    if not abs(share - 1) <= AVERAGE_WITHIN + AVERAGE_NOISE / ref.numel() ** 0.5:
        raise WrongOutput(f"{what} is {share:.2f} times what is expected on average")


def check_finite(who: str, result: Result) -> None:
    """Raises WrongOutput."""
    for name, tensor in result.items():
        if not tensor.isfinite().all():
            raise WrongOutput(f"{who}: {name} is not finite everywhere")


def check_bound(what: str, got: Tensor, ref: Tensor, low: Tensor, factor: float = 2.0) -> None:
    """Raises WrongOutput where an error is above ``factor`` times that of ``low``, and rounding."""
    if got.shape != ref.shape:
        raise WrongOutput(f"{what} has shape {tuple(got.shape)}, expected {tuple(ref.shape)}")
    error, low_error = (_largest(t.to(ref.dtype) - ref) for t in (got, low))
    bound = factor * low_error + ROUNDING[got.dtype] * torch.finfo(got.dtype).eps * _largest(ref)
    if not error <= bound:  # NaN is not below the bound either
        raise WrongOutput(f"{what} is off by {error:.2e}, allowed is {bound:.2e} (plain PyTorch: {low_error:.2e})")


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


@contextmanager
def exact_matmuls() -> Iterator[None]:
    """No TF32 in the reference, whatever the candidates may use."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _query_heads(call: oracle.Call, head_kv: int) -> slice:
    group = call.q.shape[-2] // call.k.shape[-2]
    return slice(head_kv * group, (head_kv + 1) * group)


def _cut_call(call: oracle.Call, head_kv: int, batch: slice) -> oracle.Call:
    heads, own = _query_heads(call, head_kv), slice(head_kv, head_kv + 1)
    options = dict(call.options)
    for name, dim in HEAD_DIMENSION_OF_OPTION.items():
        if options.get(name) is not None:
            options[name] = _heads_of(options[name], dim, heads)
    return replace(
        call,
        q=call.q[batch, ..., heads, :],
        k=call.k[batch, ..., own, :],
        v=call.v[batch, ..., own, :],
        options=options,
        grad_out=None if call.grad_out is None else call.grad_out[batch, ..., heads, :],
    )


def _first_sequences(call: oracle.Call, count: int) -> tuple[oracle.Call, slice]:
    """The call with the boundaries of its first sequences alone, and the rows of these, of q and k alike."""
    ends = call.options["cu_seqlens_q"][: count + 1]
    assert torch.equal(ends, call.options["cu_seqlens_k"][: count + 1])
    return call.with_options(cu_seqlens_q=ends, cu_seqlens_k=ends), slice(int(ends[-1]))


def _cut_result(call: oracle.Call, result: Result, head_kv: int, batch: slice) -> Result:
    heads, own = _query_heads(call, head_kv), slice(head_kv, head_kv + 1)
    cut: Result = {}
    for name, tensor in result.items():
        if name in ("out", "dq", "dk", "dv"):
            cut[name] = tensor[batch, ..., own if name in ("dk", "dv") else heads, :]
        else:
            cut[name] = _heads_of(tensor, HEAD_DIMENSION_OF_OPTION[name.removeprefix("d")], heads)
    return cut


def _heads_of(tensor: Tensor, dim: int, heads: slice) -> Tensor:
    """The heads' part of a tensor that has one entry for each head, or one for all."""
    return tensor if tensor.shape[dim] == 1 else tensor.narrow(dim, heads.start, heads.stop - heads.start)


def _run(call: oracle.Call, dtype: torch.dtype, gradients_of: Sequence[str]) -> Result:
    if set(gradients_of) <= {"q", "k", "v"}:
        if set(call.options) <= CHUNKED:
            return _run_in_chunks(call, dtype, bool(gradients_of))
        if call.varlen and set(call.options) <= PACKED and (same_length := _by_length(call)) is not None:
            return _run_packed(call, same_length, dtype, bool(gradients_of))
    result = oracle.run_reference(call, dtype, gradients_of)
    return {name: tensor for name, tensor in result.items() if name != "lse"}


def _run_in_chunks(call: oracle.Call, dtype: torch.dtype, with_gradients: bool) -> Result:
    """Plain attention, some queries at a time: long sequences have more scores than memory holds."""
    (batch, seqlen_q, heads_q, _), seqlen_k = call.q.shape, call.k.shape[1]
    visible = _visible_pairs(call)
    ends_early = visible is None and bool(call.options.get("causal"))
    rows = max(1, CHUNK_SCORES // (batch * heads_q * seqlen_k))
    wide = torch.promote_types(dtype, torch.float32)  # sums over the chunks, as a matrix product sums
    grad_k, grad_v = (torch.zeros(t.shape, dtype=wide, device=t.device) for t in (call.k, call.v))
    outs: list[Tensor] = []
    grads_q: list[Tensor] = []
    for start in range(0, seqlen_q, rows):
        stop = min(start + rows, seqlen_q)
        keys = stop + seqlen_k - seqlen_q if ends_early else seqlen_k
        parts = (call.q[:, start:stop], call.k[:, :keys], call.v[:, :keys])
        q, k, v = (part.detach().to(dtype).requires_grad_(with_gradients) for part in parts)
        mask = None if visible is None else visible[..., start:stop, :]
        out, _, _ = reference.attention(q, k, v, reference.Options(causal=ends_early, mask=mask))
        outs.append(out.detach())
        if with_gradients:
            assert call.grad_out is not None
            dq, dk, dv = torch.autograd.grad(out, (q, k, v), call.grad_out[:, start:stop].to(dtype))
            grads_q.append(dq)
            grad_k[:, :keys] += dk
            grad_v[:, :keys] += dv
    result = {"out": torch.cat(outs, 1)}
    if with_gradients:
        result |= {"dq": torch.cat(grads_q, 1), "dk": grad_k.to(dtype), "dv": grad_v.to(dtype)}
    return result


def _visible_pairs(call: oracle.Call) -> Tensor | None:
    """Bool, (batch|1, heads|1, seqlen_q, seqlen_k); None where ``causal`` alone says it, or all are."""
    if set(call.options) <= {"causal"}:
        return None
    rules = {name: call.options[name] for name in ("causal", "window_size") if name in call.options}
    lengths = call.q.shape[1], call.k.shape[1]
    visible = reference.visible(*lengths, reference.Options(**rules), call.q.device)[None, None]
    return visible if call.block_visible is None else visible & call.block_visible


Starts = list[tuple[int, int]]  # of sequences: their first query, their first key


def _by_length(call: oracle.Call) -> dict[tuple[int, int], Starts] | None:
    """The sequences of each (queries, keys); None where one has more queries than keys: chunks are not made for it."""
    starts_q, starts_k = oracle.boundaries(call)
    found: dict[tuple[int, int], Starts] = {}
    for b, start in enumerate(zip(starts_q[:-1], starts_k[:-1], strict=True)):
        lengths = starts_q[b + 1] - start[0], starts_k[b + 1] - start[1]
        if lengths[0] > lengths[1]:
            return None
        if lengths[0] > 0:
            found.setdefault(lengths, []).append(start)
    return found


def _run_packed(
    call: oracle.Call, same_length: dict[tuple[int, int], Starts], dtype: torch.dtype, with_gradients: bool
) -> Result:
    """Sequences of one length as a dense batch: one after another, thousands of them take minutes."""
    shapes = {"out": (*call.q.shape[:-1], call.v.shape[-1])}
    if with_gradients:
        shapes |= {"dq": call.q.shape, "dk": call.k.shape, "dv": call.v.shape}
    result = {name: torch.zeros(shape, dtype=dtype, device=call.q.device) for name, shape in shapes.items()}
    for lengths, starts in same_length.items():
        firsts = torch.tensor(starts, device=call.q.device)
        rows_q, rows_k = (
            firsts[:, side, None] + torch.arange(length, device=call.q.device) for side, length in enumerate(lengths)
        )
        dense = replace(
            call,
            q=call.q[rows_q],
            k=call.k[rows_k],
            v=call.v[rows_k],
            options={"causal": bool(call.options.get("causal"))},
            grad_out=None if call.grad_out is None else call.grad_out[rows_q],
        )
        for name, value in _run_in_chunks(dense, dtype, with_gradients).items():
            result[name][rows_k if name in ("dk", "dv") else rows_q] = value
    return result
