"""Models of transformers on ``attn_implementation="fext"`` against its eager attention: logits, gradients, tokens."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", minversion="5.0")

import transformers.masking_utils as hf  # noqa: E402

import flash_ext.integrations.transformers as integration  # noqa: E402
from flash_ext.integrations.transformers_masks import VisibilityMask, make_mask, read_rule  # noqa: E402

BATCH, LENGTH, VOCABULARY = 3, 19, 99
REAL = (19, 11, 4)  # tokens of each padded sequence
SMALL = dict(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
) | dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
DECODER = SMALL | dict(num_key_value_heads=2, max_position_embeddings=128)
HALF_WINDOWED = dict(head_dim=16, sliding_window=7, layer_types=["sliding_attention", "full_attention"])


def model_of(name: str) -> tuple[type, Any]:
    """(class, configuration) of a small one."""
    t = transformers
    ids = dict(vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    make = {
        "gpt2": lambda: (t.GPT2LMHeadModel, t.GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=128, **ids)),
        "llama": lambda: (t.LlamaForCausalLM, t.LlamaConfig(**DECODER)),
        "mistral": lambda: (t.MistralForCausalLM, t.MistralConfig(**DECODER, sliding_window=7)),
        "gemma2": lambda: (
            t.Gemma2ForCausalLM,
            t.Gemma2Config(**DECODER, **HALF_WINDOWED, attn_logit_softcapping=5.0, query_pre_attn_scalar=16),
        ),
        "gpt_oss": lambda: (
            t.GptOssForCausalLM,
            t.GptOssConfig(**DECODER, **HALF_WINDOWED, num_local_experts=2, num_experts_per_tok=2),
        ),
        "bert": lambda: (t.BertForMaskedLM, t.BertConfig(**SMALL)),
        "t5": lambda: (
            t.T5ForConditionalGeneration,
            t.T5Config(d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0, **ids),
        ),
        "whisper": lambda: (
            t.WhisperForConditionalGeneration,
            t.WhisperConfig(
                d_model=64,
                encoder_layers=2,
                decoder_layers=2,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
                encoder_ffn_dim=64,
                decoder_ffn_dim=64,
                num_mel_bins=8,
                max_source_positions=30,
                max_target_positions=40,
                decoder_start_token_id=1,
                suppress_tokens=None,
                begin_suppress_tokens=None,
                **ids,
            ),
        ),
        "vit": lambda: (
            t.ViTForImageClassification,
            t.ViTConfig(
                hidden_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=64,
                image_size=32,
                patch_size=8,
            ),
        ),
    }
    cls, config = make[name]()
    for dropout in ("attn_pdrop", "resid_pdrop", "embd_pdrop", "dropout_rate", "dropout", "attention_dropout"):
        if hasattr(config, dropout):
            setattr(config, dropout, 0.0)
    return cls, config


DECODERS = ("gpt2", "llama", "mistral", "gemma2", "gpt_oss")


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        integration.register()
        yield


def build(cls: type, config: Any, implementation: str, device: str = "cpu", dtype: Any = torch.float32) -> nn.Module:
    model: nn.Module = cls._from_config(copy.deepcopy(config), attn_implementation=implementation)  # type: ignore
    assert model.config._attn_implementation == implementation
    return model.to(device=device, dtype=dtype).eval()


def make_pair(
    name: str, device: str, dtype: torch.dtype = torch.float32, deviation: float = 0.15
) -> tuple[nn.Module, nn.Module]:
    """(eager, ours) with the same weights, large enough for attention to be far from an average."""
    cls, config = model_of(name)
    eager, ours = (build(cls, config, implementation, device, dtype) for implementation in ("eager", "fext"))
    with torch.no_grad():
        for parameter_name, parameter in eager.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=deviation)
            if "sinks" in parameter_name:
                parameter.normal_()
    ours.load_state_dict(eager.state_dict())
    return eager, ours


def padding_of(side: str, device: str) -> Tensor:
    positions, real = torch.arange(LENGTH, device=device), torch.tensor(REAL, device=device)[:, None]
    return positions >= LENGTH - real if side == "left" else positions < real


def random_ids(device: str, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, length), device=device)


def inputs_of(name: str, kind: str, device: str) -> tuple[dict[str, Any], Tensor | None]:
    """(inputs, which rows of the logits count: those of tokens)."""
    if name == "vit":
        return {"pixel_values": torch.randn(BATCH, 3, 32, 32, device=device)}, None
    if name == "whisper":
        return {
            "input_features": torch.randn(BATCH, 8, 60, device=device),
            "decoder_input_ids": random_ids(device, 13),
        }, None
    inputs: dict[str, Any] = {"input_ids": random_ids(device)}
    real = None
    if kind in ("left", "right"):
        real = padding_of(kind, device)
        inputs["attention_mask"] = real.long()
    if kind == "packed":
        starts = torch.tensor([5, 8, 6])
        inputs["position_ids"] = torch.cat([torch.arange(n) for n in starts]).expand(BATCH, -1).to(device)
    if name == "t5":
        inputs["decoder_input_ids"] = random_ids(device, 13)
        real = None
    elif name != "bert":
        inputs["use_cache"] = False
    return inputs, real


def run(model: nn.Module, inputs: dict[str, Any], real: Tensor | None, weights: Tensor) -> dict[str, Tensor]:
    """Logits of tokens, and the gradients of all parameters of their weighted sum."""
    model.zero_grad()
    logits = model(**inputs).logits
    if real is not None:
        logits = logits * real[..., None]
    (logits.float() * weights).sum().backward()
    gradients = {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **gradients}


def assert_alike(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        scale = max(1.0, value.abs().max().item())
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=3e-5 * scale, msg=lambda m, n=name: f"{n}: {m}")


KINDS = [(name, kind) for name in DECODERS for kind in ("full", "left", "right", "packed")]
KINDS += [("bert", "full"), ("bert", "right"), ("t5", "full"), ("t5", "right"), ("whisper", "full"), ("vit", "full")]


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_logits_and_gradients(name: str, kind: str, device: str) -> None:
    eager, ours = make_pair(name, device)
    inputs, real = inputs_of(name, kind, device)
    with torch.no_grad():
        weights = torch.randn_like(eager(**inputs).logits)
    assert_alike(run(ours, inputs, real, weights), run(eager, inputs, real, weights))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "t5"])
def test_bfloat16_is_as_accurate_as_eager(name: str, device: str) -> None:
    """The logits, and the gradient as one vector: a single number of it depends on which side of 0 the input of a ReLU
    is rounded to, and a router's on differences of nearly equal numbers."""
    low, ours = make_pair(name, device, torch.bfloat16, deviation=0.08)
    reference = copy.deepcopy(low).float()
    inputs, real = inputs_of(name, "right", device)
    with torch.no_grad():
        weights = torch.randn_like(reference(**inputs).logits)
    wanted, rounded, found = (run(model, inputs, real, weights) for model in (reference, low, ours))
    for names in (["logits"], wanted.keys() - {"logits"}):
        error, allowed = (
            sum(float((result[n].float() - wanted[n]).square().sum()) for n in names) ** 0.5
            for result in (found, rounded)
        )
        assert error <= 2 * allowed


