"""The convolutions of ``bench convolutions``: those of networks that people train, first layers,
awkward shapes.

A network is written down as its definition (torchvision's, where it has one) would run: `Trace`
follows the extents and keeps each convolution. Layers that several networks share are one case.
"""

import dataclasses

from benchmarks import large_filters

#: what a network is timed at, unless the command line says
BATCHES = (64, 256)


@dataclasses.dataclass(frozen=True, order=True)
class Convolution:
    """One problem, named as in the literature: input N C H W, K filters of R x S."""

    n: int
    c: int
    h: int
    w: int
    k: int
    r: int
    s: int
    stride: int = 1
    padding: tuple = (0, 0)
    dilation: int = 1
    groups: int = 1

    @property
    def name(self):
        words = f"{self.n}x{self.c}x{self.h}x{self.w} to {self.k}, {self.r}x{self.s}/{self.stride}"
        words += f" pad {self.padding[0]},{self.padding[1]}" if any(self.padding) else ""
        words += f" dilation {self.dilation}" if self.dilation > 1 else ""
        return words + (f" groups {self.groups}" if self.groups > 1 else "")

    @property
    def kind(self):
        """The class in whose line of the summary it counts."""
        if self.r * self.s >= 15 * 15:
            return "large filter"
        if self.groups > 1:
            return "depthwise" if self.groups == self.c == self.k else "grouped"
        if self.c <= 4 and self.h > 1:
            return "first layer"
        return "1x1" if self.r == self.s == 1 else "other"

    @property
    def passes(self):
        """Nobody asks for the gradient of an image."""
        first = self.kind == "first layer"
        return ("fprop", "wgrad") if first else ("fprop", "dgrad", "wgrad")

    @property
    def out_size(self):
        def extent(size, padding, taps):
            return (size + 2 * padding - self.dilation * (taps - 1) - 1) // self.stride + 1

        return extent(self.h, self.padding[0], self.r), extent(self.w, self.padding[1], self.s)

    @property
    def weights(self):
        return self.k * self.c // self.groups * self.r * self.s

    @property
    def flops(self):
        """Of any of the three passes."""
        p, q = self.out_size
        return 2 * self.n * p * q * self.weights


