"""What the oracle holds against a result."""

from __future__ import annotations

import pytest
import torch

from tests.oracle import Oracle, make_call, random, run_reference
from tests.reference import product


@pytest.mark.parametrize(("seqlen_q", "holds"), [(2, True), (40, False)])
def test_few_rows_have_no_rms(seqlen_q: int, holds: bool) -> None:
    """The largest error counts for them alone: low may be right by luck in all of two rows."""
    call = make_call(1, seqlen_q, 40, 1, 1, dtype=torch.bfloat16).with_random_gradients()
    ref = run_reference(call, torch.float64, ("k",))
    oracle = Oracle(call, ref, dict(ref), {"dk": torch.zeros_like(ref["dk"])})
    got = ref["dk"] + 0.015 * ref["dk"].abs().max()  # all elements as far off as one of them may be
    if holds:
        oracle.assert_within_bound("dk", got)
        return
    with pytest.raises(AssertionError, match="RMS"):
        oracle.assert_within_bound("dk", got)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_of_large_scores_widens_the_bounds_of_its_own_keys_alone(dtype: torch.dtype) -> None:
    call = make_call(1, 40, 40, 1, 1, dtype=dtype, causal=True, softmax_scale=0.05)
    call.q[0, 0] = 1000 * call.k[0, 0] / call.k[0, 0].square().sum()  # a score of 50, of the one key that it sees
    call.options["bias"] = random(1, 1, 40, 40, dtype=dtype) * 0.1
    slack = Oracle.of(call.with_random_gradients(), ("q", "k", "v", "bias")).slack
    for name in ("out", "dq", "dk", "dv"):
        assert (slack[name][0, 0] > 0).any() and not slack[name][0, 1:].any(), name
    assert slack["dbias"][0, 0, 0, 0] > 0 and int((slack["dbias"] > 0).sum()) == 1


def test_products_of_float16_are_those_of_torch() -> None:
    """They are done in another way on a CPU, where torch's own take long."""
    a, b = (random(2, 40, 3, 24, dtype=torch.float16).requires_grad_() for _ in range(2))
    grad = random(2, 3, 40, 40, dtype=torch.float16)
    results = []
    for multiply in (product, torch.einsum):
        scores = multiply("bihd,bjhd->bhij", a, b)
        results.append((scores, *torch.autograd.grad(scores, (a, b), grad)))
    for ours, of_torch in zip(*results, strict=True):
        assert ours.dtype == torch.float16
        torch.testing.assert_close(ours, of_torch, rtol=2**-10, atol=2**-16)
