"""``convert``: puts this library's modules into a model that exists, and says what it did and what it could not do."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from types import FunctionType

from torch import nn
from torch.nn.utils import parametrize

from flash_ext.argument_checks import describe
from flash_ext.encoder import TransformerEncoder, TransformerEncoderLayer
from flash_ext.integrations import torchvision_swin
from flash_ext.modules import MultiheadAttention, obstacle_of_head_dim, refuse_to_be_bypassed

FSDP = ("FullyShardedDataParallel", "FSDPModule")  # by name: to import them is to import all of torch.distributed
SDPA = "scaled_dot_product_attention"
CALLS = {  # what activate() serves, by the names that call it; the second is diffusers'
    SDPA: f"F.{SDPA}",
    "dispatch_attention_fn": f"F.{SDPA}",
    "varlen_attn": "torch.nn.attention.varlen.varlen_attn",
    torchvision_swin.FUNCTION: f"{torchvision_swin.MODULE}.{torchvision_swin.FUNCTION}",
}
ATTENTION_NAME = re.compile("attention|attn", re.IGNORECASE)


def convert(model: nn.Module, *, report: Callable[[str], object] = print) -> nn.Module:
    """Makes every ``nn.MultiheadAttention`` inside ``model`` (or ``model`` itself) compute with flash_ext, in place.

    The modules change their class, and keep all else: identity, Parameters, hooks, device, dtype and training mode, so
    that optimizers, ``state_dict`` and references from elsewhere go on working. They gain one forward pre-hook, which
    does nothing: it is what makes subclasses of ``nn.TransformerEncoderLayer`` call their modules in evaluation too,
    instead of a fused layer of torch's that would bypass them. ``nn.TransformerEncoderLayer`` and
    ``nn.TransformerEncoder`` themselves change their class likewise, for an evaluation without detours
    (``flash_ext.encoder``). Convert before ``torch.compile``, FSDP and parametrizations. torch.fx makes one node of a
    converted module, as of torch's; ``torch.jit.script`` does not take it.

    Left alone are subclasses of ``nn.MultiheadAttention`` (theirs may be another forward: among them quantizable ones),
    modules with ``embed_dim / num_heads`` above 256, and what is sharded or parametrized already.

    Models may compute attention without ``nn.MultiheadAttention``. There is nothing to convert in them, and the report
    says how they come to this library: ``flash_ext.activate()`` for what calls
    ``F.scaled_dot_product_attention``, ``flash_ext.integrations.transformers.register()`` for transformers.

    Args:
        model: any module.
        report: is called with each line of what was changed and what was left alone, and why; ``print`` by default,
            ``logging.info``, ``lines.append`` or ``lambda line: None`` serve as well.

    Returns:
        ``model``.

    Raises:
        TypeError: model is no module, or report no function. What cannot be converted is reported.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {describe(model)}")
    if not callable(report):
        raise TypeError(f"report must be a function of a line, got {describe(report)}")
    converted, left = [], 0
    sharded = {id(inner) for module in model.modules() if _is_sharded(module) for inner in module.modules()}
    for name, module in model.named_modules():
        if not isinstance(module, nn.MultiheadAttention) or isinstance(module, MultiheadAttention):
            continue
        if obstacle := _obstacle(module, id(module) in sharded):
            report(f"flash_ext.convert: left {_called(name)} alone: {obstacle}")
            left += 1
            continue
        module.__class__ = MultiheadAttention
        refuse_to_be_bypassed(module)
        converted.append(_called(name))
    around = _convert_encoders(model)
    if around:
        report(f"flash_ext.convert: {' and '.join(around)} converted: fused evaluation, padding packed once")
    report(f"flash_ext.convert: {len(converted)} nn.MultiheadAttention converted" + _listing(converted))
    has_ours = any(isinstance(module, MultiheadAttention) for module in model.modules())
    for line in _other_attention(model, alone=not (has_ours or left)):
        report(f"flash_ext.convert: {line}")
    return model


def _called(name: str) -> str:
    return name or "the model itself"


def _listing(names: list[str]) -> str:
    return ": " + ", ".join(names) if names else ""


# ---- nn.MultiheadAttention and what is around it ---------------------------------------------------------------------


def _is_sharded(module: nn.Module) -> bool:
    return any(cls.__name__ in FSDP for cls in type(module).__mro__)


