"""Training steps over two processes, and by the libraries that make them: the gradients are those of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import flash_ext
from flash_ext.integrations import sdpa_provider
from flash_ext.integrations.distributed.dtensor import register_dtensor
from tests.oracle import cumulative
from tests.processes import needs_gpus, run_processes

KINDS = ("sdpa", "attention")
WIDTH, HEAD_DIM, BATCH, SEQLEN = 32, 8, 4, 12


class Attention(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """As many heads as this rank's projections have."""
        q, k, v = (project(x).unflatten(-1, (-1, HEAD_DIM)) for project in (self.q, self.k, self.v))
        if self.kind == "attention":
            rows = flash_ext.attention(q, k, v, causal=True, softcap=5.0)
            assert isinstance(rows, Tensor)
        else:
            heads_first = (t.transpose(1, 2) for t in (q, k, v))
            rows = F.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)
        result: Tensor = self.out(rows.flatten(2))
        return result


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(kind)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x))


def make_model(device: str, kind: str) -> nn.Sequential:
    return nn.Sequential(Block(kind), Block(kind)).to(device)


def make_batch(device: str) -> tuple[Tensor, Tensor]:
    x, target = torch.randn(2, BATCH, SEQLEN, WIDTH, device=device)
    return x, target


def loss_of(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(model(x), target)


def gradients(model: nn.Module) -> list[Tensor]:
    found = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        grad = parameter.grad
        found.append(grad.full_tensor() if isinstance(grad, DTensor) else grad)
    return found


def expected_gradients(model: nn.Module, x: Tensor, target: Tensor) -> list[Tensor]:
    """Of the whole batch, by one process."""
    alone = copy.deepcopy(model)
    loss_of(alone, x, target).backward()
    return gradients(alone)


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def own_half(*tensors: Tensor) -> list[Tensor]:
    return [x.chunk(dist.get_world_size())[dist.get_rank()] for x in tensors]


# ---- Strategies of torch --------------------------------------------------------------------------------------------


def step_with_ddp(device: str, mesh: Any, kind: str) -> None:
    model, batch = make_model(device, kind), make_batch(device)
    expected = expected_gradients(model, *batch)
    parallel = DistributedDataParallel(model)
    loss_of(parallel, *own_half(*batch)).backward()
    assert_same(gradients(model), expected)


def step_with_fsdp(device: str, mesh: Any, kind: str) -> None:
    model, batch = make_model(device, kind), make_batch(device)
    expected = expected_gradients(model, *batch)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    loss_of(model, *own_half(*batch)).backward()
    assert_same(gradients(model), expected)


def step_with_tensor_parallelism(device: str, mesh: Any, kind: str) -> None:
    """Each rank has half of the heads: as plain tensors, and for ``flash_ext.attention`` as DTensors too."""
    model, batch = make_model(device, kind), make_batch(device)
    expected = expected_gradients(model, *batch)
    for use_local_output in (True, False) if kind == "attention" else (True,):
        sharded = copy.deepcopy(model)
        plan: dict[str, Any] = {
            f"attention.{name}": ColwiseParallel(use_local_output=use_local_output) for name in ("q", "k", "v")
        }
        for block in sharded:
            parallelize_module(block, mesh, plan | {"attention.out": RowwiseParallel()})
        loss_of(sharded, *batch).backward()
        assert_same(gradients(sharded), expected)


STRATEGIES = (step_with_ddp, step_with_fsdp, step_with_tensor_parallelism)


def take_steps(device: str, mesh: Any) -> None:
    """All of them in one start of the processes, which takes longer than the steps."""
    register_dtensor()
    for kind in KINDS:
        for step in STRATEGIES:
            sdpa_provider.forget_calls()
            with flash_ext.activated():
                step(device, mesh, kind)
            assert (kind == "sdpa") == bool(sdpa_provider.calls_served()), (step.__name__, kind)


def test_strategies_of_torch(device: str) -> None:
    needs_gpus(device)
    run_processes(device, take_steps)


# ---- DTensor --------------------------------------------------------------------------------------------------------


def attend_to_packed_dtensors(device: str, mesh: Any) -> None:
    """Packed sequences by heads, whose lengths each rank has: nothing travels."""
    register_dtensor()
    q, k, v, grad_out = torch.randn(4, 20, 4, 16, device=device)
    ends = cumulative([7, 0, 13], device)
    lengths = dict(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=13, max_seqlen_k=13)
    plain = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = flash_ext.attention(*plain, causal=True, **lengths)
    assert isinstance(expected, Tensor)
    right = torch.autograd.grad(expected, plain, grad_out)
    sharded = [distribute_tensor(x, mesh, [Shard(1)]).requires_grad_() for x in (q, k, v)]
    copies = {name: distribute_tensor(x, mesh) if isinstance(x, Tensor) else x for name, x in lengths.items()}
    of_out = distribute_tensor(grad_out, mesh, [Shard(1)])
    with CommDebugMode() as communication:
        out = flash_ext.attention(*sharded, causal=True, **copies)
        assert isinstance(out, DTensor) and out.placements == (Shard(1),)
        found = torch.autograd.grad(out, sharded, of_out)
    assert communication.get_total_counts() == 0
    assert_same([x.full_tensor() for x in (out, *found)], [expected, *right])


def test_packed_dtensors(device: str) -> None:
    needs_gpus(device)
    run_processes(device, attend_to_packed_dtensors)


# ---- Libraries ------------------------------------------------------------------------------------------------------


def step_with_accelerate(device: str, mesh: Any) -> None:
    import accelerate

    accelerator = accelerate.Accelerator(cpu=device == "cpu")
    assert accelerator.num_processes == dist.get_world_size()
    for kind in KINDS:
        model, batch = make_model(device, kind), make_batch(device)
        expected = expected_gradients(model, *batch)
        prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        accelerator.backward(loss_of(prepared, *own_half(*batch)))
        assert_same(gradients(model), expected)
        optimizer.step()


def step_with_accelerate_and_activate(device: str, mesh: Any) -> None:
    with flash_ext.activated():
        step_with_accelerate(device, mesh)
    assert sdpa_provider.calls_served()


def test_accelerate(device: str) -> None:
    pytest.importorskip("accelerate")
    needs_gpus(device)
    run_processes(device, step_with_accelerate_and_activate)


@pytest.mark.parametrize("kind", KINDS)
def test_lightning(device: str, kind: str) -> None:
    """Three steps of its Trainer leave the parameters that the same steps by hand do."""
    lightning = pytest.importorskip("lightning")

    class Training(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model(device, kind)

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            return loss_of(self.model, *batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    training, by_hand = Training(), make_model(device, kind)
    by_hand.load_state_dict(training.model.state_dict())
    data = torch.utils.data.TensorDataset(*(torch.randn(6, SEQLEN, WIDTH) for _ in range(2)))
    batches = torch.utils.data.DataLoader(data, batch_size=2)
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    for x, target in batches:
        optimizer.zero_grad()
        loss_of(by_hand, x.to(device), target.to(device)).backward()
        optimizer.step()
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = lightning.Trainer(max_epochs=1, accelerator=device, devices=1, **quiet)
    with flash_ext.activated():
        trainer.fit(training, batches)
    found = [x.to(device) for x in training.model.state_dict().values()]
    assert_same(found, list(by_hand.state_dict().values()))
