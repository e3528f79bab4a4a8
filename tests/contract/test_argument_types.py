"""Each argument of each public function, given values of types that it cannot have: the error names the argument.

The table is made from the signatures: an argument's annotation says what is wrong for it, so that a new argument, or a
new function without a good call in ``GOOD``, is a failure here.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nested import nested_tensor_from_jagged
from torch.nn.attention.bias import causal_upper_left

import flash_ext
from flash_ext import functional
from tests.build.test_docstrings import FUNCTIONS
from tests.oracle import cumulative, int32, random

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # nested, masked and quantized tensors are prototypes


class OtherTensor(Tensor):
    """Of a class that says nothing of what it holds."""


# ---- What is wrong, by annotation -----------------------------------------------------------------------------------

NO_TENSORS: dict[str, Callable[[], Any]] = {
    "number": lambda: 1.5,
    "list": lambda: [1.0],
    "string": lambda: "x",
    "array": lambda: np.ones(3),
    "class of its own": lambda: torch.ones(2, 3, 2, 8).as_subclass(OtherTensor),
    "causal bias": lambda: causal_upper_left(3, 3),
    "masked": lambda: torch.masked.masked_tensor(torch.ones(2, 3), torch.ones(2, 3) > 0),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)], layout=torch.jagged),
    "sparse": lambda: torch.ones(2, 3, 2, 8).to_sparse(),
}
NONE: dict[str, Callable[[], Any]] = {"None": lambda: None}
NO_NUMBERS: dict[str, Callable[[], Any]] = {
    "string": lambda: "0.1",
    "bool": lambda: True,
    "list": lambda: [0.1],
    "complex": lambda: 1j,
    "tensor": lambda: torch.tensor(0.1),
    "tensor with a gradient": lambda: torch.tensor(0.1, requires_grad=True),
}
NO_SIZES: dict[str, Callable[[], Any]] = {
    "fraction": lambda: 1.5,
    "whole float": lambda: 6.0,
    "string": lambda: "6",
    "bool": lambda: True,
    "more than 64 bits": lambda: 2**70,
    "tensor of a fraction": lambda: torch.tensor(6.0),
    "tensor of a bool": lambda: torch.tensor(True),
}
SIZE_TENSORS: dict[str, Callable[[], Any]] = {"tensor": lambda: torch.tensor(6)}
NO_FLAGS: dict[str, Callable[[], Any]] = {
    "string": lambda: "False",
    "number": lambda: 0,
    "tensor": lambda: torch.tensor(True),
    "list": lambda: [],
}
NO_PAIRS: dict[str, Callable[[], Any]] = {
    **NONE,
    "number": lambda: 64,
    "one": lambda: (64,),
    "three": lambda: (64, 64, 64),
    "fractions": lambda: (64.0, 64.0),
    "strings": lambda: ("a", "b"),
    "bools": lambda: (True, False),
    "Nones": lambda: (None, None),
}
PAIR_TENSORS: dict[str, Callable[[], Any]] = {"tensor": lambda: torch.tensor([64, 64])}
NO_TEXT: dict[str, Callable[[], Any]] = {**NONE, "number": lambda: 3.5, "list": lambda: []}
NO_FUNCTIONS: dict[str, Callable[[], Any]] = {**NONE, "number": lambda: 3}

NO_DEVICE: dict[str, Callable[[], Any]] = {
    "fraction": lambda: 3.5,
    "list": lambda: ["cpu"],
    "tensor": lambda: torch.ones(1),
}
WRONG: dict[str, dict[str, Callable[[], Any]]] = {
    "Tensor": NO_TENSORS | NONE,
    "Tensor | None": NO_TENSORS,
    "Tensor | Sequence[Tensor]": {
        **{name: make for name, make in NO_TENSORS.items() if name != "array"},
        **NONE,
        "list of None": lambda: [None],
        "list of a class of its own": lambda: [NO_TENSORS["class of its own"]()],
    },
    "float": NO_NUMBERS | NONE,
    "float | None": NO_NUMBERS,
    "int": NO_SIZES | SIZE_TENSORS | NONE,
    "int | None": NO_SIZES | SIZE_TENSORS,
    "Integer": NO_SIZES | NONE,  # of flash-attn, which reads tensors
    "int | Tensor | None": {name: make for name, make in NO_TENSORS.items() if name != "number"} | NO_SIZES,
    "bool": NO_FLAGS | NONE,
    "bool | None": NO_FLAGS,
    "tuple[int, int]": NO_PAIRS | PAIR_TENSORS,
    "Window": NO_PAIRS,
    "BlockMask | None": {
        "tensor": lambda: torch.ones(3, 3, dtype=torch.bool),
        "of FlexAttention": lambda: flex_block_mask(),
        "of a class of its own": lambda: block_mask_of_other_tensors(),
    },
    "torch.device | str": NO_TEXT,
    "torch.device | str | int": NO_DEVICE | NONE,
    "torch.device | str | int | None": NO_DEVICE,
    "str": NO_TEXT,
    "MaskMod": NO_FUNCTIONS,
    "torch.Generator | None": {"number": lambda: 3},
    "Any": {**NONE, "number": lambda: 3, "of our own": lambda: flash_ext.BlockMask.causal(3, 3)},
    "Callable[[str], object]": NO_FUNCTIONS,
    "nn.Module": NO_FUNCTIONS,
}
del WRONG["int | Tensor | None"]["tensor of a fraction"], WRONG["int | Tensor | None"]["tensor of a bool"]


def flex_block_mask() -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu")


def block_mask_of_other_tensors() -> flash_ext.BlockMask:
    good = flash_ext.BlockMask.causal(3, 3)
    return flash_ext.BlockMask(good.offsets.as_subclass(OtherTensor), *good.tensors[1:], seqlen_q=3, seqlen_k=3)


# ---- Good calls -----------------------------------------------------------------------------------------------------


def qkv(*shape: int) -> dict[str, Any]:
    return dict(q=random(*shape), k=random(*shape), v=random(*shape))


def packed(**more: Any) -> dict[str, Any]:
    lengths = dict(cu_seqlens_q=cumulative([3, 2], "cpu"), cu_seqlens_k=cumulative([3, 2], "cpu"))
    return lengths | dict(max_seqlen_q=3, max_seqlen_k=3) | more


GOOD: dict[str, Callable[[], dict[str, Any]]] = {
    "attention": lambda: qkv(2, 3, 2, 8),
    "attention_weights": lambda: dict(q=random(2, 3, 2, 8), k=random(2, 3, 2, 8), lse=random(2, 2, 3)),
    "decode": lambda: dict(q=random(2, 1, 2, 8), k_cache=random(2, 9, 2, 8), v_cache=random(2, 9, 2, 8)),
    "merge": lambda: dict(outs=random(2, 2, 3, 2, 8), lses=random(2, 2, 2, 3)),
    "draw_rng_state": lambda: dict(device="cpu"),
    "supports": lambda: qkv(2, 3, 2, 8),
    "explain": lambda: qkv(2, 3, 2, 8),
    "scaled_dot_product_attention": lambda: dict(
        query=random(2, 2, 3, 8), key=random(2, 2, 3, 8), value=random(2, 2, 3, 8)
    ),
    "flash_attn_func": lambda: qkv(2, 3, 2, 8),
    "flash_attn_qkvpacked_func": lambda: dict(qkv=random(2, 3, 3, 2, 8)),
    "flash_attn_kvpacked_func": lambda: dict(q=random(2, 3, 2, 8), kv=random(2, 3, 2, 2, 8)),
    "flash_attn_varlen_func": lambda: packed(**qkv(5, 2, 8)),
    "flash_attn_varlen_qkvpacked_func": lambda: dict(
        qkv=random(5, 3, 2, 8), cu_seqlens=cumulative([3, 2], "cpu"), max_seqlen=3
    ),
    "flash_attn_varlen_kvpacked_func": lambda: packed(q=random(5, 2, 8), kv=random(5, 2, 2, 8)),
    "flash_attn_with_kvcache": lambda: dict(
        q=random(2, 1, 2, 8), k_cache=random(2, 9, 2, 8), v_cache=random(2, 9, 2, 8)
    ),
    "index_first_axis": lambda: dict(input=random(5, 2), indices=torch.tensor([1, 2])),
    "pad_input": lambda: dict(hidden_states=random(2, 3), indices=torch.tensor([0, 2]), batch=1, seqlen=3),
    "unpad_input": lambda: dict(hidden_states=random(2, 3, 4), attention_mask=torch.ones(2, 3).int()),
    "unpad_input_for_concatenated_sequences": lambda: dict(
        hidden_states=random(1, 3, 4), attention_mask_in_length=int32([2, 1, 0], "cpu")[None]
    ),
    "convert": lambda: dict(model=nn.MultiheadAttention(8, 2)),
    "BlockMask.to": lambda: dict(self=flash_ext.BlockMask.causal(3, 3), device="cpu"),
    "BlockMask.cuda": lambda: dict(self=flash_ext.BlockMask.causal(3, 3), device="cpu"),
    "BlockMask.from_dense": lambda: dict(visible=torch.ones(3, 3) > 0),
    "BlockMask.from_blocks": lambda: dict(blocks=torch.ones(1, 1) > 0, seqlen_q=3, seqlen_k=3),
    "BlockMask.from_mask_mod": lambda: dict(mask_mod=lambda b, h, i, j: i >= j, seqlen_q=3, seqlen_k=3),
    "BlockMask.causal": lambda: dict(seqlen_q=3, seqlen_k=3),
    "BlockMask.sliding_window": lambda: dict(seqlen_q=3, seqlen_k=3, window_size=(1, 1)),
    "BlockMask.document": lambda: dict(ids_q=int32([0, 0, 1], "cpu")),
    "BlockMask.documents": lambda: dict(cu_seqlens=int32([0, 2, 3], "cpu"), seqlen=3),
    "BlockMask.prefix_lm": lambda: dict(prefix=int32([2], "cpu"), seqlen_q=3, seqlen_k=3),
    "BlockMask.bidirectional_spans": lambda: dict(spans=int32([[0, 2]], "cpu"), seqlen=3),
    "BlockMask.dilated": lambda: dict(seqlen_q=3, seqlen_k=3, blocks=1, dilation=2),
    "BlockMask.strided": lambda: dict(seqlen_q=3, seqlen_k=3, local_blocks=1, stride=2),
    "BlockMask.random": lambda: dict(seqlen_q=3, seqlen_k=3, blocks=1),
    "BlockMask.top_k": lambda: dict(q=random(2, 3, 2, 8), k=random(2, 3, 2, 8), blocks=1),
    "BlockMask.plot": lambda: dict(self=flash_ext.BlockMask.causal(3, 3)),
    "BlockMask.from_flex": lambda: dict(block_mask=flex_block_mask()),
}


def nested(heads_first: bool, **more: Any) -> dict[str, Any]:
    """q, k and v of two sequences, of 3 and 2 rows."""
    offsets = torch.tensor([0, 3, 5])
    made = (nested_tensor_from_jagged(random(5, 2, 8), offsets) for _ in range(3))
    names = ("query", "key", "value") if heads_first else ("q", "k", "v")
    return {name: x.transpose(1, 2) if heads_first else x for name, x in zip(names, made, strict=True)} | more


NESTED: dict[str, Callable[[], dict[str, Any]]] = {  # the functions that take nested tensors
    "attention": lambda: nested(False),
    "supports": lambda: nested(False),
    "explain": lambda: nested(False),
    "scaled_dot_product_attention": lambda: nested(True),
}
WITHOUT_ARGUMENTS = {
    "build_info",
    "doctor",
    "BlockMask.to_dense",
    "BlockMask.cpu",
    "BlockMask.transpose",
    "BlockMask.to_flex",
}
OF_THE_PROCESS = {"as_flash_attn", "activate", "activated", "deactivate"}  # they change what later tests call
TORCHS = {"MultiheadAttention.forward"}  # raises what torch's module does: tests/integration/test_modules.py

TAKEN = {("scaled_dot_product_attention", "attn_mask", "causal bias")}
ALONE = {"k": "v", "v": "k", "rotary_cos": "rotary_sin", "rotary_sin": "rotary_cos"}  # pairs of optional arguments


def arguments_of(name: str) -> dict[str, str]:
    """The annotation of each. Functions that take ``attention``'s options take them all."""
    found = {p.name: str(p.annotation) for p in inspect.signature(FUNCTIONS[name]).parameters.values()}
    if found.pop("options", None):
        options = inspect.signature(functional.checked_score_options).parameters.values()
        found = {p.name: str(p.annotation) for p in options if p.name in functional.SCORE_OPTIONS} | found
        if name == "attention_weights":
            del found["sink"]
    found.pop("self", None)
    return found


