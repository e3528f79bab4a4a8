"""Trains a GPT and keeps the losses."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import flash_ext
from flash_ext.demo.gpt import GPT, VOCABULARY
from flash_ext.demo.text import batches

TOKENS_PER_STEP = 1024
LEARNING_RATE = 1.5e-3
# Adam divides each gradient by its own size. That of a key's bias is zero but for rounding, which would be blown up to
# full steps; this keeps it small, so that two equal models stay equal.
ADAM_EPSILON = 1e-5
WARM_UP = 20  # steps


@dataclass(frozen=True)
class Training:
    """A trained model, its loss at every step and on held-out text (nats per byte), the seconds of the median step."""

    model: GPT
    losses: list[float]
    held_out_loss: float
    seconds_per_step: float


def make_model(seqlen: int, seed: int, device: torch.device, with_flash_ext: bool) -> GPT:
    torch.manual_seed(seed)
    model = GPT(seqlen).to(device)
    if with_flash_ext:
        flash_ext.convert(model)
    return model


def train(model: GPT, text: Tensor, held_out: Tensor, steps: int, seed: int, label: str) -> Training:
    """Minimises the cross entropy of the next byte by AdamW with warm-up and a cosine."""
    device, seqlen = model.head.weight.device, model.max_seqlen
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=ADAM_EPSILON)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _learning_rate(step, steps))
    losses, seconds = [], []
    source = batches(text, batch_size(seqlen), seqlen, seed)
    progress = tqdm(range(steps), desc=label, unit="step", dynamic_ncols=True)
    for _ in progress:
        start = time.perf_counter()
        tokens, following = (x.to(device) for x in next(source))
        loss = loss_of(model, tokens, following)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
        progress.set_postfix(loss=f"{losses[-1]:.3f}")
    return Training(model, losses, evaluate(model, held_out, seed), sorted(seconds)[len(seconds) // 2])


@torch.inference_mode()
def evaluate(model: GPT, text: Tensor, seed: int, num_batches: int = 4) -> float:
    """The mean loss over a few batches of a text."""
    device = model.head.weight.device
    source = batches(text, batch_size(model.max_seqlen), model.max_seqlen, seed)
    losses = [loss_of(model, *(x.to(device) for x in next(source))).item() for _ in range(num_batches)]
    return sum(losses) / num_batches


def batch_size(seqlen: int) -> int:
    return max(1, TOKENS_PER_STEP // seqlen)


def loss_of(model: GPT, tokens: Tensor, following: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).view(-1, VOCABULARY), following.reshape(-1))


def _learning_rate(step: int, steps: int) -> float:
    """The share of the full learning rate."""
    warm = min(1.0, (step + 1) / WARM_UP)
    return warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))