def test_loss_of_a_padded_batch(device: str) -> None:
    eager, ours = make_pair("llama", device)
    inputs, real = inputs_of("llama", "left", device)
    assert real is not None
    # What padding predicts is of no attention, and no implementation's but its own.
    predicted = real & real.roll(1, dims=1)
    labels = inputs["input_ids"].masked_fill(~predicted, -100)
    torch.testing.assert_close(ours(**inputs, labels=labels).loss, eager(**inputs, labels=labels).loss)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", [*DECODERS, "t5", "whisper"])
def test_generates_the_same_tokens(name: str, cache: str, device: str) -> None:
    eager, ours = make_pair(name, device)
    inputs, _ = inputs_of(name, "right" if name == "t5" else "left", device)
    for argument in ("use_cache", "decoder_input_ids"):
        inputs.pop(argument, None)
    options: dict[str, Any] = dict(max_new_tokens=10, min_new_tokens=10, do_sample=False, disable_compile=True)
    options["bad_words_ids"] = [[0]]  # of padding alone, whisper would make no sequence at all
    if cache == "static":
        options["cache_implementation"] = "static"
    padded = (model.generate(**inputs, **options) for model in (ours, eager))
    assert torch.equal(*padded)
    inputs.pop("attention_mask", None)
    assert torch.equal(*(model.generate(**inputs, **options) for model in (ours, eager)))


