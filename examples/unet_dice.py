"""Segmentation by a U-Net, captured by `braze.capture`.

    python examples/unet_dice.py [--smoke | --compare]

Dice and cross-entropy together, mixed precision with a GradScaler, clipped gradients, SGD with
Nesterov momentum under a polynomial schedule, and an average of the weights that is evaluated: as
medical segmentation is trained. The images are synthetic: discs and squares in noise.

Papers: O. Ronneberger et al., "U-Net" (2015); F. Milletari et al., "V-Net" (2016), for Dice; F.
Isensee et al., "nnU-Net" (Nature Methods, 2021), for the schedule.
"""

import copy

import torch
from loop import Loop, main, rate_of, set_rate
from torch import nn
from torch.nn import functional as F

import braze

CLASSES, RATE, MOMENTUM, DECAY, MAX_NORM = 3, 0.02, 0.95, 3e-5, 12.0


def block(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class UNet(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        widths = [width << i for i in range(depth)]
        self.down = nn.ModuleList(map(block, [1, *widths[:-1]], widths))
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in reversed(widths[:-1])
        )
        self.join = nn.ModuleList(block(2 * w, w) for w in reversed(widths[:-1]))
        self.pool, self.head = nn.MaxPool2d(2), nn.Conv2d(width, CLASSES, 1)

    def forward(self, x):
        kept = []
        for i, down in enumerate(self.down):
            x = down(self.pool(x) if i else x)
            kept.append(x)
        kept.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([up(x), kept.pop()], 1))
        return self.head(x)


def shapes(count, size, device):
    """Images [count, 1, size, size] and masks [count, size, size] of a disc and a square each."""
    grid = torch.arange(size, device=device)
    x, y, u, v = torch.randint(size // 4, 3 * size // 4, (4, count, 1, 1), device=device)
    disc = (grid - x) ** 2 + (grid[:, None] - y) ** 2 < (size // 6) ** 2
    square = ((grid - u).abs() < size // 8) & ((grid[:, None] - v).abs() < size // 8)
    mask = torch.where(square, 2, disc.long())
    images = mask / 2 + 0.3 * torch.randn(mask.shape, device=device)
    return images.unsqueeze(1), mask


def dice_loss(logits, mask):
    """1 - 2 |A and B| / (|A| + |B|) of the classes but the background, in float32."""
    shares = logits.float().softmax(1)[:, 1:]
    classes = torch.arange(1, CLASSES, device=mask.device)[:, None, None]
    wanted = (mask[:, None] == classes).float()
    both = (shares * wanted).sum((0, 2, 3))
    return 1 - ((2 * both + 1) / ((shares + wanted).sum((0, 2, 3)) + 1)).mean()


def build(device, smoke=False, stock=False):
    width, depth, size, batch_size, steps = (8, 3, 32, 4, 40) if smoke else (32, 5, 256, 16, 300)
    torch.manual_seed(1)
    model = UNet(width, depth).to(device, memory_format=torch.channels_last)
    average = copy.deepcopy(model)
    if not stock:
        model = braze.convert(model)
    make, settings = (torch.optim.SGD, {"fused": True}) if stock else (braze.optim.SGD, {})
    rate = rate_of(RATE, device, stock)
    optimizer = make(
        model.parameters(), rate, MOMENTUM, weight_decay=DECAY, nesterov=True, **settings
    )
    scaler = torch.amp.GradScaler(device)
    half = torch.float16 if device == "cuda" else torch.bfloat16
    cross_entropy = (F if stock else braze.nn.functional).cross_entropy

    def objective(images, mask):
        logits = model(images)
        return cross_entropy(logits, mask) + dice_loss(logits, mask)

    if stock:
        objective = torch.compile(objective)
    pairs = [
        list(pair)
        for names in ("parameters", "buffers")
        for pair in zip(getattr(average, names)(), getattr(model, names)(), strict=True)
        if pair[0].is_floating_point()
    ]
    averages, weights = map(list, zip(*pairs, strict=True))

    def train(images, mask):
        with torch.autocast(device, half):
            loss = objective(images, mask)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            torch._foreach_lerp_(averages, weights, 0.05)
        return loss, norm

    images, masks = shapes(64 if smoke else 512, size, device)
    images = images.contiguous(memory_format=torch.channels_last)

    def batch(_):
        chosen = torch.randint(len(images), (batch_size,), device=device)
        return images[chosen], masks[chosen]

    def before(i):
        set_rate(optimizer.param_groups[0], RATE * (1 - i / steps) ** 0.9)

    @torch.no_grad()
    def report():
        right = (average.eval()(images[:16]).argmax(1) == masks[:16]).float().mean()
        return f"(the averaged weights label {right:.1%} of the pixels rightly)"

    return Loop(train, batch, before, steps, report)


if __name__ == "__main__":
    main(build, __doc__)