def cases() -> Iterator[tuple[str, str]]:
    for name in FUNCTIONS:
        if name not in WITHOUT_ARGUMENTS | OF_THE_PROCESS | TORCHS:
            yield from ((name, argument) for argument in arguments_of(name))


def call(name: str, arguments: dict[str, Any]) -> Any:
    """``supports`` does not raise but returns what would be raised."""
    arguments = dict(arguments)
    instance = [arguments.pop("self")] if "self" in arguments else []
    result = FUNCTIONS[name](*instance, **arguments)
    if name == "supports" and not result[0]:
        raise ValueError(result[1])
    return result


INTERNAL = {"q", "k", "v", "softmax_scale", "k_cache", "v_cache", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q"}
DUMPS = r"incompatible function arguments|Expected a value of type|Declaration:|invalid combination|object has no"


def assert_wrong_types_are_named(name: str, argument: str, good: dict[str, Any], taken: set[str]) -> None:
    parameters = arguments_of(name)
    foreign = INTERNAL - parameters.keys()
    for kind, make in WRONG[parameters[argument]].items():
        if kind in taken:
            continue
        with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
            call(name, {**good, argument: make()})
            pytest.fail(f"{argument} is {kind}, and nothing is raised")
        message = str(caught.value)
        assert re.search(rf"\b{argument}\b", message), f"{kind}: {message}"
        assert not re.search(DUMPS, message), f"{kind}: {message}"
        assert not [word for word in foreign if re.search(rf"\b{word}\b", message)], f"{kind}: {message}"
        assert len(message) < 400, f"{kind}: {message}"


@pytest.mark.parametrize(("name", "argument"), cases(), ids=str)
def test_wrong_types(name: str, argument: str) -> None:
    good = GOOD[name]()
    call(name, good)
    if argument in ALONE and arguments_of(name)[argument] == "Tensor | None":
        good[ALONE[argument]] = random(2, 1, 2, 8)
    taken = {kind for function, parameter, kind in TAKEN if (function, parameter) == (name, argument)}
    assert_wrong_types_are_named(name, argument, good, taken)


@pytest.mark.parametrize(("name", "argument"), [case for case in cases() if case[0] in NESTED], ids=str)
def test_wrong_types_beside_nested_tensors(name: str, argument: str) -> None:
    good = NESTED[name]()
    call(name, good)
    assert_wrong_types_are_named(name, argument, good, set())


def test_each_function_has_a_good_call() -> None:
    assert FUNCTIONS.keys() == GOOD.keys() | WITHOUT_ARGUMENTS | OF_THE_PROCESS | TORCHS


# ---- What is right --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "number", [np.float64(0.5), np.float32(0.5), np.float16(0.5), np.int64(1), 1], ids=lambda n: type(n).__name__
)
def test_real_numbers(number: Any) -> None:
    tensors = GOOD["attention"]()
    expected = flash_ext.attention(**tensors, softmax_scale=float(number), softcap=float(number))
    assert torch.equal(flash_ext.attention(**tensors, softmax_scale=number, softcap=number), expected)
    query, key, value = (t.transpose(1, 2) for t in tensors.values())
    out = flash_ext.scaled_dot_product_attention(query, key, value, scale=number)
    assert torch.equal(out, flash_ext.scaled_dot_product_attention(query, key, value, scale=float(number)))