def test_packed_by_cu_seqlens(device: str) -> None:
    """As a padding-free collator hands them over, in place of a mask."""
    eager, ours = make_pair("mistral", device)
    ids = random_ids(device)[:1]
    positions = torch.cat([torch.arange(n) for n in (5, 8, 6)])[None].to(device)
    cu_seqlens = torch.tensor([0, 5, 13, 19], dtype=torch.int32, device=device)
    lengths = dict(cu_seq_lens_q=cu_seqlens, cu_seq_lens_k=cu_seqlens, max_length_q=8, max_length_k=8)
    expected = eager(ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(ours(ids, position_ids=positions, **lengths).logits, expected, rtol=1e-4, atol=1e-4)


def test_dropout_drops(device: str) -> None:
    cls, config = model_of("bert")
    config.attention_probs_dropout_prob = 0.5
    config.hidden_dropout_prob = 0.0
    ours = build(cls, config, "fext", device).train()
    ids = random_ids(device)
    torch.manual_seed(1)
    first = ours(ids).logits
    assert not torch.equal(first, ours(ids).logits)
    torch.manual_seed(1)
    assert torch.equal(first, ours(ids).logits)


def test_weights_are_eagers(device: str) -> None:
    eager, ours = make_pair("llama", device)
    layers = [model.model.layers[0].self_attn for model in (eager, ours)]  # type: ignore[union-attr, index]
    hidden = torch.randn(BATCH, LENGTH, 64, device=device)
    positions = torch.arange(LENGTH, device=device)[None]
    embeddings = eager.model.rotary_emb(hidden, positions)  # type: ignore[union-attr, operator]
    found = []
    for model, layer in zip((eager, ours), layers, strict=True):
        mask = hf.create_causal_mask(
            config=model.config, inputs_embeds=hidden, attention_mask=None, past_key_values=None
        )
        found.append(
            layer(hidden, position_embeddings=embeddings, attention_mask=mask, output_attentions=True)  # type: ignore
        )
    for ours_, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours_, theirs, rtol=1e-4, atol=1e-5)


# ---- Masks ----------------------------------------------------------------------------------------------------------


def make_rules() -> dict[str, Any]:
    documents = torch.tensor([[0] * 4 + [1] * 5 + [2] * 3, [0] * 12])
    rules: dict[str, Any] = {
        "causal": hf.causal_mask_function,
        "all": hf.bidirectional_mask_function,
        "window": hf.sliding_window_causal_mask_function(3),
        "both sides": hf.sliding_window_bidirectional_mask_function(3),
        "documents": hf.and_masks(hf.causal_mask_function, hf.packed_sequence_mask_function(documents)),
    }
    return rules


SIZES = [(12, 12, 0, 0), (5, 12, 7, 0), (5, 12, 3, 0), (4, 9, 8, 3)]  # q_length, kv_length, q_offset, kv_offset
CASES = [(kind, sizes, padded) for kind in make_rules() for sizes in SIZES for padded in (False, True)]
WHOLE = [("documents", SIZES[0], False)]  # documents are those of a whole batch without padding


@pytest.mark.parametrize(("kind", "lengths", "padded"), [case for case in CASES if case[0] != "documents"] + WHOLE)
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "offset on the device"])
def test_rules_are_the_matrix(kind: str, lengths: tuple[int, int, int, int], padded: bool, on_device: bool) -> None:
    q_length, kv_length, q_offset, kv_offset = lengths
    sizes: dict[str, Any] = dict(batch_size=2, q_length=q_length, kv_length=kv_length, kv_offset=kv_offset)
    sizes["q_offset"] = torch.tensor(q_offset) if on_device else q_offset
    sizes["mask_function"] = make_rules()[kind]
    if padded:
        sizes["attention_mask"] = torch.rand(2, 10) < 0.7
    expected = hf.sdpa_mask(**sizes, allow_is_causal_skip=False)
    mask = make_mask(**sizes, allow_is_bidirectional_skip=True)
    if mask is None:
        assert expected is not None and bool(expected.all())
        return
    assert isinstance(mask, VisibilityMask) and mask.shape == expected.shape
    assert torch.equal(mask.dense(), expected)
    q, k = torch.randn(2, 4, q_length, 16), torch.randn(2, 2, kv_length, 16)
    out, _ = integration.attention_forward(nn.Module(), q, k, k, mask)
    by_matrix, _ = integration.attention_forward(nn.Module(), q, k, k, expected)
    torch.testing.assert_close(out, by_matrix)


