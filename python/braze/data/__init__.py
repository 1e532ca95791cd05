"""Data sets held whole in device memory: MNIST's files, and a loader that shuffles and gathers on
the device."""

from braze.data.loader import DeviceLoader
from braze.data.mnist import Digits, load_digits, load_mnist

__all__ = ["DeviceLoader", "Digits", "load_digits", "load_mnist"]