def test_integers_and_bools_of_numpy() -> None:
    tensors = qkv(5, 2, 8)
    options = packed()
    expected = flash_ext.attention(**tensors, **options, causal=True)
    given = packed(max_seqlen_q=np.int32(3), max_seqlen_k=np.int64(3))
    assert torch.equal(flash_ext.attention(**tensors, **given, causal=np.bool_(True)), expected)
    left = flash_ext.BlockMask.sliding_window(np.int64(64), 64, (np.int64(3), 0), block_size=(np.int32(16), 32))
    assert torch.equal(left.to_dense(), flash_ext.BlockMask.sliding_window(64, 64, (3, 0), 0, (16, 32)).to_dense())


def test_parameters() -> None:
    tensors = GOOD["attention"]()
    expected = flash_ext.attention(**tensors)
    assert torch.equal(flash_ext.attention(**{name: nn.Parameter(t) for name, t in tensors.items()}), expected)
    sink = nn.Parameter(random(2))
    flash_ext.attention(**tensors, sink=sink).sum().backward()
    assert sink.grad is not None


class CountingTensor(Tensor):
    """A wrapper without memory of its own, which runs operators on what it wraps."""

    inner: Tensor
    seen: ClassVar[list[str]] = []

    @staticmethod
    def __new__(cls, inner: Tensor) -> CountingTensor:
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, strides=inner.stride())
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func.name())
        args = torch.utils._pytree.tree_map_only(cls, lambda t: t.inner, args)
        return func(*args, **(kwargs or {}))


