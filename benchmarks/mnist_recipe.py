"""Compares recipes for ``python -m braze mnist --to-accuracy`` on the held-out images.

    python -m benchmarks.mnist_recipe --seeds 5

Trains without the last 10,000 training images and tests on those: the test images play no part in
the choice. The table goes, sorted by the least accuracy of all seeds, to the terminal.
"""

import argparse
import itertools
import statistics

import torch

from braze.data import load_mnist
from braze.mnist.accuracy import Recipe, Trainer, image_sets

#: images per step, passes over the 50,000 images
SIZES = [(128, 4), (256, 5), (256, 8), (512, 6), (512, 9), (512, 12), (1024, 12)]
#: peak learning rate at a batch of 512; it goes with the square root of the batch
RATES = [0.03, 0.05, 0.07]
WEIGHT_DECAYS = [0.0, 2e-3]


def recipes():
    for (batch, passes), rate, decay in itertools.product(SIZES, RATES, WEIGHT_DECAYS):
        steps = passes * 50_000 // batch
        lr = round(rate * (batch / 512) ** 0.5, 3)
        yield Recipe(batch, steps, lr, 0.9, steps // 6, decay)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default="bf16", choices=["fp32", "bf16"])
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    sets = image_sets(load_mnist(), held_out=True)
    results = []
    for recipe in recipes():
        trainer = Trainer(recipe, torch.device(args.device), args.precision, *sets)
        # Seeds other than those that the command trains with.
        runs = [trainer.run(1000 + seed) for seed in range(args.seeds)]
        accuracies = sorted(run["accuracy"] for run in runs)
        seconds = statistics.median(run["seconds"] for run in runs)
        results.append((accuracies[0], statistics.mean(accuracies), seconds, recipe))
        print(line(*results[-1]), flush=True)
    print("\nsorted:")
    for result in sorted(results, key=lambda result: result[0], reverse=True):
        print(line(*result))


def line(least, mean, seconds, recipe):
    return f"least {least:.2%}  mean {mean:.3%}  {seconds:.4f} s  {recipe}"


if __name__ == "__main__":
    main()
