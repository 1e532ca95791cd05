"""The ops' Python side, a module per op. Importing them registers autograd and fake kernels."""

from braze import _lib

_lib.require()