def test_documents_with_a_bias_and_weights(device: str) -> None:
    documents = torch.tensor([[0] * 4 + [1] * 5 + [2] * 3, [0] * 12], device=device)
    rule = hf.and_masks(hf.causal_mask_function, hf.packed_sequence_mask_function(documents))
    mask = make_mask(2, 12, 12, mask_function=rule, device=device)
    assert isinstance(mask, VisibilityMask) and mask.visibility is not None
    q, k = torch.randn(2, 4, 12, 16, device=device), torch.randn(2, 2, 12, 16, device=device)
    bias = torch.randn(1, 4, 12, 12, device=device)
    for given in ({"position_bias": bias}, {"output_attentions": True}):
        found = integration.attention_forward(nn.Module(), q, k, k, mask, **given)
        expected = integration.attention_forward(nn.Module(), q, k, k, mask.dense(), **given)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("size", [0, -1, -5])
def test_a_window_of_no_keys_is_refused(size: int, is_causal: bool) -> None:
    """One less than it is the left side, of which -1 stands for no limit."""
    q, k = torch.randn(2, 4, 7, 16), torch.randn(2, 2, 7, 16)
    with pytest.raises(ValueError, match=f"sliding_window must be None or at least 1, got {size}"):
        integration.attention_forward(nn.Module(), q, k, k, None, sliding_window=size, is_causal=is_causal)
    own, _ = integration.attention_forward(nn.Module(), q, k, k, None, sliding_window=1, is_causal=True)
    torch.testing.assert_close(own, k.repeat_interleave(2, dim=1).transpose(1, 2))  # each query sees its own key


def test_a_window_without_a_mask_has_both_sides() -> None:
    """Unless the call is causal: as transformers' own flash path, which leaves it to the kernel."""
    q, k = torch.randn(2, 4, 9, 16), torch.randn(2, 2, 9, 16)
    out, _ = integration.attention_forward(nn.Module(), q, k, k, None, sliding_window=3, is_causal=False)
    rows = torch.arange(9)
    mask = ((rows[:, None] - rows).abs() < 3).expand(2, 1, 9, 9)
    expected, _ = integration.attention_forward(nn.Module(), q, k, k, mask)
    everything, _ = integration.attention_forward(nn.Module(), q, k, k, None, is_causal=False)
    torch.testing.assert_close(out, expected)
    assert not torch.allclose(out, everything, atol=1e-3)


@pytest.mark.parametrize("size", [0, -1, -5])
def test_rules_of_windows_without_keys_are_the_matrix(size: int) -> None:
    for function in (
        hf.sliding_window_causal_mask_function(size),
        hf.sliding_window_bidirectional_mask_function(size),
    ):
        mask = make_mask(2, 7, 7, mask_function=function)
        expected = hf.sdpa_mask(2, 7, 7, mask_function=function, allow_is_causal_skip=False)
        assert isinstance(mask, VisibilityMask)
        assert torch.equal(mask.dense(), expected)
        q, k = torch.randn(2, 4, 7, 16), torch.randn(2, 2, 7, 16)
        out, _ = integration.attention_forward(nn.Module(), q, k, k, mask)
        by_matrix, _ = integration.attention_forward(nn.Module(), q, k, k, expected)
        torch.testing.assert_close(out, by_matrix)


def test_unknown_rules_become_the_matrix() -> None:
    def own(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key + query) % 3 != 0

    for function in (own, hf.and_masks(hf.causal_mask_function, own), hf.or_masks(hf.causal_mask_function, own)):
        assert read_rule(function) is None
        mask = make_mask(2, 7, 7, mask_function=function)
        assert isinstance(mask, VisibilityMask) and mask.visibility is None
        assert torch.equal(mask.dense(), hf.sdpa_mask(2, 7, 7, mask_function=function, allow_is_causal_skip=False))


