"""Models and helpers for the tests of convert. At module level, so that the models pickle."""

import random

import numpy
import torch
import torch.nn.functional as stock
from torch import nn

BLOCK = "conv_bn_relu_max_pool2d"


def images(device, n=4):
    return torch.randn(n, 1, 16, 16, device=device)


class Permute(nn.Module):
    """As torchvision's."""

    def __init__(self, dims):
        super().__init__()
        self.dims = dims

    def forward(self, x):
        return torch.permute(x, self.dims)


def ops_run(function):
    """The names of braze's ops that a call runs; those that only GPUs run count as what they stand
    for."""
    names = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if op.namespace == "braze":
                name = op._schema.name.removeprefix("braze::")
                if name == "conv_bn_act":
                    plain = args[3] is None and args[16] == "identity"
                    names.append("conv2d")
                    name = "batch_norm" if plain else "batch_norm_act"
                elif name == "batch_norm_act_inference":
                    name = "batch_norm_act"
                elif name == "conv_bn_act_inference":
                    alone, activation = args[3] is None, args[13]
                    if alone and activation == "relu":
                        name = "conv_bn_relu2d"
                    else:
                        names.append("conv2d")
                        plain = alone and activation == "identity"
                        name = "batch_norm" if plain else "batch_norm_act"
                names.append(name)
            return op(*args, **(kwargs or {}))

    with Mode():
        function()
    return names


def mnist():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 12, 3, padding=1, bias=False),
        nn.BatchNorm2d(12, track_running_stats=False),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(12 * 16, 10),
        nn.LogSoftmax(dim=1),
    )


class LeNet(nn.Module):
    """Functional, with dropout that asks for the mode."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc = nn.Linear(16 * 4, 10)
        self.p = 0.25

    def forward(self, x, temperature=None):
        x = stock.max_pool2d(stock.relu(self.conv1(x)), 2)
        x = stock.max_pool2d(self.conv2(x).relu(), (2, 2), stride=2)
        x = stock.dropout(torch.flatten(x, 1), self.p, self.training)
        x = self.fc(x)
        if temperature is not None:
            x = x / temperature
        return stock.log_softmax(x, dim=1)


class FunctionalBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)

    def forward(self, x):
        return stock.max_pool2d(torch.relu(self.bn(self.conv(x))), 3, stride=2, padding=1)


class Inherits(FunctionalBlock):
    def forward(self, x):
        return super().forward(x) * 2


class BasicBlock(nn.Module):
    def __init__(self, channels, width, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = None
        if stride != 1 or channels != width:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x):
        y = stock.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x if self.downsample is None else self.downsample(x)
        return stock.relu(y, inplace=True)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layers = nn.ModuleList([BasicBlock(8, 8, 1), BasicBlock(8, 16, 2)])
        self.fc = nn.Linear(16, 10)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for layer in self.layers:
            x = layer(x)
        return self.fc(stock.adaptive_avg_pool2d(x, 1).flatten(1))


class VGG(nn.Module):
    def __init__(self):
        super().__init__()
        layers, channels = [], 1
        for width in (6, 10):
            layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)]
            layers += [nn.ReLU(inplace=True), nn.MaxPool2d(2, 2)]
            channels = width
        self.features = nn.Sequential(*layers)
        self.pool = nn.AvgPool2d(2)
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(40, 10), nn.Softmax(dim=1))

    def forward(self, x):
        return self.classifier(self.pool(self.features(x)))


class UNet(nn.Module):
    """One level, up again by a layer that is told the size and by a function."""

    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.bottom = nn.Sequential(nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.up = nn.ConvTranspose2d(8, 6, 2, 2)
        self.filters = nn.Parameter(torch.randn(6, 4, 4, 4) / 10)
        self.head = nn.Conv2d(10, 2, 1)

    def forward(self, x):
        skip = self.down(x)
        x = self.up(self.bottom(stock.max_pool2d(skip, 2)), output_size=skip.shape)
        half = stock.max_pool2d(skip, 2)
        more = stock.conv_transpose2d(half, self.filters, stride=2, padding=1)
        return self.head(torch.cat([skip + x, more], 1))


MODELS = {
    "mnist": mnist,
    "LeNet": LeNet,
    "FunctionalBlock": FunctionalBlock,
    "Inherits": Inherits,
    "ResNet": ResNet,
    "VGG": VGG,
    "UNet": UNet,
}


class Branches(FunctionalBlock):
    def forward(self, x):
        if x.sum() > 0:
            x = x + 1
        return super().forward(x)


class NoGrad(FunctionalBlock):
    def forward(self, x):
        with torch.no_grad():
            x = self.conv(x)
        return stock.relu(self.bn(x))


class DrawsNumbers(FunctionalBlock):
    def forward(self, x):
        x = stock.relu(self.conv(x))
        return x if random.random() < 0.5 else x + 1


class DrawsFromNumpy(FunctionalBlock):
    def forward(self, x):
        x = stock.relu(self.conv(x))
        return x if numpy.random.rand() < 0.5 else x + 1  # noqa: NPY002


class Prints(FunctionalBlock):
    def forward(self, x):
        print(x.shape)
        return stock.relu(self.conv(x))


class AsksInAHelper(FunctionalBlock):
    def prepare(self, x):
        return [x] if isinstance(x, torch.Tensor) else x

    def forward(self, x):
        return stock.relu(self.conv(torch.cat(self.prepare(x), 1)))


class DefaultTuple(FunctionalBlock):
    def forward(self, x, size=(2, 2)):
        return stock.max_pool2d(stock.relu(self.conv(x)), size)


class MakesTensors(FunctionalBlock):
    def forward(self, x):
        return stock.relu(self.conv(x)) + torch.ones(1)


class CountsCalls(FunctionalBlock):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return stock.relu(self.conv(x))


class AsksForTypes(FunctionalBlock):
    def forward(self, x):
        x = [x] if isinstance(x, torch.Tensor) else x
        return stock.relu(self.conv(torch.cat(x, 1)))


class ReadsList(FunctionalBlock):
    def __init__(self):
        super().__init__()
        self.scales = [1.0, 2.0]

    def forward(self, x):
        return stock.relu(self.conv(x)) * self.scales[0]


#: Forwards that no trace would stand for.
UNUSUAL = [
    Branches,
    NoGrad,
    DrawsNumbers,
    DrawsFromNumpy,
    Prints,
    AsksInAHelper,
    DefaultTuple,
    MakesTensors,
    CountsCalls,
    AsksForTypes,
    ReadsList,
]


class Switchable(FunctionalBlock):
    """Reads settings of its own, of its class and of a list of layers."""

    shift = 1

    def __init__(self):
        super().__init__()
        self.scale = 2.0
        self.tail = nn.ModuleList([nn.Conv2d(8, 4, 1)])

    def forward(self, x):
        x = stock.relu(self.conv(x)) * self.scale + self.shift
        for layer in self.tail:
            x = stock.relu(layer(x))
        return x


class NotInOneRun(nn.Module):
    """Runs that look like the block, but whose parts are used otherwise."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 3, padding=1)
        self.bn = nn.BatchNorm2d(1)

    def forward(self, x):
        y = stock.relu(self.bn(self.conv(x)))  # used twice
        z = stock.max_pool2d(y, 2).sum() + y.sum()
        w = self.bn(self.conv(x))  # called twice
        return z + stock.max_pool2d(stock.relu(w), 2).sum()
