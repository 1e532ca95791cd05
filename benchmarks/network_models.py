"""The networks of ``bench networks``: what people train, from a few layers to EfficientNet.

Those written out here follow the papers and recipes that name them; the others are torchvision's or
timm's, which are needed only for theirs.
"""

import dataclasses
import importlib
from collections.abc import Callable

import torch
from torch import nn


def conv_bn_relu(channels_in, channels):
    """A 3x3 convolution without a bias, batch norm, ReLU."""
    return [
        nn.Conv2d(channels_in, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
    ]


def lenet5():
    """LeNet-5 (LeCun et al., 1998) with max pooling and ReLU, as it is written today."""
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def nature_cnn():
    """The network of Mnih et al., 2015, on four frames of 84x84."""
    return nn.Sequential(
        *(nn.Conv2d(4, 32, 8, stride=4), nn.ReLU(), nn.Conv2d(32, 64, 4, stride=2), nn.ReLU()),
        *(nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU()),
        nn.Linear(512, 18),
    )


class Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return x + self.layers(x)


def resnet9():
    """ResNet-9 for CIFAR (Page, 2018: "How to train your ResNet")."""

    def block(channels_in, channels):
        return nn.Sequential(*conv_bn_relu(channels_in, channels))

    def residual(channels):
        return Residual(block(channels, channels), block(channels, channels))

    return nn.Sequential(
        *(block(3, 64), block(64, 128), nn.MaxPool2d(2), residual(128)),
        *(block(128, 256), nn.MaxPool2d(2), block(256, 512), nn.MaxPool2d(2), residual(512)),
        *(nn.MaxPool2d(4), nn.Flatten(), nn.Linear(512, 10)),
    )


def airbench94(first=24, widths=(64, 256, 256)):
    """The network of airbench94 (Jordan, 2024).

    Args:
        first: filters of the first layer.
        widths: of the three blocks.
    """

    def block(channels_in, channels):
        return [
            nn.Conv2d(channels_in, channels, 3, padding="same", bias=False),
            *(nn.MaxPool2d(2), nn.BatchNorm2d(channels), nn.GELU()),
            nn.Conv2d(channels, channels, 3, padding="same", bias=False),
            *(nn.BatchNorm2d(channels), nn.GELU()),
        ]

    layers, channels = [nn.Conv2d(3, first, 2), nn.GELU()], first
    for width in widths:
        layers += block(channels, width)
        channels = width
    layers += nn.MaxPool2d(3), nn.Flatten(), nn.Linear(channels, 10, bias=False)
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """U-Net (Ronneberger et al., 2015), padded, with batch norm; two classes."""

    def __init__(self, base=32, depth=3):
        super().__init__()
        widths = [base << level for level in range(depth + 1)]

        def double(channels_in, channels):
            layers = conv_bn_relu(channels_in, channels) + conv_bn_relu(channels, channels)
            return nn.Sequential(*layers)

        self.down = nn.ModuleList(map(double, [3, *widths], widths))
        self.pool = nn.MaxPool2d(2)
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(wide, narrow, 2, 2) for wide, narrow in pairs)
        self.merge = nn.ModuleList(double(2 * narrow, narrow) for _, narrow in pairs)
        self.head = nn.Conv2d(base, 2, 1)

    def forward(self, x):
        skips = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else self.pool(x))
            skips.append(x)
        skips.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], 1))
        return self.head(x)


@dataclasses.dataclass(frozen=True)
class Network:
    """A network, and what it is trained on."""

    make: Callable
    batches: tuple
    channels: int = 3
    size: int = 224
    classes: int = 1000
    dense: bool = False  # a label per pixel

    def batch(self, n, device):
        """Random images [n, C, H, W] in channels_last, and labels."""
        images = torch.randn(n, self.channels, self.size, self.size, device=device)
        shape = (n, self.size, self.size) if self.dense else (n,)
        labels = torch.randint(self.classes, shape, device=device)
        return images.to(memory_format=torch.channels_last), labels


def torchvision(name, *batches, **arguments):
    """torchvision's, without what draws random numbers."""

    def make():
        models = importlib.import_module("torchvision.models")
        return models.get_model(name, num_classes=1000, **arguments)

    return Network(make, batches)


def timm(name, *batches):
    def make():
        return importlib.import_module("timm").create_model(name)

    return Network(make, batches)


NETWORKS = {
    "LeNet-5": Network(lenet5, (64,), 1, 28, 10),
    "Nature-CNN": Network(nature_cnn, (32, 256), 4, 84, 18),
    "ResNet-9": Network(resnet9, (512,), 3, 32, 10),
    "airbench94": Network(airbench94, (1024,), 3, 32, 10),
    "U-Net": Network(UNet, (16,), 3, 256, 2, dense=True),
    "ResNet-18": torchvision("resnet18", 128),
    "ResNet-50": torchvision("resnet50", 64, 256),
    "VGG-11-BN": torchvision("vgg11_bn", 64, dropout=0.0),
    "MobileNetV2": torchvision("mobilenet_v2", 128, dropout=0.0),
    "ConvNeXt-T": torchvision("convnext_tiny", 64, stochastic_depth_prob=0.0),
    "EfficientNet-B0": torchvision("efficientnet_b0", 128, dropout=0.0, stochastic_depth_prob=0.0),
}
#: Seventeen more, chosen for variety.
MORE = {
    "DenseNet-121": torchvision("densenet121", 64),
    "GoogLeNet": torchvision("googlenet", 64, aux_logits=False, init_weights=False),
    "ShuffleNetV2": torchvision("shufflenet_v2_x1_0", 64),
    "MobileNetV3-L": torchvision("mobilenet_v3_large", 64, dropout=0.0),
    "MnasNet": torchvision("mnasnet1_0", 64, dropout=0.0),
    "RegNet-Y-1.6": torchvision("regnet_y_1_6gf", 64),
    "ResNeXt-50": torchvision("resnext50_32x4d", 64),
    "SqueezeNet": torchvision("squeezenet1_1", 64, dropout=0.0),
    "Wide-ResNet-50": torchvision("wide_resnet50_2", 64),
    "timm resnet26d": timm("resnet26d", 64),
    "timm cspresnet50": timm("cspresnet50", 64),
    "timm repvgg_a2": timm("repvgg_a2", 64),
    "timm dla34": timm("dla34", 64),
    "timm hrnet_w18_small": timm("hrnet_w18_small", 64),
    "timm nf_regnet_b0": timm("nf_regnet_b0", 64),
    "timm convnextv2_nano": timm("convnextv2_nano", 64),
    "timm resnetv2_50x1_bit": timm("resnetv2_50x1_bit", 64),
}