def test_classes_that_see_operators_answer_for_themselves() -> None:
    tensors = GOOD["attention"]()
    CountingTensor.seen.clear()
    out = flash_ext.attention(**{name: CountingTensor(t) for name, t in tensors.items()})
    assert torch.equal(out, flash_ext.attention(**tensors))
    assert any(name.startswith("flash_ext::attention_forward") for name in CountingTensor.seen)


def test_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(t) for name, t in GOOD["attention"]().items()}
        assert flash_ext.attention(**fakes).shape == (2, 3, 2, 8)


@pytest.mark.parametrize("dynamic", [False, True])
def test_numbers_of_compiled_code(dynamic: bool) -> None:
    """Sizes and numbers are symbols while torch.compile traces."""
    cu = cumulative([3, 2], "cpu")

    def attend(q: Tensor, scale: float, longest: int) -> Tensor:
        options = dict(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=q.shape[0])
        out = flash_ext.attention(q, q, q, softmax_scale=scale, softcap=2 * scale, window_size=(longest, 0), **options)
        return out + flash_ext.flash_attn_func(q[None], q[None], q[None], softmax_scale=q.shape[-1] ** -0.5)[0]

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    q = random(5, 2, 8)
    for scale, longest in ((0.5, 3), (0.25, 4), (0.3, 5)):
        torch.testing.assert_close(compiled(q, scale, longest), attend(q, scale, longest))


