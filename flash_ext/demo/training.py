"""Trains GPTs side by side and keeps the losses."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

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
LINES = 10  # of progress, where the output is no terminal


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


def train(models: Mapping[str, GPT], text: Tensor, held_out: Tensor, steps: int, seed: int) -> dict[str, Training]:
    """Minimises the cross entropy of the next byte by AdamW with warm-up and a cosine.

    All models see the same batches, and take turns at every step, so that the machine is as busy for each of them. The
    order changes from step to step.
    """
    seqlen = next(iter(models.values())).max_seqlen
    source = batches(text, batch_size(seqlen), seqlen, seed)
    learners = {name: _Learner(model, steps) for name, model in models.items()}
    with tqdm(range(steps), desc="training", unit="step", dynamic_ncols=True, disable=None) as progress:
        for step in progress:
            batch = next(source)
            for name in list(learners) if step % 2 == 0 else reversed(learners):
                learners[name].learn(*batch)
            losses = {name: f"{learner.losses[-1]:.3f}" for name, learner in learners.items()}
            progress.set_postfix(losses)
            if progress.disable and (step + 1) % max(1, steps // LINES) == 0:  # nobody watches: a log
                print(f"step {step + 1} of {steps}: loss " + ", ".join(map(" ".join, losses.items())), flush=True)
    return {
        name: Training(learner.model, learner.losses, evaluate(learner.model, held_out, seed), median(learner.seconds))
        for name, learner in learners.items()
    }


class _Learner:
    """A model on its way."""

    def __init__(self, model: GPT, steps: int) -> None:
        self.model = model
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=ADAM_EPSILON)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, lambda step: _learning_rate(step, steps))

    def learn(self, tokens: Tensor, following: Tensor) -> None:
        start = time.perf_counter()
        device = self.model.head.weight.device
        loss = loss_of(self.model, tokens.to(device), following.to(device))
        self._optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._schedule.step()
        self.losses.append(loss.item())  # waits for a GPU, so that none of the step is left for the next model
        self.seconds.append(time.perf_counter() - start)


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
