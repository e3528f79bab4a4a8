"""Calls of every CUDA kernel on small tensors, for tools/sanitize.sh: python tools/sanitized_calls.py [PATTERN]."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

import flash_ext
from tests.decode_oracle import make_decode, packed_queries, paged
from tests.oracle import int32, make_call, make_varlen_call, random, random_rng, run_library

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEAD_DIMS = ((64, 64), (128, 128), (192, 192), (256, 256), (40, 88), (192, 128))
LENGTHS = (170, 300)  # more than a tile, and no whole number of them

Options = Callable[[torch.dtype], dict[str, Any]]


def scores(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return random(*shape, dtype=dtype, device="cuda")


def padded(keys: int) -> torch.Tensor:
    """A mask that hides all but a few of them."""
    return (torch.arange(keys, device="cuda") < 90).expand(2, 1, 1, keys)


OPTIONS: dict[str, Options] = {
    "plain": lambda dtype: {},
    "causal": lambda dtype: {"causal": True},
    "window": lambda dtype: {"window_size": (70, 5), "top_left": True},
    "deterministic": lambda dtype: {"deterministic": True, "causal": True},
    "deterministic, dropout": lambda dtype: {"deterministic": True, "dropout_p": 0.3, "rng_state": random_rng("cuda")},
    "deterministic, bias and key padding": lambda dtype: {
        "deterministic": True, "bias": scores(2, 4, *LENGTHS, dtype=dtype), "mask": padded(LENGTHS[1]),
    },
    "softcap": lambda dtype: {"softcap": 5.0},
    "alibi": lambda dtype: {"alibi_slopes": torch.rand(2, 4, device="cuda")},
    "negative scale": lambda dtype: {"softmax_scale": -0.1},
    "sink": lambda dtype: {"sink": scores(4)},
    "bias": lambda dtype: {"bias": scores(2, 4, *LENGTHS, dtype=dtype)},
    "float32 per-key bias": lambda dtype: {"bias": scores(2, 1, 1, LENGTHS[1])},
    "mask": lambda dtype: {"mask": torch.rand(1, 4, *LENGTHS, device="cuda") < 0.6},
    "block mask": lambda dtype: {
        "block_mask": flash_ext.BlockMask.sliding_window(*LENGTHS, (90, 20), block_size=(64, 64), device="cuda")
    },
    "block mask of small blocks": lambda dtype: {
        "block_mask": flash_ext.BlockMask.sliding_window(*LENGTHS, (90, 20), block_size=(32, 64), device="cuda")
    },
    "block mask of whole tiles": lambda dtype: {
        "block_mask": flash_ext.BlockMask.sliding_window(*LENGTHS, (90, 20), block_size=(128, 128), device="cuda")
    },
    "dropout": lambda dtype: {"dropout_p": 0.3, "rng_state": random_rng("cuda")},
    "lengths": lambda dtype: {"seqused_q": int32([100, 0], "cuda"), "seqused_k": int32([1, 300], "cuda")},
    "all": lambda dtype: {
        "bias": scores(1, 4, *LENGTHS, dtype=dtype), "mask": torch.rand(2, 1, *LENGTHS, device="cuda") < 0.6,
        "softcap": 5.0, "sink": scores(4), "causal": True, "dropout_p": 0.3, "rng_state": random_rng("cuda"),
    },
}  # fmt: skip


def attention_calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Forward and backward."""
    for dtype, dims, name in itertools.product(DTYPES, HEAD_DIMS, OPTIONS):

        def run(dtype: torch.dtype = dtype, dims: tuple[int, int] = dims, name: str = name) -> object:
            options = OPTIONS[name](dtype)
            call = make_call(2, *LENGTHS, 4, 2, *dims, dtype=dtype, device="cuda", **options).with_random_gradients()
            return run_library(call, tuple(call.inputs()))

        yield f"attention {name} {dtype} {dims}", run