def test_sizes_of_a_trace_are_tensors() -> None:
    def attend(q: Tensor) -> Tensor:
        return flash_ext.attention(q, q, q, softmax_scale=q.shape[-1] ** -0.5)

    q = random(2, 3, 2, 8)
    with torch.no_grad():
        torch.testing.assert_close(torch.jit.trace(attend, (q,))(q), flash_ext.attention(q, q, q))


# ---- The way out ----------------------------------------------------------------------------------------------------


def test_a_scale_that_learns() -> None:
    """The message says how, and so it is."""
    tensors = GOOD["attention"]()
    scale = torch.tensor(0.3, requires_grad=True)
    with pytest.raises(TypeError, match="softmax_scale must be a number, got a Tensor: multiply the queries by it"):
        flash_ext.attention(**tensors, softmax_scale=scale)
    query, key, value = (t.transpose(1, 2) for t in tensors.values())
    with pytest.raises(TypeError, match=r"^scale must be a number, got a Tensor: multiply query by it"):
        flash_ext.scaled_dot_product_attention(query, key, value, scale=scale)
    qkv = random(2, 3, 3, 2, 8)
    with pytest.raises(TypeError, match=r"^softmax_scale must be a number, got a Tensor: multiply the queries by it"):
        flash_ext.flash_attn_qkvpacked_func(qkv, softmax_scale=scale)
    out = flash_ext.scaled_dot_product_attention(query * scale, key, value, scale=1.0)
    torch.testing.assert_close(out, flash_ext.scaled_dot_product_attention(query, key, value, scale=0.3))
    out.sum().backward()
    assert scale.grad is not None


