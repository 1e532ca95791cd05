"""Muon of the published CIFAR-10 speed run, for the rival that `--compare` times.

After `airbench94_muon.py` of KellerJordan/cifar10-airbench, which fixes the norms of weights here
too: `cifar10_speedrun.py` does that for both sides. The learning rate may be a tensor, so that the
update can be put in a CUDA graph.
"""

import torch


def orthogonalized(grad, steps=3, eps=1e-7):
    """A quintic Newton-Schulz iteration (Jordan et al., Muon, 2024) of a matrix."""
    x = grad.bfloat16()
    x = x / (x.norm() + eps)
    x = x.T if (tall := x.size(0) > x.size(1)) else x
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if tall else x


class PublishedMuon(torch.optim.Optimizer):
    """Of filters, each a matrix of a row for each output channel. Nesterov momentum."""

    def __init__(self, params, lr, momentum):
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self._orthogonalized = torch.compile(orthogonalized)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p not in self.state:
                    self.state[p]["buffer"] = torch.zeros_like(p)
                buffer = self.state[p]["buffer"]
                buffer.mul_(group["momentum"]).add_(p.grad)
                update = p.grad.add(buffer, alpha=group["momentum"]).flatten(1)
                p.sub_(self._orthogonalized(update).reshape(p.shape) * group["lr"])