def test_a_mask_survives_what_models_do_with_masks() -> None:
    mask = make_mask(2, 7, 7, attention_mask=torch.arange(7).expand(2, 7) < 5)
    assert isinstance(mask, VisibilityMask)
    dense = mask.dense()
    for kept in (mask.detach(), mask.clone(), mask.to("cpu"), mask.to(torch.bool)):
        assert isinstance(kept, VisibilityMask) and kept.visibility is not None
    assert torch.equal((mask & mask.transpose(2, 3)), dense & dense.transpose(2, 3))
    assert torch.equal(torch.where(mask, 1.0, 2.0), torch.where(dense, 1.0, 2.0))
    row = mask[:, :, 3:4, :5]
    assert isinstance(row, VisibilityMask) and torch.equal(row.dense(), dense[:, :, 3:4, :5])


@pytest.mark.parametrize("name", ["Bloom", "Mpt"])
def test_models_with_an_attention_of_their_own_are_refused(name: str) -> None:
    """They would take the mask for another kind of mask."""
    config = getattr(transformers, f"{name}Config")(vocab_size=VOCABULARY, hidden_size=64, n_layers=1, n_heads=4)
    ours = build(getattr(transformers, f"{name}ForCausalLM"), config, "fext")
    with pytest.raises(RuntimeError, match="AttentionInterface"):
        ours(random_ids("cpu"))