def test_a_block_mask_of_flex_attention() -> None:
    theirs = flex_block_mask()
    q = random(1, 128, 1, 8)
    with pytest.raises(TypeError) as caught:
        flash_ext.attention(q, q, q, block_mask=theirs)
    assert "flash_ext.BlockMask, got torch.nn.attention.flex_attention.BlockMask" in str(caught.value)
    assert "BlockMask.from_flex(block_mask) makes one of it" in str(caught.value)
    ours = flash_ext.BlockMask.from_flex(theirs)
    torch.testing.assert_close(flash_ext.attention(q, q, q, block_mask=ours), flash_ext.attention(q, q, q, causal=True))


# ---- Values, under the caller's names -------------------------------------------------------------------------------

VALUES: list[tuple[str, str, str, Callable[[], Any]]] = [
    ("scaled_dot_product_attention", "query", "integer", lambda: random(2, 2, 3, 8).int()),
    ("scaled_dot_product_attention", "key", "dtype", lambda: random(2, 2, 3, 8).half()),
    ("scaled_dot_product_attention", "value", "dtype", lambda: random(2, 2, 3, 8).double()),
    ("scaled_dot_product_attention", "key", "on another device", lambda: random(2, 2, 3, 8).to("meta")),
    ("scaled_dot_product_attention", "key", "head_dim", lambda: random(2, 2, 3, 9)),
    ("scaled_dot_product_attention", "value", "rows", lambda: random(2, 2, 4, 8)),
    ("scaled_dot_product_attention", "value", "batch", lambda: random(3, 2, 3, 8)),
    ("scaled_dot_product_attention", "key", "quantized", lambda: quantized(2, 2, 3, 8)),
    ("scaled_dot_product_attention", "attn_mask", "on another device", lambda: torch.ones(3, 3, device="meta")),
    ("scaled_dot_product_attention", "attn_mask", "sparse", lambda: torch.ones(3, 3).to_sparse()),
    ("scaled_dot_product_attention", "attn_mask", "shape", lambda: torch.ones(3, 4)),
    ("scaled_dot_product_attention", "scale", "nan", lambda: math.nan),
    ("scaled_dot_product_attention", "scale", "infinite", lambda: math.inf),
    ("scaled_dot_product_attention", "scale", "longer than a float", lambda: 10**400),
    ("scaled_dot_product_attention", "dropout_p", "above one", lambda: 1.5),
    ("scaled_dot_product_attention", "dropout_p", "nan", lambda: math.nan),
    ("flash_attn_qkvpacked_func", "qkv", "integer", lambda: random(2, 3, 3, 2, 8).int()),
    ("flash_attn_qkvpacked_func", "qkv", "head_dim", lambda: random(2, 3, 3, 2, 257)),
    ("flash_attn_qkvpacked_func", "qkv", "of two", lambda: random(2, 3, 2, 2, 8)),
    ("flash_attn_kvpacked_func", "kv", "dtype", lambda: random(2, 3, 2, 2, 8).half()),
    ("flash_attn_kvpacked_func", "kv", "batch", lambda: random(3, 3, 2, 2, 8)),
    ("flash_attn_kvpacked_func", "kv", "head_dim", lambda: random(2, 3, 2, 2, 9)),
    ("flash_attn_varlen_qkvpacked_func", "cu_seqlens", "dtype", lambda: torch.tensor([0, 5])),
    ("flash_attn_varlen_qkvpacked_func", "cu_seqlens", "decreasing", lambda: int32([0, 4, 3], "cpu")),
    ("flash_attn_varlen_qkvpacked_func", "max_seqlen", "negative", lambda: -1),
    ("flash_attn_varlen_qkvpacked_func", "max_seqlen", "too small", lambda: 2),
    ("flash_attn_varlen_kvpacked_func", "kv", "dtype", lambda: random(5, 2, 2, 8).double()),
    ("flash_attn_func", "softcap", "negative", lambda: -1.0),
    ("flash_attn_func", "window_size", "below -1", lambda: (-5, 1)),
    ("attention", "window_size", "below -1", lambda: (1, -5)),
    ("explain", "q", "three dimensions", lambda: random(3, 2, 8)),
    ("explain", "v", "five dimensions", lambda: random(2, 2, 3, 2, 8)),
]


