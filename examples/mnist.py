"""Trains a small CNN on MNIST with braze: read this first.

    python examples/mnist.py

`python -m braze mnist` adds the comparison with stock PyTorch.

Only three things differ from a program for stock PyTorch: `nn` and `SGD` come from braze, and the
data set lives in device memory as a whole, so that the loop needs no DataLoader workers.
"""

import contextlib

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import braze
from braze.data import DeviceLoader, load_mnist


def make_model(nn):
    """The CNN, built from `braze.nn` or, line by line the same, from `torch.nn`."""
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


def training_step(model, loss_function, optimizer, images, labels, autocast):
    """Forward, backward, update, zero-grad. Returns the loss and the logits."""
    with autocast:
        logits = model(images)
        loss = loss_function(logits, labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), logits.detach()


def train(model, loss_function, optimizer, loader, epochs, autocast=None, label="training"):
    """Trains with a progress bar; returns the loss of every step."""
    autocast = autocast or contextlib.nullcontext()
    losses = []
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn(
            "epoch {task.fields[epoch]}, loss {task.fields[loss]}, accuracy {task.fields[acc]}"
        ),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    ) as progress:
        bar = progress.add_task(
            label, total=epochs * len(loader), epoch=f"1/{epochs}", loss="...", acc="..."
        )
        for epoch in range(epochs):
            for images, labels in loader:
                loss, logits = training_step(
                    model, loss_function, optimizer, images, labels, autocast
                )
                losses.append(loss)
                progress.advance(bar)
                # Reading the loss waits for the device, so not after every step.
                if len(losses) % 20 == 0:
                    accuracy = (logits.argmax(1) == labels).float().mean()
                    progress.update(
                        bar,
                        epoch=f"{epoch + 1}/{epochs}",
                        loss=f"{loss:.3f}",
                        acc=f"{accuracy:.1%}",
                    )
    return torch.stack(losses).tolist() if losses else []


@torch.no_grad()
def evaluate(model, loader, autocast=None):
    """The share of images classified correctly. The loader's batches have to be fixed: the model
    normalises by their statistics."""
    correct, count = 0, 0
    with autocast or contextlib.nullcontext():
        for images, labels in loader:
            correct += (model(images).argmax(1) == labels).sum()
            count += len(labels)
    return int(correct) / count


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    digits = load_mnist()
    model = make_model(braze.nn).to(device)
    optimizer = braze.optim.SGD(model.parameters(), lr=0.1)
    loader = make_loader(digits.train_images, digits.train_labels, 64, device, drop_last=True)
    train(model, braze.nn.CrossEntropyLoss(), optimizer, loader, epochs=4)
    test = make_loader(digits.test_images, digits.test_labels, 1000, device, shuffle=False)
    print(f"{evaluate(model, test):.2%} of {len(digits.test_labels)} test images are right")


if __name__ == "__main__":
    main()
