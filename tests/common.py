"""The tests' names for the tolerance rule and the checks built on it (braze/testing.py), and what
several of them share."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from braze.testing import DTYPES, assert_by_rule, check_against_stock, layouts
from conftest import require_cuda

__all__ = ["DTYPES", "assert_by_rule", "check_against_stock", "fuzzed", "layouts", "sum_ulps"]


def fuzzed(check):
    """Two tests that call check(data, device) with hypothesis' data: on the CPU, and on a GPU."""

    def on(device):
        @settings(max_examples=25, deadline=None)
        @given(data=st.data())
        def test(data):
            if device == "cuda":
                require_cuda()
            check(data, device)

        return test

    return on("cpu"), on("cuda")


def sum_ulps(dtype, *terms):
    """The floor for sums of so many products. The float64 reference of the rule is as rounded as
    the result: both err by a random walk of as many steps."""
    return 4 + max(terms) ** 0.5 if dtype == torch.float64 else 4