class Trace:
    """What a definition's layers do to a batch of images."""

    def __init__(self, channels, size):
        self.channels, self.size = channels, size
        self.layers = []

    def conv(self, filters, taps=3, stride=1, padding=None, groups=1, channels=None):
        """A convolution with "same"-like padding unless `padding` says, of `channels` if what it
        reads is not the result of the last one."""
        padding = taps // 2 if padding is None else padding
        channels = channels or self.channels
        layer = Convolution(
            *(1, channels, self.size, self.size, filters, taps, taps),
            *(stride, (padding, padding), 1, groups),
        )
        self.layers.append(layer)
        self.channels, self.size = filters, layer.out_size[0]

    def pool(self, taps, stride, padding=0, ceil=False):
        room = self.size + 2 * padding - taps
        self.size = (-(-room // stride) if ceil else room // stride) + 1

    def squeeze(self, hidden):
        """Squeeze and excitation: two 1x1 convolutions of an image of one pixel."""
        channels, size, self.size = self.channels, self.size, 1
        self.conv(hidden, 1)
        self.conv(channels, 1)
        self.size = size


def resnet(counts, bottleneck=False, groups=1, width=64):
    """ResNet-18 to -152 and ResNeXt; `width` is that of a group in the first stage."""
    net = Trace(3, 224)
    net.conv(64, 7, 2)
    net.pool(3, 2, 1)
    for stage, count in enumerate(counts):
        filters = 64 << stage
        for block in range(count):
            stride = 2 if stage and not block else 1
            channels, size = net.channels, net.size
            if bottleneck:
                inner, out = (width * groups) << stage, 4 * filters
                net.conv(inner, 1)
                net.conv(inner, 3, stride, groups=groups)
                net.conv(out, 1)
            else:
                out = filters
                net.conv(filters, 3, stride)
                net.conv(filters, 3)
            if stride > 1 or channels != out:
                net.size = size
                net.conv(out, 1, stride, channels=channels)
    return net.layers


def vgg11():
    net = Trace(3, 224)
    for filters in (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0):
        if filters:
            net.conv(filters)
        else:
            net.pool(2, 2)
    return net.layers


def densenet121():
    net = Trace(3, 224)
    net.conv(64, 7, 2)
    net.pool(3, 2, 1)
    channels = 64
    for block, count in enumerate((6, 12, 24, 16)):
        for _ in range(count):
            net.conv(128, 1, channels=channels)
            net.conv(32)
            channels += 32
        if block < 3:
            channels //= 2
            net.conv(channels, 1, channels=2 * channels)
            net.pool(2, 2)
    return net.layers


def googlenet():
    net = Trace(3, 224)
    net.conv(64, 7, 2)
    net.pool(3, 2, ceil=True)
    net.conv(64, 1)
    net.conv(192)
    # 1x1; 1x1 before 3x3; 1x1 before another 3x3 (torchvision's, where the paper has 5x5); after
    # pooling.
    inceptions = [
        *((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64), None),
        *((192, 96, 208, 16, 48, 64), (160, 112, 224, 24, 64, 64), (128, 128, 256, 24, 64, 64)),
        *((112, 144, 288, 32, 64, 64), (256, 160, 320, 32, 128, 128), None),
        *((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)),
    ]
    net.pool(3, 2, ceil=True)
    for widths in inceptions:
        if widths is None:
            # (The last pool's window is 2x2, which leaves an image as large.)
            net.pool(3, 2, ceil=True)
            continue
        one, before, three, reduced, five, projected = widths
        channels = net.channels
        net.conv(one, 1, channels=channels)
        net.conv(before, 1, channels=channels)
        net.conv(three)
        net.conv(reduced, 1, channels=channels)
        net.conv(five)
        net.conv(projected, 1, channels=channels)
        net.channels = one + three + five + projected
    return net.layers


def unet():
    """Base 32, four levels; the transposed convolutions between them are no case of these."""
    net = Trace(3, 256)
    for level, filters in enumerate((32, 64, 128, 256)):
        if level:
            net.pool(2, 2)
        net.conv(filters)
        net.conv(filters)
    for filters in (128, 64, 32):
        net.size *= 2
        net.conv(filters, channels=2 * filters)
        net.conv(filters)
    net.conv(2, 1)
    return net.layers


def resnet9():
    net = Trace(3, 32)
    net.conv(64)
    for filters, residual in ((128, True), (256, False), (512, True)):
        net.conv(filters)
        net.pool(2, 2)
        if residual:
            net.conv(filters)
            net.conv(filters)
    return net.layers


def airbench94():
    net = Trace(3, 32)
    net.conv(24, 2, padding=0)
    for filters in (64, 256, 256):
        net.conv(filters)
        net.pool(2, 2)
        net.conv(filters)
    return net.layers


def mobilenet_v2():
    net = Trace(3, 224)
    net.conv(32, 3, 2)
    stages = (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2)
    stages += (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)
    for expansion, filters, count, stride in stages:
        for block in range(count):
            hidden = expansion * net.channels
            if expansion > 1:
                net.conv(hidden, 1)
            net.conv(hidden, 3, 1 if block else stride, groups=hidden)
            net.conv(filters, 1)
    net.conv(1280, 1)
    return net.layers


def efficientnet_b0():
    net = Trace(3, 224)
    net.conv(32, 3, 2)
    stages = (1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3)
    stages += (6, 5, 1, 112, 3), (6, 5, 2, 192, 4), (6, 3, 1, 320, 1)
    for expansion, taps, stride, filters, count in stages:
        for block in range(count):
            channels = net.channels
            hidden = expansion * channels
            if expansion > 1:
                net.conv(hidden, 1)
            net.conv(hidden, taps, 1 if block else stride, groups=hidden)
            net.squeeze(channels // 4)
            net.conv(filters, 1)
    net.conv(1280, 1)
    return net.layers


def convnext_t():
    """Its 1x1 layers are torch.nn.Linear's, matrix products."""
    net = Trace(3, 224)
    for stage, (filters, count) in enumerate(((96, 3), (192, 3), (384, 9), (768, 3))):
        taps = 2 if stage else 4
        net.conv(filters, taps, taps, padding=0)
        for _ in range(count):
            net.conv(filters, 7, groups=filters)
    return net.layers


def regnet_y(widths, depths, group_width):
    net = Trace(3, 224)
    net.conv(32, 3, 2)
    for filters, depth in zip(widths, depths, strict=True):
        for block in range(depth):
            channels, size, stride = net.channels, net.size, 1 if block else 2
            if not block:
                net.conv(filters, 1, stride)
                net.size = size
                net.channels = channels
            net.conv(filters, 1)
            net.conv(filters, 3, stride, groups=filters // min(group_width, filters))
            net.squeeze(round(channels / 4))
            net.conv(filters, 1)
    return net.layers


def nature_cnn():
    net = Trace(4, 84)
    net.conv(32, 8, 4, padding=0)
    net.conv(64, 4, 2, padding=0)
    net.conv(64, 3, padding=0)
    return net.layers


def first_layers():
    """Those that none of the networks above has."""
    layers = []
    for channels, size, filters, taps, stride, padding in (
        (3, 224, 24, 3, 2, 1),  # MnasNet's successors, ShuffleNetV2
        (3, 224, 32, 3, 1, 1),
        (3, 32, 16, 3, 1, 1),  # CIFAR's ResNets
        (3, 32, 64, 5, 1, 2),
        (3, 32, 6, 5, 1, 0),
        (1, 28, 32, 3, 1, 1),
        (1, 28, 32, 5, 1, 2),
        (1, 28, 6, 5, 1, 2),  # LeNet-5
        (3, 224, 64, 11, 4, 2),  # AlexNet
        (3, 224, 768, 16, 16, 0),  # ViT-B
    ):
        net = Trace(channels, size)
        net.conv(filters, taps, stride, padding)
        layers += net.layers
    return layers


def convolution(n, c, size, k, taps, stride=1, padding=(0, 0), dilation=1, groups=1):
    return Convolution(n, c, *size, k, *taps, stride, padding, dilation, groups)


def other_filters():
    """Forms that networks above lack: Inception-v3's rows and columns, DeepLab's dilated ones, and
    ReXNet's 1 x 1 ones of channels that do not come in eights."""
    return [
        convolution(1, 128, (17, 17), 128, (1, 7), 1, (0, 3)),
        convolution(1, 128, (17, 17), 192, (7, 1), 1, (3, 0)),
        convolution(1, 192, (17, 17), 192, (7, 1), 1, (3, 0)),
        convolution(1, 384, (8, 8), 384, (1, 3), 1, (0, 1)),
        convolution(1, 48, (35, 35), 64, (5, 5), 1, (2, 2)),
        convolution(1, 288, (35, 35), 384, (3, 3), 2),
        convolution(1, 256, (33, 33), 256, (3, 3), 1, (2, 2), 2),
        convolution(1, 2048, (33, 33), 256, (3, 3), 1, (12, 12), 12),
        convolution(1, 27, (56, 56), 162, (1, 1)),
        convolution(1, 228, (28, 28), 50, (1, 1)),
        convolution(1, 61, (28, 28), 366, (1, 1)),
        convolution(1, 117, (14, 14), 702, (1, 1)),
    ]


def patches():
    """Windows side by side that networks above lack: vision transformers' of other sizes, of latent
    and of small images; a U-Net's transposed ones, whose forward pass is an input gradient."""
    return [
        convolution(1, 3, (224, 224), 1024, (14, 14), 14),  # ViT-L/14
        convolution(1, 3, (224, 224), 768, (32, 32), 32),
        convolution(1, 3, (32, 32), 192, (4, 4), 4),
        convolution(1, 4, (32, 32), 384, (2, 2), 2),  # DiT-S/2
        convolution(1, 32, (128, 128), 64, (2, 2), 2),
        convolution(1, 128, (32, 32), 256, (2, 2), 2),
        convolution(1, 512, (8, 8), 1024, (2, 2), 2),
    ]


#: network -> its convolutions, in order, repeated ones as often as they are, of a batch of one
NETWORKS = {
    "ResNet-18": resnet((2, 2, 2, 2)),
    "ResNet-50": resnet((3, 4, 6, 3), True),
    "VGG-11": vgg11(),
    "DenseNet-121": densenet121(),
    "GoogLeNet": googlenet(),
    "U-Net": unet(),
    "ResNet-9": resnet9(),
    "airbench94": airbench94(),
    "MobileNetV2": mobilenet_v2(),
    "EfficientNet-B0": efficientnet_b0(),
    "ConvNeXt-T": convnext_t(),
    "ResNeXt-50 32x4d": resnet((3, 4, 6, 3), True, groups=32, width=4),
    "RegNet-Y 400MF": regnet_y((48, 104, 208, 440), (1, 3, 6, 6), 8),
    "RegNet-Y 1.6GF": regnet_y((48, 120, 336, 888), (2, 6, 17, 2), 24),
    "RegNet-Y 8GF": regnet_y((224, 448, 896, 2016), (2, 4, 10, 1), 56),
    "RegNet-Y 16GF": regnet_y((224, 448, 1232, 3024), (2, 4, 11, 1), 112),
    "Nature-CNN": nature_cnn(),
    "first layers": first_layers(),
    "other filters": other_filters(),
    "patches": patches(),
}
#: of networks that are not timed at BATCHES
OTHER_BATCHES = {"Nature-CNN": (1, 32, 256), "other filters": (64,), "patches": (64,)}


#: Odd extents, prime channels, stride 3, dilation, few groups, one image, filters that are not
#: square.
AWKWARD = [
    # one image
    convolution(1, 3, (513, 513), 32, (3, 3), 2, (1, 1)),
    convolution(1, 64, (127, 129), 64, (3, 3), 1, (1, 1)),
    convolution(1, 256, (31, 33), 256, (3, 3), 1, (1, 1)),
    convolution(1, 512, (7, 7), 512, (3, 3), 1, (1, 1)),
    convolution(1, 2048, (1, 1), 1000, (1, 1)),
    convolution(1, 128, (63, 65), 128, (1, 1)),
    # odd images
    convolution(16, 64, (55, 57), 64, (3, 3), 1, (1, 1)),
    convolution(16, 64, (37, 41), 128, (3, 3), 2, (1, 1)),
    convolution(32, 32, (13, 17), 64, (5, 5), 1, (2, 2)),
    convolution(16, 128, (29, 31), 128, (1, 1)),
    convolution(64, 64, (9, 9), 64, (3, 3)),
    convolution(64, 128, (5, 5), 128, (5, 5)),
    # prime channels
    convolution(32, 17, (28, 28), 31, (3, 3), 1, (1, 1)),
    convolution(32, 67, (28, 28), 61, (3, 3), 1, (1, 1)),
    convolution(16, 127, (14, 14), 131, (3, 3), 1, (1, 1)),
    convolution(32, 257, (14, 14), 251, (1, 1)),
    convolution(64, 5, (32, 32), 7, (3, 3), 1, (1, 1)),
    convolution(16, 13, (56, 56), 64, (5, 5), 1, (2, 2)),
    # stride 3, and strides longer than the filter
    convolution(32, 64, (56, 56), 64, (3, 3), 3, (1, 1)),
    convolution(32, 128, (28, 28), 256, (3, 3), 3),
    convolution(32, 32, (64, 64), 64, (5, 5), 3, (2, 2)),
    convolution(16, 64, (56, 56), 128, (1, 1), 3),
    convolution(16, 96, (28, 28), 192, (2, 2), 3),
    # dilation
    convolution(16, 64, (56, 56), 64, (3, 3), 1, (2, 2), 2),
    convolution(8, 256, (33, 33), 256, (3, 3), 1, (2, 2), 2),
    convolution(8, 512, (28, 28), 512, (3, 3), 1, (4, 4), 4),
    convolution(8, 256, (33, 33), 256, (3, 3), 1, (12, 12), 12),
    convolution(16, 64, (57, 57), 64, (3, 3), 2, (2, 2), 2),
    # few groups, few filters a group
    convolution(32, 48, (28, 28), 48, (3, 3), 1, (1, 1), 1, 3),
    convolution(32, 96, (14, 14), 192, (3, 3), 1, (1, 1), 1, 3),
    convolution(16, 64, (28, 28), 128, (3, 3), 1, (1, 1), 1, 64),
    convolution(16, 126, (15, 15), 126, (3, 3), 2, (1, 1), 1, 42),
    convolution(32, 64, (28, 28), 64, (1, 1), 1, (0, 0), 1, 2),
    # filters that are not square, or large, or even
    convolution(16, 64, (28, 28), 64, (1, 7), 1, (0, 3)),
    convolution(16, 64, (28, 28), 64, (7, 1), 1, (3, 0)),
    convolution(16, 32, (56, 56), 32, (9, 9), 1, (4, 4)),
    convolution(32, 64, (28, 28), 128, (4, 4), 2, (1, 1)),
    convolution(32, 64, (16, 16), 64, (2, 2), 2),
    # few filters
    convolution(16, 64, (64, 64), 1, (3, 3), 1, (1, 1)),
    convolution(16, 128, (32, 32), 3, (1, 1)),
]


def cases(networks=(), batches=(), usual=BATCHES):
    """Convolution -> the networks that have it, largest batch first where there are several.

    Args:
        networks: only of those whose name contains one of these; "awkward" and "large filters" are
            networks too.
        batches: in the place of the networks' own; those two keep theirs.
        usual: of networks that have none of their own.
    """
    found = {}

    def is_wanted(name):
        return not networks or any(part.lower() in name.lower() for part in networks)

    for network, layers in NETWORKS.items():
        for batch in sorted(batches or OTHER_BATCHES.get(network, usual), reverse=True):
            for layer in layers if is_wanted(network) else ():
                mine = found.setdefault(dataclasses.replace(layer, n=batch), [])
                if network not in mine:
                    mine.append(network)
    for layer in AWKWARD if is_wanted("awkward") else ():
        found.setdefault(layer, []).append("awkward")
    for n, c, size, k, taps, padding, groups in (
        large_filters.CASES if is_wanted("large filters") else ()
    ):
        layer = convolution(n, c, size, k, taps, 1, padding, 1, groups)
        found.setdefault(layer, []).append("large filters")
    return found
