"""The published CIFAR-10 speed run, captured by `braze.capture`.

    python examples/cifar10_speedrun.py [--smoke | --compare]

The recipe is that of KellerJordan/cifar10-airbench's `airbench94_muon.py`: a network whose first
convolution whitens patches, its bias frozen after three of eight epochs; Nesterov SGD for biases
and the head, Muon for the other filters, each with a schedule that changes at every step; smoothed
labels; images that are flipped in every other epoch and moved by up to two pixels, on the device.
BRAZE_DATA names the folder of `cifar-10-batches-bin`; without it the images are synthetic.
"""

import os
from pathlib import Path

import torch
from loop import Loop, main, rate_of, set_rate
from published_muon import PublishedMuon
from torch import nn
from torch.nn import functional as F

import braze

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
BIAS_RATE, HEAD_RATE, MUON_RATE, DECAY, PAD = 0.053, 0.67, 0.24, 2e-6, 2


def convolution(inputs, outputs):
    filters = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    nn.init.dirac_(filters.weight.data[:inputs])
    return filters


def norm(channels):
    layer = nn.BatchNorm2d(channels, eps=1e-12, momentum=0.4)
    layer.weight.requires_grad_(False)
    return layer


def group(inputs, outputs):
    return nn.Sequential(
        convolution(inputs, outputs), nn.MaxPool2d(2), norm(outputs), nn.GELU(),
        convolution(outputs, outputs), norm(outputs), nn.GELU(),
    )  # fmt: skip


class Net(nn.Module):
    def __init__(self, images, widths):
        super().__init__()
        self.whiten = nn.Conv2d(3, 24, 2)
        self.whiten.weight.requires_grad_(False)
        self.layers = nn.Sequential(nn.GELU(), *map(group, (24, *widths[:-1]), widths))
        self.pool, self.head = nn.MaxPool2d(3), nn.Linear(widths[-1], 10, bias=False)
        self.head.weight.data /= self.head.weight.data.std()
        patches = F.unfold(images, 2).transpose(1, 2).reshape(-1, 12)
        values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches), UPLO="U")
        filters = (vectors / (values + 5e-4).sqrt()).T.reshape(12, 3, 2, 2)
        self.whiten.weight.data = torch.cat((filters, -filters))

    def forward(self, x, trains_bias=False):
        bias = self.whiten.bias if trains_bias else self.whiten.bias.detach()
        x = self.pool(self.layers(F.conv2d(x, self.whiten.weight, bias))).flatten(1)
        return self.head(x) / x.size(1)


def load(part, smoke, device):
    """Images [N, 3, 32, 32], normalised, and labels, of "train" or "test"."""
    folder = Path(os.environ.get("BRAZE_DATA", ".")) / "cifar-10-batches-bin"
    files = sorted(folder.glob("data_batch_*.bin" if part == "train" else "test_batch.bin"))
    if smoke or not files:
        count = 512 if smoke else 50_000 if part == "train" else 10_000
        labels = torch.randint(10, (count,), device=device)
        colours = torch.linspace(0, 1, 30, device=device).reshape(10, 3)[labels]
        images = colours[:, :, None, None] + 0.2 * torch.randn(count, 3, 32, 32, device=device)
    else:
        records = [torch.frombuffer(bytearray(f.read_bytes()), dtype=torch.uint8) for f in files]
        rows = torch.cat(records).reshape(-1, 3073).to(device)
        labels, images = rows[:, 0].long(), rows[:, 1:].reshape(-1, 3, 32, 32) / 255
    mean, std = (torch.tensor(x, device=device).reshape(3, 1, 1) for x in (MEAN, STD))
    return (images - mean) / std, labels


def build(device, smoke=False, stock=False):
    epochs, batch_size, widths = (4, 64, (16, 32, 32)) if smoke else (8, 2000, (64, 256, 256))
    dtype = torch.half if device == "cuda" else torch.float32
    torch.manual_seed(1)
    images, labels = load("train", smoke, device)
    model = Net(images[:5000].cpu(), widths).to(device, dtype, memory_format=torch.channels_last)
    biases = [m.float().bias for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    filters = [m.weight for m in model.layers.modules() if isinstance(m, nn.Conv2d)]
    rates = ([model.whiten.bias], BIAS_RATE), (biases, BIAS_RATE), ([model.head.weight], HEAD_RATE)
    groups = [
        {"params": p, "lr": rate_of(r, device, stock), "weight_decay": DECAY * batch_size / r}
        for p, r in rates
    ]
    sgd = (torch if stock else braze).optim.SGD(groups, momentum=0.85, nesterov=True, fused=True)
    if stock:
        muon = PublishedMuon(filters, rate_of(MUON_RATE, device, stock), momentum=0.6)
    else:
        model = braze.convert(model)
        muon = braze.optim.Muon(filters, MUON_RATE, weight_decay=0, momentum=0.6, ns_steps=3)

    def objective(x, y, trains_bias):
        return F.cross_entropy(model(x, trains_bias), y, label_smoothing=0.2, reduction="sum")

    if stock:
        objective = torch.compile(objective)
    # Channels last, so that a pixel is read at once; flipped at random, then in every other epoch.
    padded = F.pad(images.to(dtype), (PAD,) * 4, "reflect").permute(0, 2, 3, 1).contiguous()
    flipped, grid = torch.rand(len(images), device=device) < 0.5, torch.arange(32, device=device)

    def train(chosen, odd, trains_bias):
        """chosen, odd: tensors, the batch's indices and whether the epoch is odd. trains_bias: a
        plain bool, and so a kind of call of its own: the bias is frozen midway."""
        down, right = torch.randint(2 * PAD + 1, (2, len(chosen), 1), device=device)
        columns = torch.where((flipped[chosen] ^ odd)[:, None], 31 - grid, grid) + right
        x = padded[chosen[:, None, None], (grid + down)[:, :, None], columns[:, None]]
        loss = objective(x.permute(0, 3, 1, 2), labels[chosen], trains_bias)
        sgd.zero_grad()
        muon.zero_grad()
        loss.backward()
        sgd.step()
        with torch.no_grad():  # the norm of each filter bank is fixed
            for p, length in zip(filters, torch._foreach_norm(filters), strict=True):
                p.mul_(len(p) ** 0.5 / length)
        muon.step()
        return loss / len(chosen)

    each = len(images) // batch_size
    orders = [torch.randperm(len(images), device=device) for _ in range(epochs)]
    parity = torch.arange(epochs, device=device) % 2 == 1

    def batch(i):
        epoch, at = divmod(i, each)
        return orders[epoch][at * batch_size :][:batch_size], parity[epoch], i < 3 * each

    def before(i):
        groups = [*sgd.param_groups, *muon.param_groups]
        for one, rate in zip(groups, (BIAS_RATE, BIAS_RATE, HEAD_RATE, MUON_RATE), strict=True):
            last = (3 if one is groups[0] else epochs) * each
            set_rate(one, rate * max(1 - i / last, 0))

    @torch.no_grad()
    def report():
        model.eval()
        test, wanted = load("test", smoke, device)
        views = [model(x) + model(x.flip(3)) for x in test.to(dtype).split(2000)]
        found = torch.cat(views).argmax(1)
        return f"({(found == wanted).float().mean():.2%} of the test images are right)"

    return Loop(train, batch, before, epochs * each, report)


if __name__ == "__main__":
    main(build, __doc__)