# The same where the sequences are nested.
NESTED_VALUES: dict[str, tuple[str, Callable[[], Any]]] = {
    "key-dtype": ("key", lambda: nested(True)["query"].half()),
    "key-on another device": ("key", lambda: nested(True)["query"].to("meta")),
    "key-dense": ("key", lambda: random(2, 2, 3, 8)),
    "key-batch": ("key", lambda: of_lengths([3, 1, 1])),
    "key-head_dim": ("key", lambda: of_lengths([3, 2], head_dim=5)),
    "query-head_dim": ("query", lambda: of_lengths([3, 2], head_dim=257)),
    "value-head_dim": ("value", lambda: of_lengths([3, 2], head_dim=257)),
    "value-other offsets": ("value", lambda: of_lengths([3, 2])),
    "value-more heads": ("value", lambda: of_lengths([3, 2], heads=3)),
    "query-rows first": ("query", lambda: nested(False)["q"]),
    "query-integer": ("query", lambda: nested(True)["query"].int()),
    "attn_mask-integer": ("attn_mask", lambda: torch.ones(3, 3).int()),
    "attn_mask-shorter than a sequence": ("attn_mask", lambda: torch.ones(2, 3)),
    "attn_mask-narrower than a sequence": ("attn_mask", lambda: torch.ones(3, 2)),
    "attn_mask-of one dimension": ("attn_mask", lambda: torch.ones(3)),
    "attn_mask-of five dimensions": ("attn_mask", lambda: torch.ones(1, 1, 1, 3, 3)),
    "attn_mask-heads": ("attn_mask", lambda: torch.ones(3, 3, 3)),
    "attn_mask-on another device": ("attn_mask", lambda: torch.ones(3, 3, device="meta")),
    "scale-nan": ("scale", lambda: math.nan),
    "dropout_p-above one": ("dropout_p", lambda: 1.5),
}


def of_lengths(lengths: list[int], heads: int = 2, head_dim: int = 8) -> Any:
    """(batch, heads, jagged seqlen, head_dim)."""
    offsets = cumulative(lengths, "cpu").long()
    return nested_tensor_from_jagged(random(sum(lengths), heads, head_dim), offsets).transpose(1, 2)


@pytest.mark.parametrize("case", NESTED_VALUES)
def test_wrong_values_beside_nested_tensors(case: str) -> None:
    argument, make = NESTED_VALUES[case]
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        flash_ext.scaled_dot_product_attention(**{**nested(True), argument: make()})
    message = str(caught.value)
    assert re.search(rf"\b{argument}\b", message), message
    assert not re.search(r"\b(q|k|v|bias|mask|softmax_scale|cu_seqlens_\w|max_seqlen_\w)\b", message), message