def block_mask_calls_for_all_gpus() -> Iterator[tuple[str, Callable[[], object]]]:
    """Block masks by the kernels that every GPU runs: by a grid of blocks, and (48, 96) by lookups in the lists."""
    for dtype, head_dim, size in itertools.product(DTYPES, (64, 128, 256), ((128, 128), (64, 64), (48, 96))):

        def run(dtype: torch.dtype = dtype, head_dim: int = head_dim, size: tuple[int, int] = size) -> None:
            mask = flash_ext.BlockMask.sliding_window(*LENGTHS, (90, 20), block_size=size, device="cuda")
            call = make_call(2, *LENGTHS, 4, 2, head_dim, dtype=dtype, device="cuda", block_mask=mask)
            own = torch.ops.flash_ext.use_own_kernels(False)
            run_library(call.with_random_gradients(), ("q", "k", "v"))
            torch.ops.flash_ext.use_own_kernels(own)

        yield f"block mask for all GPUs {size} {dtype} {head_dim}", run


def short_calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Whose heads a CTA of the backward keeps in shared memory."""
    for dtype, (head_dim, *lengths), causal in itertools.product(
        DTYPES[1:], ((40, 200, 170), (64, 256, 256), (128, 100, 128), (72, 60, 30)), (False, True)
    ):

        def run(
            dtype: torch.dtype = dtype, head_dim: int = head_dim, lengths: list[int] = lengths, causal: bool = causal
        ) -> object:
            used = int32([lengths[1], lengths[1] // 2], "cuda")
            call = make_call(2, *lengths, 3, 3, head_dim, dtype=dtype, device="cuda", causal=causal, seqused_k=used)
            return run_library(call.with_random_gradients(), ("q", "k", "v"))

        yield f"short causal={causal} {dtype} {head_dim}", run


def large_calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """With more tiles of keys than a section and two waves: then the backward's main kernel zeroes sums of dQ."""
    masks: dict[str, dict[str, Any]] = {"full": {}, "causal": {"causal": True}, "softcap": {"softcap": 5.0}}
    for dtype, head_dim, name in itertools.product(DTYPES[1:], (64, 128, 192, 256), masks):

        def run(dtype: torch.dtype = dtype, head_dim: int = head_dim, name: str = name) -> object:
            call = make_call(3, 150, 400, 64, 64, head_dim, dtype=dtype, device="cuda", **masks[name])
            return run_library(call.with_random_gradients(), ("q", "k", "v"))

        yield f"large {name} {dtype} {head_dim}", run


def forward_tiles() -> Iterator[tuple[str, Callable[[], object]]]:
    """Forwards in tiles that the sizes above do not choose: of the kernel of short sequences, where Inf in a value
    makes it go through the keys twice, and those for few query tiles."""
    sizes = {"short": (2, 300, 330, 4), "short, two warpgroups": (8, 200, 230, 16), "few tiles": (1, 500, 1024, 32)}
    for dtype, name, causal in itertools.product(DTYPES[1:], sizes, (False, True)):

        def run(dtype: torch.dtype = dtype, name: str = name, causal: bool = causal) -> None:
            batch, *lengths, heads = sizes[name]
            for head_dim in (64, 128):
                call = make_call(batch, *lengths, heads, 2, head_dim, dtype=dtype, device="cuda", causal=causal)
                call.v[0, 150] = torch.inf
                run_library(call)

        yield f"forward {name} causal={causal} {dtype}", run


