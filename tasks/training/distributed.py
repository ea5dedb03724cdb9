"""The ranks: who am I, what are my rows, sums over all ranks, and batch norm over the global batch.

World size 1 takes the same path; every collective is then a no-op.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

CONNECT_TIMEOUT = timedelta(seconds=60)
CPU = torch.device("cpu")
COLLECTIVE_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Ranks:
    """One rank's view of the job. Only ``first`` writes files and prints."""

    rank: int = 0
    world: int = 1
    device: torch.device = CPU

    @property
    def first(self) -> bool:
        return self.rank == 0

    def rows(self, count: int) -> slice:
        """This rank's contiguous share of ``count`` rows; sizes differ by one at most and may be zero."""
        return slice(count * self.rank // self.world, count * (self.rank + 1) // self.world)

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replace ``tensor`` by its sum over all ranks, the same bits on each, and return it."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def from_first(self, value: int) -> int:
        """Rank 0's ``value`` on every rank."""
        return int(self.sum_(torch.tensor(value if self.first else 0, dtype=torch.int64, device=self.device)).item())

    def sum_gradients(self, parameters: Iterable[nn.Parameter], extra: Tensor) -> Tensor:
        """Sum all gradients over the ranks in place, in one collective with ``extra`` (float32 [K]), whose sum is returned.

        A sum and no mean: each rank's loss is divided by the global batch's weight already, so uneven rows count right.
        """
        if self.world == 1:
            return extra
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = self.sum_(torch.cat([*(gradient.reshape(-1) for gradient in gradients), extra.to(gradients[0].dtype)]))
        pieces = flat.split([*(gradient.numel() for gradient in gradients), extra.numel()])
        for gradient, piece in zip(gradients, pieces, strict=False):
            gradient.copy_(piece.view(gradient.shape))
        summed: Tensor = pieces[-1]
        return summed


@contextmanager
def joined(device: torch.device) -> Iterator[Ranks]:
    """The Ranks of this process, from torch elastic's environment; leaves the process group on exit.

    Keys of the rendezvous store get a prefix for each attempt: torch 2.14 keeps one store over all restarts, in which
    a restarted gloo would find the addresses of dead ranks and wait for them.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world == 1:
        yield Ranks(device=device)
        return
    # With TORCH_DISABLE_SHARE_RDZV_TCP_STORE set, the agent hosts no store and rank 0 must.
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, is_master=not hosted and rank == 0, timeout=CONNECT_TIMEOUT
    )
    attempt = dist.PrefixStore(f"attempt_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=attempt, rank=rank, world_size=world, timeout=COLLECTIVE_TIMEOUT)
    try:
        yield Ranks(rank, world, device)
    finally:
        dist.destroy_process_group()


class GlobalBatchNorm2d(nn.BatchNorm2d):
    """Batch norm whose statistics are those of the global batch, on any device and for ranks of any row count, even none.

    torch's own SyncBatchNorm runs on GPUs only. With one rank it is torch's BatchNorm2d, save that a batch of a single value
    for each channel, which torch refuses, gives the bias and leaves the running statistics alone.
    """

    ranks: Ranks = Ranks()

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or (self.ranks.world == 1 and x.numel() > self.num_features):
            return super().forward(x)
        assert self.affine
        assert self.momentum is not None
        out, mean, variance, count = _Normalise.apply(x, self.weight, self.bias, self.eps, self.ranks)
        if count > 1:
            assert self.running_mean is not None
            assert self.running_var is not None
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * (count / (count - 1)), self.momentum)
        result: Tensor = out
        return result


class _Normalise(torch.autograd.Function):
    """x -> (x - mean) / sqrt(variance + eps) * weight + bias over batch, height and width of all ranks' rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, ranks: Ranks) -> tuple[Tensor, Tensor, Tensor, int]:
        values = x.float()
        channels = values.shape[1]
        # Counts, means and sums of squared deviations are merged as by Chan et al. 1983: no difference of large squares.
        parts = torch.zeros(ranks.world, 2 * channels + 1, dtype=torch.float64, device=x.device)
        if len(values):
            variance, mean = torch.var_mean(values, (0, 2, 3), correction=0)
            rows = values.numel() // channels
            parts[ranks.rank] = torch.cat([torch.full((1,), float(rows), device=x.device), mean, variance * rows]).double()
        ranks.sum_(parts)
        counts, means, squares = parts[:, :1], parts[:, 1 : channels + 1], parts[:, channels + 1 :]
        count = int(counts.sum().item())
        mean64 = (counts * means).sum(0) / count
        variance64 = (squares + counts * (means - mean64) ** 2).sum(0) / count
        mean, variance = mean64.float(), variance64.float()
        scale = (variance64 + eps).rsqrt().float()
        normal = (values - mean.view(-1, 1, 1)) * scale.view(-1, 1, 1)
        out = normal * weight.view(-1, 1, 1) + bias.view(-1, 1, 1)
        ctx.save_for_backward(normal, weight, scale)
        ctx.ranks, ctx.count = ranks, count
        ctx.mark_non_differentiable(mean, variance)
        return out.to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, Tensor, None, None]:
        normal, weight, scale = ctx.saved_tensors
        upstream = gradients[0].float()
        grad_bias = upstream.sum((0, 2, 3))
        grad_weight = (upstream * normal).sum((0, 2, 3))
        sums = ctx.ranks.sum_(torch.stack([grad_bias, grad_weight])) / ctx.count
        # Ioffe & Szegedy 2015 (arXiv:1502.03167), section 3, with the sums over all ranks.
        grad_x = (upstream - sums[0].view(-1, 1, 1) - normal * sums[1].view(-1, 1, 1)) * (weight * scale).view(-1, 1, 1)
        return grad_x.to(gradients[0].dtype), grad_weight, grad_bias, None, None


def with_global_norms(model: nn.Module, ranks: Ranks) -> nn.Module:
    """``model`` with each BatchNorm2d made a GlobalBatchNorm2d over ``ranks``, in place, names and values kept."""
    for module in model.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = GlobalBatchNorm2d
            module.ranks = ranks  # type: ignore[assignment]
    return model