def test_parts_of_one_argument_are_named_once() -> None:
    q, kv = random(2, 3, 3, 8), random(2, 3, 2, 2, 8)
    with pytest.raises(RuntimeError, match=r"the heads of kv must divide those of q: got 3 heads in q and 2 in kv$"):
        flash_ext.flash_attn_kvpacked_func(q, kv)


@pytest.mark.parametrize(("window_size", "side"), [((2**63, 0), 0), ((0, -(2**63) - 1), 1)], ids=str)
def test_windows_of_more_than_64_bits(window_size: tuple[int, int], side: int) -> None:
    x = random(1, 3, 2, 8)
    for function in (flash_ext.attention, flash_ext.decode, flash_ext.flash_attn_func):
        with pytest.raises(ValueError, match=rf"^window_size\[{side}\] must be an integer of 64 bits, got -?9223372"):
            function(x, x, x, window_size=window_size)


def test_integers_are_no_queries() -> None:
    """Nor where all three are, which then fit each other."""
    x = random(2, 2, 3, 8).int()
    with pytest.raises(RuntimeError, match="query must be float16, bfloat16, float32 or float64, got int32"):
        flash_ext.scaled_dot_product_attention(x, x, x)


def quantized(*shape: int) -> Tensor:
    return torch.quantize_per_tensor(random(*shape), 0.1, 0, torch.qint8)


@pytest.mark.parametrize(
    ("name", "argument", "make"),
    [(name, argument, make) for name, argument, _, make in VALUES],
    ids=[f"{name}-{argument}-{wrong}".replace(" ", "_") for name, argument, wrong, _ in VALUES],
)
def test_wrong_values(name: str, argument: str, make: Callable[[], Any]) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        call(name, {**GOOD[name](), argument: make()})
    message = str(caught.value)
    assert re.search(rf"\b{argument}\b", message), message
    foreign = INTERNAL - arguments_of(name).keys()
    assert not [word for word in foreign if re.search(rf"\b{word}\b", message)], message


def pages() -> dict[str, Any]:
    keys = dict(k=random(4, 4, 2, 8), v=random(4, 4, 2, 8), block_table=int32([0, 1], "cpu").view(2, 1))
    return packed(q=random(5, 2, 8), **keys)


PAGED: dict[str, tuple[str, Callable[[], Any]]] = {
    "dtype": ("k", lambda: random(4, 4, 2, 8).half()),
    "page size": ("v", lambda: random(4, 3, 2, 8)),
    "on another device": ("v", lambda: random(4, 4, 2, 8).to("meta")),
    "no such page": ("block_table", lambda: int32([0, 9], "cpu").view(2, 1)),
    "decreasing": ("cu_seqlens_k", lambda: int32([0, 5, 3], "cpu")),
    "sparse lengths of k": ("cu_seqlens_k", lambda: int32([0, 2, 5], "cpu").to_sparse()),
    "sparse lengths of q": ("cu_seqlens_q", lambda: int32([0, 2, 5], "cpu").to_sparse()),
}


@pytest.mark.parametrize("wrong", PAGED)
def test_wrong_values_with_pages(wrong: str) -> None:
    """Pages are attended to by ``decode``, which has other names for them."""
    argument, make = PAGED[wrong]
    flash_ext.flash_attn_varlen_func(**pages())
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        flash_ext.flash_attn_varlen_func(**{**pages(), argument: make()})
    assert re.search(rf"\b{argument}\b", str(caught.value)), str(caught.value)
    assert not re.search(r"\b(k_cache|v_cache|cache_seqlens)\b", str(caught.value)), str(caught.value)


def test_a_length_with_pages_is_not_called_an_entry() -> None:
    """Decoding is given lengths where its caller gave cu_seqlens_k."""
    message = r"cu_seqlens_k\.diff\(\)\[1\] must be from 0 to the 4 rows of the cache, got 13"
    with pytest.raises(RuntimeError, match=message):
        flash_ext.flash_attn_varlen_func(**{**pages(), "cu_seqlens_k": int32([0, 2, 15], "cpu"), "max_seqlen_k": 15})