def many_packed_calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Many sequences, some without queries or keys, with and without a list of tiles."""
    lengths = [(41 * k) % 200 for k in range(150)]
    for head_dim, bound in itertools.product((64, 128, 256), (200, 4096)):

        def run(head_dim: int = head_dim, bound: int = bound) -> object:
            sizes = {"heads_q": 8, "heads_kv": 4, "head_dim": head_dim, "dtype": torch.bfloat16}
            call = make_varlen_call(lengths, lengths[::-1], "cuda", **sizes, causal=True)
            call = call.with_options(max_seqlen_q=bound, max_seqlen_k=bound).with_random_gradients()
            return run_library(call, ("q", "k", "v"))

        yield f"many packed {head_dim} {bound}", run


def packed_calls() -> Iterator[tuple[str, Callable[[], object]]]:
    for dtype, dims, causal in itertools.product(DTYPES, HEAD_DIMS, (False, True)):

        def run(dtype: torch.dtype = dtype, dims: tuple[int, int] = dims, causal: bool = causal) -> object:
            call = make_varlen_call(
                [130, 0, 64, 1], [70, 9, 257, 1], "cuda", heads_q=4, heads_kv=2, head_dim=dims[0], head_dim_v=dims[1],
                dtype=dtype, causal=causal, spare=3,
            )  # fmt: skip
            return run_library(call.with_random_gradients(), ("q", "k", "v"))

        yield f"packed causal={causal} {dtype} {dims}", run


def wild_calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Lengths and indices that make no sense are clamped."""

    def wild(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device="cuda")

    for dtype in DTYPES:

        def lengths(dtype: torch.dtype = dtype) -> object:
            call = make_varlen_call([130, 0, 64], [70, 9, 257], "cuda", head_dim=64, dtype=dtype)
            call = call.with_options(cu_seqlens_q=wild(4), cu_seqlens_k=wild(4)).with_random_gradients()
            return run_library(call, ("q", "k", "v"))

        def blocks(dtype: torch.dtype = dtype) -> object:
            mask = OPTIONS["block mask"](dtype)["block_mask"]
            offsets, indices, ids = (wild(*t.shape) for t in mask.tensors[:3])
            mask = flash_ext.BlockMask(offsets, indices, ids, mask.bitmaps, *LENGTHS)
            call = make_call(2, *LENGTHS, 4, 2, 64, dtype=dtype, device="cuda", block_mask=mask)
            return run_library(call.with_random_gradients(), ("q", "k", "v"))

        def weights(dtype: torch.dtype = dtype) -> object:
            call = make_varlen_call([130, 0, 64], [70, 9, 257], "cuda", head_dim=64, dtype=dtype)
            leaves = [t.requires_grad_() for t in (call.q, call.k, scores(4, len(call.q)))]
            names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
            lengths = {name: wild(4 if name.startswith("cu") else 3) for name in names}
            found = flash_ext.attention_weights(*leaves, **{**call.options, **lengths})
            return torch.autograd.grad(found.float().sum(), leaves)

        def max_logit(dtype: torch.dtype = dtype) -> object:
            call = make_varlen_call([130, 0, 64], [70, 9, 257], "cuda", head_dim=64, dtype=dtype)
            names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
            lengths = {name: wild(4 if name.startswith("cu") else 3) for name in names}
            return flash_ext.attention(call.q, call.k, call.v, **{**call.options, **lengths}, return_max_logit=True)

        def cache(dtype: torch.dtype = dtype) -> object:
            call = make_decode(2, 1, 75, seqlen_new=2, dtype=dtype, device="cuda", cache_seqlens=int32([7, 5], "cuda"))
            call = paged(call, 16)
            return call.run(block_table=wild(2, 5), cache_seqlens=wild(2), cache_leftpad=wild(2), num_splits=2)

        def prompts(dtype: torch.dtype = dtype) -> None:  # in 16 bits, by Hopper's forward
            for pages in (16, 24):
                call = paged(make_decode(2, 150, 1250, head_dim=128, dtype=dtype, device="cuda"), pages)
                call.run(block_table=wild(2, -(-1250 // pages)), cache_seqlens=wild(2))

        def packed_steps(dtype: torch.dtype = dtype) -> None:
            for seqlen_new, pages in itertools.product((0, 2), (0, 16)):
                lengths = int32([7, 5], "cuda")
                call = make_decode(
                    2, 1, 75, seqlen_new=seqlen_new, dtype=dtype, device="cuda", cache_seqlens=lengths
                )  # fmt: skip
                call = packed_queries(paged(call, pages) if pages else call, [3, 2])
                for num_splits in (1, 3):
                    call.run(
                        cu_seqlens_q=wild(3), max_seqlen_q=5, cache_seqlens=wild(2), cache_leftpad=wild(2),
                        num_splits=num_splits,
                    )  # fmt: skip

        yield from (
            (f"wild {f.__name__} {dtype}", f)
            for f in (lengths, blocks, weights, max_logit, cache, prompts, packed_steps)
        )


def decode_calls() -> Iterator[tuple[str, Callable[[], object]]]:
    lengths = ((1, 500), (5, 500), (70, 500), (140, 500), (150, 1250))  # the last: Hopper's tiles for many keys
    # Of 24 rows: tiles begin within a page.
    for dtype, dims, (queries, keys), pages in itertools.product(DTYPES, HEAD_DIMS, lengths, (None, 16, 24)):

        def run(
            dtype: torch.dtype = dtype, dims: tuple[int, int] = dims, n: int = queries, keys: int = keys,
            pages: Any = pages,
        ) -> None:  # fmt: skip
            call = make_decode(
                2, n, keys, 8, 2, *dims, seqlen_new=2, dtype=dtype, device="cuda", window_right=0,
                cache_seqlens=int32([keys - 2, 3], "cuda"), sink=scores(8),
            )  # fmt: skip
            angles = torch.rand(1300, 8, device="cuda")
            call.options |= {"rotary_cos": angles.cos().to(dtype), "rotary_sin": angles.sin().to(dtype)}
            call = call if pages is None else paged(call, pages)
            for num_splits, batch_invariant in ((0, False), (1, False), (4, False), (0, True)):
                call.run(num_splits=num_splits, batch_invariant=batch_invariant)
            packed_queries(call, [n, 0]).run(num_splits=3)

        yield f"decode {dtype} {dims} queries={queries} keys={keys} pages={pages}", run


def other_calls() -> Iterator[tuple[str, Callable[[], object]]]:
    for dtype in DTYPES:

        def weights(dtype: torch.dtype = dtype) -> object:
            call = make_call(2, *LENGTHS, 4, 2, 64, dtype=dtype, device="cuda", causal=True)
            leaves = [t.requires_grad_() for t in (call.q, call.k, run_library(call)["lse"])]
            return torch.autograd.grad(flash_ext.attention_weights(*leaves, causal=True).sum(), leaves)

        def max_logit(dtype: torch.dtype = dtype) -> None:
            for head_dim, name in itertools.product(
                (64, 128, 200), ("plain", "causal", "all", "block mask", "lengths")
            ):
                call = make_call(2, *LENGTHS, 4, 2, head_dim, dtype=dtype, device="cuda", **OPTIONS[name](dtype))
                flash_ext.attention(call.q, call.k, call.v, **call.options, return_max_logit=True)
            call = make_varlen_call([130, 0, 64, 1], [70, 9, 257, 1], "cuda", dtype=dtype, spare=3)
            flash_ext.attention(call.q, call.k, call.v, **call.options, return_max_logit=True)

        def merge(dtype: torch.dtype = dtype) -> object:
            leaves = [random(3, 2, 70, 4, 72, dtype=dtype, device="cuda"), scores(3, 2, 4, 70)]
            wanted = [t.requires_grad_() for t in leaves]
            return torch.autograd.grad(flash_ext.merge(*wanted)[0].sum(), wanted)

        def add_layer_norm(dtype: torch.dtype = dtype) -> object:
            x = random(70, 200, dtype=dtype, device="cuda")
            return torch.ops.flash_ext.add_layer_norm(x, x, x[0], x[0], 1e-5, True)

        yield from ((f"{f.__name__} {dtype}", f) for f in (weights, max_logit, merge, add_layer_norm))
    yield "dropout_mask", lambda: torch.ops.flash_ext.dropout_mask(random_rng("cuda"), 0.5, 2, 3, 65, 130)
    yield "block lists", block_lists


def block_lists() -> list[flash_ext.BlockMask]:
    """Of all rules, and of bounds that make no sense."""
    build, device = flash_ext.BlockMask, "cuda"
    wild = [torch.randint(-(2**40), 2**40, shape, device=device) for shape in ((40,), (2,), (2, 20, 2))]
    masks = [
        build.sliding_window(300, 500, (70, 20), 40, (96, 64), device=device),
        build.sliding_window(300, 500, (70, 0), 40, (32, 160), device=device),
        build.documents(int32([0, 20, 57, 57, 260], device), 300, (32, 64), causal=True),
        build.documents(wild[0] % 400, 300, (128, 32)),
        build.documents(wild[0], 300, (128, 32), causal=True),
        build.prefix_lm(wild[1], 300, 500, (64, 32)),
        build.bidirectional_spans(wild[2] % 400, 300, (32, 32)),
    ]
    return masks + [mask.transpose() for mask in masks]


def main() -> int:
    pattern = re.compile(sys.argv[1] if len(sys.argv) > 1 else "")
    count = 0
    kinds = (
        attention_calls, block_mask_calls_for_all_gpus, short_calls, large_calls, forward_tiles, packed_calls,
        many_packed_calls, wild_calls, decode_calls, other_calls,
    )  # fmt: skip
    for calls in kinds:
        for name, run in calls():
            if pattern.search(name):
                print(name, flush=True)
                run()
                torch.cuda.synchronize()
                count += 1
    print(f"{count} calls")
    return 0 if count else 1


if __name__ == "__main__":
    sys.exit(main())
