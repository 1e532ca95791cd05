"""Trains a small CNN on MNIST with braze: read this first.

    python examples/mnist.py

`python -m braze mnist` adds the comparison with stock PyTorch.

The model is built from torch.nn as ever. `braze.convert` puts it on braze's kernels, the data set
lives in device memory as a whole, and `braze.TrainStep` is the body of the loop: on a GPU the whole
step, from the batch load to the update, is one CUDA graph.
"""

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import braze
from braze.data import DeviceLoader, load_mnist


def make_model(nn=torch.nn):
    """The CNN, built from `torch.nn` or, line by line the same, from `braze.nn`."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        # Normalises by each batch's own statistics, in training and in evaluation.
        nn.BatchNorm2d(32, track_running_stats=False),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64, track_running_stats=False),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


MEAN, STD = 0.1307, 0.3081  # of MNIST's training pixels, from 0 to 1


def make_loader(images, labels, batch_size, device, **options):
    """Batches of normalised images."""
    return DeviceLoader(images, labels, batch_size, device=device, mean=MEAN, std=STD, **options)


class CountingLoss:
    """Cross-entropy that counts, on the device, how many images the model gets right."""

    def __init__(self, cross_entropy, device):
        self.cross_entropy = cross_entropy
        self.correct = torch.zeros((), dtype=torch.int64, device=device)

    def __call__(self, logits, labels):
        self.correct += (logits.argmax(1) == labels).sum()
        return self.cross_entropy(logits, labels)


def train(step, loss_function, loader, epochs, label="training"):
    """Trains with a progress bar; returns the loss of every step.

    `step.epoch()` yields the loss of each step of an epoch; `loader` has full batches only.
    """
    losses, correct = [], 0
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn(
            "epoch {task.fields[at]}, loss {task.fields[loss]}, accuracy {task.fields[acc]}"
        ),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    ) as progress:
        total = epochs * len(loader)
        bar = progress.add_task(label, total=total, at=f"1/{epochs}", loss="...", acc="...")
        for epoch in range(1, epochs + 1):
            for loss in step.epoch():
                losses.append(loss)
                progress.advance(bar)
                # Reading the loss waits for the device, so not after every step.
                if len(losses) % 20 == 0:
                    before, correct = correct, int(loss_function.correct)
                    share = (correct - before) / (20 * loader.batch_size)
                    shown = {"loss": f"{loss:.3f}", "acc": f"{share:.1%}"}
                    progress.update(bar, at=f"{epoch}/{epochs}", **shown)
    return torch.stack(losses).tolist() if losses else []


@torch.no_grad()
def evaluate(model, loader):
    """The share of images classified correctly. The loader's batches have to be fixed: the model
    normalises by their statistics."""
    correct = sum((model(images).argmax(1) == labels).sum() for images, labels in loader)
    return int(correct) / len(loader.labels)


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    digits = load_mnist()
    layout = {"memory_format": torch.channels_last}  # the faster one for convolutions
    model = braze.convert(make_model().to(device, **layout))
    loss_function = CountingLoss(braze.nn.functional.cross_entropy, device)
    optimizer = braze.optim.SGD(model.parameters(), lr=0.1)
    images, labels = digits.train_images, digits.train_labels
    loader = make_loader(images, labels, 64, device, drop_last=True, **layout)
    step = braze.TrainStep(model, loss_function, optimizer).bind(loader)
    train(step, loss_function, loader, epochs=4)
    images, labels = digits.test_images, digits.test_labels
    test = make_loader(images, labels, 1000, device, shuffle=False, **layout)
    print(f"{evaluate(model, test):.2%} of {len(labels)} test images are right")


if __name__ == "__main__":
    main()