def _obstacle(module: nn.MultiheadAttention, sharded: bool) -> str:
    """Why the module cannot be converted, or nothing."""
    if sharded:
        return "FSDP has sharded it: convert first, then shard"
    if any(parametrize.is_parametrized(part) for part in module.modules()):
        return "it has parametrizations: convert first, then register them"
    if type(module) is not nn.MultiheadAttention:
        return f"{type(module).__qualname__} is a subclass of nn.MultiheadAttention, whose forward may differ"
    return obstacle_of_head_dim(module)


def _convert_encoders(model: nn.Module) -> list[str]:
    """Layers whose attention is ours, and encoders all of whose layers are; how many, in words."""
    layers = [m for m in model.modules() if type(m) is nn.TransformerEncoderLayer]
    layers = [layer for layer in layers if type(layer.self_attn) is MultiheadAttention]
    for layer in layers:
        layer.__class__ = TransformerEncoderLayer
    encoders = [m for m in model.modules() if type(m) is nn.TransformerEncoder]
    encoders = [e for e in encoders if all(type(layer) is TransformerEncoderLayer for layer in e.layers)]
    for encoder in encoders:
        encoder.__class__ = TransformerEncoder
    counts = {"nn.TransformerEncoder": len(encoders), "nn.TransformerEncoderLayer": len(layers)}
    return [f"{count} {name}" for name, count in counts.items() if count > 0]


# ---- Attention that is no nn.MultiheadAttention ----------------------------------------------------------------------


def _other_attention(model: nn.Module, alone: bool) -> list[str]:
    """What else in the model attends, and how to bring it to this library. ``alone``: nothing was to be converted."""
    lines = []
    others = [module for module in model.modules() if not isinstance(module, nn.MultiheadAttention)]
    transformers = [module for module in others if _is_transformers_model(module)]
    if transformers:
        lines.append(
            f"{_class_of(transformers[0])} is a model of transformers, which chooses attention by name: call "
            "flash_ext.integrations.transformers.register(), and make the model with "
            'attn_implementation="fext", or call its set_attn_implementation("fext")'
        )
        inside = {id(part) for module in transformers for part in module.modules()}
        others = [module for module in others if id(module) not in inside]
    called = [(module, _torch_attention_of(module)) for module in others]
    for function in dict.fromkeys(CALLS.values()):
        if callers := [module for module, functions in called if function in functions]:
            lines.append(
                f"{_classes(callers)}: {function} is called there, which convert cannot reach; call "
                "flash_ext.activate(), which makes that function compute with flash_ext"
            )
    if lines or not alone:
        return lines
    if suspects := [module for module in others if ATTENTION_NAME.search(type(module).__name__)]:
        return [
            f"{_classes(suspects)}: attention by operations of its own, which nothing can redirect; call "
            f"flash_ext.{SDPA} (a bias is its attn_mask) or flash_ext.attention there"
        ]
    return ["found neither nn.MultiheadAttention nor other attention in the model"]


def _is_transformers_model(module: nn.Module) -> bool:
    return any(f"{c.__module__}.{c.__name__}".startswith("transformers.") for c in type(module).__mro__) and hasattr(
        module, "set_attn_implementation"
    )


def _torch_attention_of(module: nn.Module) -> set[str]:
    """Which of torch's functions its class calls, or an object that it keeps to attend by (diffusers' processors)."""
    helpers = [value for name, value in vars(module).items() if not name.startswith("_") and callable(value)]
    functions = [function for owner in (module, *helpers) for function in _functions_of(owner)]
    return {CALLS[name] for function in functions for name in _names_of(function) if name in CALLS}


def _functions_of(owner: object) -> list[FunctionType]:
    """Written in Python, and not torch's: its methods, or what it is itself."""
    if isinstance(owner, FunctionType):
        return [owner]
    classes = [cls for cls in type(owner).__mro__ if not cls.__module__.startswith(("torch.", "builtins"))]
    return [value for cls in classes for value in vars(cls).values() if isinstance(value, FunctionType)]


def _names_of(function: FunctionType) -> list[str]:
    """What its code names, and that of functions of its file that it calls."""
    names = function.__code__.co_names
    called = [f for name in names if isinstance(f := function.__globals__.get(name), FunctionType)]
    return [*names, *(name for f in called for name in f.__code__.co_names)]


def _classes(modules: list[nn.Module]) -> str:
    """The classes of the modules, each once, with how many there are."""
    return ", ".join(f"{count} {name}" for name, count in Counter(map(_class_of, modules)).items())


def _class_of(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
