"""A learning-rate sweep: many models trained side by side, in one step.

    python examples/population.py --members 16 --epochs 4
    python examples/population.py --digits --members 4 --epochs 2   # small, for a CPU

`braze.Population` holds models of one architecture, each with weights, dropout, learning rate,
schedule and order of the images of its own. On a GPU a step of all of them is one CUDA graph; each
member's numbers are those of its training alone.
"""

import argparse
import copy

import torch

import braze
from braze.data import DeviceLoader, load_digits, load_mnist


def make_model():
    nn = torch.nn
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(32 * 7 * 7, 10),
    )


def make_loaders(digits, members, batch_size, device):
    """Loaders that share the data set, each with an order of its own."""
    images, labels = digits.train_images, digits.train_labels
    first = DeviceLoader(images, labels, batch_size, device=device, mean=0.1307, std=0.3081)
    loaders = [first, *(copy.copy(first) for _ in range(1, members))]
    for seed, loader in enumerate(loaders):
        loader.restart(seed)
    return loaders


@torch.no_grad()
def accuracies(population, digits, device):
    """Each member's share of test images that are right."""
    images, labels = digits.test_images, digits.test_labels
    test = DeviceLoader(images, labels, 1000, device=device, mean=0.1307, std=0.3081, shuffle=False)
    population.eval()
    right = torch.zeros(len(population), dtype=torch.int64, device=device)
    for x, y in test:
        right += torch.stack([(model(x).argmax(1) == y).sum() for model in population])
    population.train()
    return (right / len(labels)).tolist()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--digits", action="store_true", help="scikit-learn's 1,797 digits")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    digits = load_digits() if args.digits else load_mnist()

    seeds = range(args.members)
    population = braze.Population(lambda: make_model().to(device), args.members, seeds).convert()
    rates = torch.logspace(-3, 0, args.members).tolist()
    optimizers = [
        braze.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
        for model, rate in zip(population, rates, strict=True)
    ]
    schedulers = [
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
        for optimizer in optimizers
    ]
    autocast = torch.bfloat16 if device == "cuda" else None
    step = population.train_step(braze.nn.CrossEntropyLoss(), optimizers, autocast=autocast)
    step.bind(make_loaders(digits, args.members, args.batch, device))
    for _ in range(args.epochs):
        losses = torch.stack(list(step.epoch())).mean(0)
        for scheduler in schedulers:
            scheduler.step()
    found = accuracies(population, digits, device)
    for rate, loss, accuracy in zip(rates, losses.tolist(), found, strict=True):
        print(f"lr {rate:<8.4g} loss {loss:<8.4f} accuracy {accuracy:.2%}")
    best = max(range(args.members), key=found.__getitem__)
    print(f"best: member {best}, lr {rates[best]:.4g}")


if __name__ == "__main__":
    main()
