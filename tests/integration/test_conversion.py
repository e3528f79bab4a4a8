"""What ``convert`` says: of what it changed, of what it left alone, and of attention that it does not know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils import parametrize

import flash_ext
from flash_ext.encoder import TransformerEncoder, TransformerEncoderLayer

ACTIVATE = "call flash_ext.activate()"
REGISTER = "call flash_ext.integrations.transformers.register()"


def report_of(model: nn.Module) -> list[str]:
    lines: list[str] = []
    assert flash_ext.convert(model, report=lines.append) is model
    assert all(line.startswith("flash_ext.convert: ") for line in lines)
    return [line.removeprefix("flash_ext.convert: ") for line in lines]


class TestEncoders:
    def make(self) -> nn.TransformerEncoder:
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 2)

    def test_says_what_it_changed(self) -> None:
        model = self.make()
        around, converted = report_of(model)
        assert around.startswith("1 nn.TransformerEncoder and 2 nn.TransformerEncoderLayer ")
        assert converted == "2 nn.MultiheadAttention converted: layers.0.self_attn, layers.1.self_attn"
        assert type(model) is TransformerEncoder and {type(layer) for layer in model.layers} == {
            TransformerEncoderLayer
        }
        assert report_of(model) == ["0 nn.MultiheadAttention converted"]

    def test_subclasses_keep_their_forward(self) -> None:
        class Special(nn.TransformerEncoderLayer):
            pass

        model = self.make()
        model.layers[1].__class__ = Special
        assert report_of(model)[0].startswith("1 nn.TransformerEncoderLayer ")
        assert type(model) is nn.TransformerEncoder and type(model.layers[1]) is Special
        assert type(model.layers[1].self_attn) is flash_ext.MultiheadAttention

    def test_layers_whose_attention_is_left_alone_stay(self) -> None:
        layer = nn.TransformerEncoderLayer(320, 1, 8, batch_first=True)
        model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        assert "head_dim is 320" in report_of(model)[0]
        assert type(model) is nn.TransformerEncoder and type(model.layers[0]) is nn.TransformerEncoderLayer

    def test_modules_put_together_by_hand_are_converted_around(self) -> None:
        model = self.make()
        for layer in model.layers:
            layer.self_attn = flash_ext.MultiheadAttention(8, 2, batch_first=True)
        assert report_of(model)[0].startswith("1 nn.TransformerEncoder and 2 nn.TransformerEncoderLayer ")


class TestConvertFirst:
    @pytest.mark.parametrize("part", ["", "out_proj"])
    def test_parametrized(self, part: str) -> None:
        module = nn.MultiheadAttention(8, 2)
        name = "weight" if part else "in_proj_weight"
        parametrize.register_parametrization(module.get_submodule(part), name, nn.Identity())
        lines = report_of(nn.Sequential(module))
        assert lines[0] == "left 0 alone: it has parametrizations: convert first, then register them"
        assert not isinstance(module, flash_ext.MultiheadAttention)

    @pytest.mark.parametrize("sharded", ["root", "itself"])
    def test_sharded_by_name(self, sharded: str) -> None:
        """FSDP's first version wraps a module, its second adds a class to the module's own."""

        class FullyShardedDataParallel(nn.Module):
            def __init__(self, module: nn.Module) -> None:
                super().__init__()
                self._fsdp_wrapped_module = module

        class FSDPModule:
            pass

        class FSDPMultiheadAttention(FSDPModule, nn.MultiheadAttention):
            pass

        module = nn.MultiheadAttention(8, 2)
        if sharded == "root":
            lines = report_of(FullyShardedDataParallel(nn.Sequential(module)))
        else:
            module.__class__ = FSDPMultiheadAttention
            lines = report_of(nn.Sequential(module))
        assert lines[0].endswith("alone: FSDP has sharded it: convert first, then shard")
        assert not isinstance(module, flash_ext.MultiheadAttention)

    def test_sharded(self) -> None:
        dist = pytest.importorskip("torch.distributed")
        if not dist.is_available() or not dist.is_gloo_available():
            pytest.skip("needs torch.distributed with gloo")
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 2)
            mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
            for layer in model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            lines = report_of(model)
            assert lines[0].endswith("alone: FSDP has sharded it: convert first, then shard") and len(lines) == 3
            x = torch.randn(2, 3, 8)
            ours = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 2)
            flash_ext.convert(ours, report=lambda line: None)
            fully_shard(ours, mesh=mesh)
            assert ours(x).shape == x.shape
        finally:
            dist.destroy_process_group()


class CallsByModule(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


class CallsByName(nn.Module):
    def attend(self, x: Tensor) -> Tensor:
        return scaled_dot_product_attention(x, x, x)


def attend(x: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(x, x, x)


class CallsThroughFunction(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return attend(x)


class Processor:
    def __call__(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


class CallsThroughObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.processor = Processor()


def dispatch_attention_fn(x: Tensor) -> Tensor:
    """As diffusers' looks from outside: which function it calls stands in a table."""
    return {"native": torch.square}["native"](x)


