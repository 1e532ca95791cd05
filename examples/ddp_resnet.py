"""Trains a ResNet on synthetic images in several processes, a GPU each (or a share of the CPU):

    torchrun --nproc-per-node 2 examples/ddp_resnet.py --depth 50 --batch 64
    torchrun --nproc-per-node 2 examples/ddp_resnet.py --depth 18 --image 32 --steps 8  # on a CPU

`--sync` normalises by the statistics of all processes' images. `--checkpoint FILE` goes on from
FILE where it exists, also with another number of processes, and writes it at the end.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import braze

LAYERS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}


class Block(nn.Module):
    """A residual block: two 3 x 3 convolutions, or a bottleneck between two 1 x 1."""

    def __init__(self, channels, width, stride, bottleneck):
        super().__init__()
        out = 4 * width if bottleneck else width
        if bottleneck:  # (filters, kernel, stride)
            shapes = (width, 1, 1), (width, 3, stride), (out, 1, 1)
        else:
            shapes = (width, 3, stride), (width, 3, 1)
        layers = []
        previous = channels
        for filters, kernel, by in shapes:
            layers.append(nn.Conv2d(previous, filters, kernel, by, kernel // 2, bias=False))
            layers += nn.BatchNorm2d(filters), nn.ReLU()
            previous = filters
        self.body = nn.Sequential(*layers[:-2])
        self.norm, self.relu = layers[-2:]
        self.shortcut = nn.Identity()
        if stride > 1 or channels != out:
            projection = nn.Conv2d(channels, out, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(out))

    def forward(self, x):
        y = self.norm(self.body(x))
        y += self.shortcut(x)
        return self.relu(y)


def resnet(depth, classes=1000):
    """He et al., "Deep residual learning for image recognition" (2015)."""
    stem = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()
    layers, channels = [*stem, nn.MaxPool2d(3, 2, 1)], 64
    for stage, count in enumerate(LAYERS[depth]):
        for number in range(count):
            stride = 2 if stage > 0 and number == 0 else 1
            layers.append(Block(channels, 64 << stage, stride, depth >= 50))
            channels = (64 << stage) * (4 if depth >= 50 else 1)
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)
    )


def synthetic(count, image):
    """The same in every process: images whose brightness tells their label, one of ten."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (count,), generator=generator)
    noise = torch.randint(64, (count, 3, image, image), generator=generator)
    return (noise + 20 * labels.view(-1, 1, 1, 1)).to(torch.uint8), labels


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depth", type=int, choices=LAYERS, default=50)
    parser.add_argument("--batch", type=int, default=64, help="images of one process")
    parser.add_argument("--image", type=int, default=224, help="height and width")
    parser.add_argument("--images", type=int, default=256, help="of all processes")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--sync", action="store_true", help="statistics of all processes")
    parser.add_argument("--checkpoint", type=Path)
    args = parser.parse_args()

    cuda, rank = torch.cuda.is_available(), int(os.environ["RANK"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    ranks = dist.get_world_size()

    torch.manual_seed(0)
    model = resnet(args.depth).to(device, memory_format=torch.channels_last)
    if ranks > 1:
        ids = [device.index] if cuda else None
        model = nn.parallel.DistributedDataParallel(model, device_ids=ids)
    if args.sync:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    braze.convert(model)
    optimizer = braze.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    loader = braze.data.DeviceLoader(
        *synthetic(args.images, args.image), args.batch, drop_last=True, device=device,
        mean=0.5, std=0.25,
        dtype=torch.bfloat16 if cuda else torch.float32, memory_format=torch.channels_last,
        num_replicas=ranks, rank=rank,
    )  # fmt: skip
    if not len(loader):
        parser.error(f"--batch {args.batch}: the images are too few for {ranks} processes")
    loss_fn = braze.nn.CrossEntropyLoss(label_smoothing=0.1)
    step = braze.TrainStep(
        model, loss_fn, optimizer, autocast=torch.bfloat16 if cuda else None
    ).bind(loader)
    if args.checkpoint and args.checkpoint.exists():
        step.load_state_dict(torch.load(args.checkpoint, map_location=device))

    warm_up, losses = min(20, args.steps // 2), []
    while len(losses) < args.steps:
        for loss in step.epoch():
            losses.append(loss)
            if len(losses) == warm_up:
                loss.item()  # waits for the GPU
                start = time.perf_counter()
            if len(losses) == args.steps:
                break
    last = losses[-1].item()
    seconds = (time.perf_counter() - start) / (args.steps - warm_up)
    if rank == 0:
        print(f"{args.steps} steps of {ranks} x {args.batch} images each")
        print(f"loss {losses[0].item():.3f} -> {last:.3f}")
        print(f"{1e3 * seconds:.2f} ms a step, {ranks * args.batch / seconds:,.0f} images/s")
        if args.checkpoint:
            torch.save(step.state_dict(), args.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