def test_no_matrix_is_made(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows, padding and packed documents reach the kernels as rules."""
    given: list[dict[str, Any]] = []

    def watch(*args: Any, **options: Any) -> Any:
        given.append(options)
        return original(*args, **options)

    original = integration.attention
    monkeypatch.setattr(integration, "attention", watch)
    _, ours = make_pair("mistral", device)
    for kind in ("full", "left", "packed"):
        inputs, _ = inputs_of("mistral", kind, device)
        ours(**inputs)
    assert len(given) == 6
    assert all(options["window_size"] == (6, 0) for options in given)
    assert all(options.get("mask") is None or options["mask"].shape[2] == 1 for options in given)
    assert given[-1]["cu_seqlens_q"].tolist() == [19 * b + n for b in range(3) for n in (0, 5, 13)] + [57]


def test_the_host_does_not_wait(device: str) -> None:
    if device == "cpu":
        pytest.skip("a CPU has nothing to wait for")
    _, ours = make_pair("gemma2", device)
    q, k = torch.randn(2, 4, 7, 16, device=device), torch.randn(2, 2, 12, 16, device=device)
    padding = torch.rand(2, 12, device=device) < 0.7
    offset = torch.tensor(3, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for q_offset in (5, offset):
            mask = make_mask(2, 7, 12, q_offset, attention_mask=padding, device=device)
            integration.attention_forward(ours, q, k, k, mask, softcap=5.0, sliding_window=7)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- Names and neighbours -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["flashext", "flash_attention_9", "my_sdpa", "a/b", "paged|x", "eager"])
def test_names_that_mean_something_else(name: str) -> None:
    with pytest.raises(ValueError, match="name must not contain"):
        integration.register(name)


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_transformers_takes_flashext_for_something_else(model: str) -> None:
    """Why this library's own name is not the default: although it is registered, transformers looks elsewhere."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions

    cls, config = model_of(model)
    functions["flashext"] = functions["attention_of_somebody"] = integration.attention_forward
    try:
        build(cls, config, "attention_of_somebody")
        with pytest.raises((ValueError, ImportError), match=r"(?i)flash.?attention"):
            build(cls, config, "flashext")
    finally:
        del functions["flashext"], functions["attention_of_somebody"]


@pytest.mark.parametrize("name", [3, None, ""])
def test_what_is_no_name(name: Any) -> None:
    with pytest.raises(TypeError, match="name must be a str that is not empty, got"):
        integration.register(name)


def test_another_name() -> None:
    assert integration.register("attention_of_mine") == "attention_of_mine"
    cls, config = model_of("llama")
    build(cls, config, "attention_of_mine")(random_ids("cpu"))
    model = build(cls, config, "eager")
    model.set_attn_implementation("fext")  # type: ignore[operator]
    model(random_ids("cpu"))


@pytest.mark.parametrize("scope", ["model", "layer"])
def test_compiles(scope: str, device: str) -> None:
    eager, ours = make_pair("mistral", device)
    torch._dynamo.reset()
    call: Any = torch.compile(ours, backend="aot_eager", fullgraph=True) if scope == "model" else ours
    if scope == "layer":
        for layer in ours.model.layers:  # type: ignore[union-attr]
            layer.compile(backend="aot_eager", fullgraph=True)
    for kind in ("right", "left"):  # the same shapes: only the values of the mask differ
        inputs, real = inputs_of("mistral", kind, device)
        with torch.no_grad():
            found, expected = call(**inputs).logits, eager(**inputs).logits
        torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()


def test_continuous_batching(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the manager itself, which in later versions knows no names but its own: there ours goes by one of them."""
    eager, ours = make_pair("mistral", device)
    prompts = [torch.randint(3, VOCABULARY, (n,)).tolist() for n in (LENGTH, 5, 1)]
    options = transformers.GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    expected = [
        eager.generate(torch.tensor([p], device=device), generation_config=options)[0, len(p) :].tolist()  # type: ignore
        for p in prompts
    ]
    calls = []

    def counted(function: Any) -> Any:
        return lambda *args, **options: (calls.append(1), function(*args, **options))[1]

    implementations = transformers.AttentionInterface._global_mapping
    if "paged|sdpa" in implementations:
        monkeypatch.setattr(integration, "_attend_packed", counted(integration._attend_packed))
    else:  # which may also come with the mask as a matrix
        monkeypatch.setitem(implementations, "sdpa", counted(integration.attention_forward))
        ours.set_attn_implementation("sdpa")  # type: ignore[operator]
    settings = dict(num_blocks=16, max_batch_tokens=64, auto_switch_to_flash=False)  # not all that a GPU has
    known = {field.name for field in dataclasses.fields(transformers.ContinuousBatchingConfig)}
    batching = transformers.ContinuousBatchingConfig(**{name: settings[name] for name in known & settings.keys()})
    results = ours.generate_batch(  # type: ignore[operator]
        prompts, generation_config=options, continuous_batching_config=batching, progress_bar=False
    )
    assert [result.generated_tokens for result in results.values()] == expected
    assert calls


def test_blocks_of_continuous_batching(device: str) -> None:
    """The keyword arguments of a decoding step whose keys and values lie in blocks."""
    requests, heads, head_dim, size = 3, 4, 16, 16
    cached = torch.tensor([5, 17, 0], device=device)
    cu_seqlens_k = torch.cat([cached.new_zeros(1), (cached + 1).cumsum(0)]).int()
    blocks = torch.tensor([[4, -1], [1, 3], [0, -1]], dtype=torch.int32, device=device)
    k_cache, v_cache = torch.randn(2, 6, size, 2, head_dim, device=device)
    rows = [k_cache.new_empty(0)] * 2
    q = torch.randn(1, heads, requests, head_dim, device=device)
    k, v = torch.randn(2, 1, 2, requests, head_dim, device=device)
    expected = []
    for r, length in enumerate(cached.tolist()):
        rows = [c[blocks[r].clamp(min=0).long()].flatten(0, 1)[:length] for c in (k_cache, v_cache)]
        keys, values = (torch.cat([old, new[0, :, r][None]])[None] for old, new in zip(rows, (k, v), strict=True))
        arguments = (q[:, :, r : r + 1], keys.transpose(1, 2), values.transpose(1, 2), None)
        expected.append(integration.attention_forward(nn.Module(), *arguments, sliding_window=9)[0])
    kwargs = dict(cu_seq_lens_k=cu_seqlens_k, block_table=blocks, k_cache=k_cache, v_cache=v_cache)
    options: dict[str, Any] = dict(softmax_scale=head_dim**-0.5)
    out = integration._attend_to_blocks(q, k, v, 9, kwargs, options)
    torch.testing.assert_close(out, torch.cat(expected, dim=1))


def test_trainer(tmp_path: Path) -> None:
    """One step of the Trainer gives the weights that eager attention gives."""
    pytest.importorskip("accelerate")
    data = [{"input_ids": ids, "labels": ids.clone()} for ids in random_ids("cpu")]
    losses, weights = [], []
    for model in make_pair("llama", "cpu"):
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=1, per_device_train_batch_size=BATCH, report_to=[], save_strategy="no", seed=0
        )
        losses.append(transformers.Trainer(model, arguments, train_dataset=data).train().training_loss)
        weights.append({n: p.detach().cpu() for n, p in model.named_parameters()})
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-3, atol=1e-4)