class DispatchingProcessor:
    def __call__(self, x: Tensor) -> Tensor:
        return dispatch_attention_fn(x)


class CallsThroughDispatcher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.processor = DispatchingProcessor()


class PackedAttention(nn.Module):
    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        out: Tensor = varlen_attn(x, x, x, ends, ends, 8, 8)
        return out


class WindowAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.mT).softmax(-1) @ x


class PreTrainedModel(nn.Module):
    """As transformers' looks from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = WindowAttention()

    def set_attn_implementation(self, name: str) -> None: ...


PreTrainedModel.__module__ = "transformers.modeling_utils"


class BertModel(PreTrainedModel):
    pass


class TestOtherAttention:
    @pytest.mark.parametrize(
        "cls", [CallsByModule, CallsByName, CallsThroughFunction, CallsThroughObject, CallsThroughDispatcher]
    )
    def test_callers_of_sdpa(self, cls: type[nn.Module]) -> None:
        converted, other = report_of(nn.ModuleList([cls(), cls()]))
        assert converted == "0 nn.MultiheadAttention converted"
        assert (
            other.startswith(f"2 {__name__}.{cls.__name__}: F.scaled_dot_product_attention is called")
            and ACTIVATE in other
        )

    def test_callers_of_varlen_attn(self) -> None:
        other = report_of(PackedAttention())[1]
        assert "PackedAttention: torch.nn.attention.varlen.varlen_attn is called there" in other and ACTIVATE in other

    def test_callers_of_sdpa_beside_modules_that_were_converted(self) -> None:
        converted, other = report_of(nn.ModuleList([CallsByModule(), nn.MultiheadAttention(8, 2)]))
        assert converted.startswith("1 nn") and ACTIVATE in other

    def test_operations_of_its_own(self) -> None:
        other = report_of(nn.Sequential(WindowAttention(), nn.Linear(2, 2)))[1]
        assert other.startswith(f"1 {__name__}.WindowAttention: attention by operations of its own")
        assert "flash_ext.attention" in other

    def test_transformers(self) -> None:
        other = report_of(nn.Sequential(BertModel()))[1:]
        assert len(other) == 1 and REGISTER in other[0] and f"{__name__}.BertModel" in other[0]
        assert 'attn_implementation="fext"' in other[0]

    def test_names_that_it_points_to_exist(self) -> None:
        integration = pytest.importorskip("flash_ext.integrations.transformers")
        assert callable(flash_ext.activate) and callable(integration.register)
        assert f'attn_implementation="{integration.NAME}"' in report_of(BertModel())[1]

    def test_no_attention(self) -> None:
        assert report_of(nn.Linear(2, 2))[1] == "found neither nn.MultiheadAttention nor other attention in the model"

    def test_nothing_is_said_twice(self) -> None:
        model = nn.Sequential(nn.MultiheadAttention(8, 2), WindowAttention())
        assert len(report_of(model)) == 1
        assert report_of(model) == ["0 nn.MultiheadAttention converted"]


def small_transformers(name: str) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    if name == "GPT2":
        sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2}
    if name == "T5":
        sizes = {"d_model": 32, "num_layers": 1, "num_heads": 2, "d_ff": 32, "d_kv": 16}
    return getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**sizes))


@pytest.fixture(autouse=True)
def quiet_transformers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    yield


@pytest.mark.parametrize("name", ["Bert", "GPT2", "Llama", "T5"])
def test_models_of_transformers(name: str) -> None:
    other = report_of(small_transformers(name))[1]
    assert REGISTER in other and f"{name}Model" in other


def test_vit_of_timm() -> None:
    timm = pytest.importorskip("timm")
    assert ACTIVATE in report_of(timm.create_model("vit_tiny_patch16_224", depth=1))[1]


def test_swin_of_torchvision() -> None:
    torchvision = pytest.importorskip("torchvision")
    line = report_of(torchvision.models.swin_t())[1]
    assert ACTIVATE in line and "torchvision.models.swin_transformer.shifted_window_attention is called there" in line
