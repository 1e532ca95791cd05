"""Large results of CPU ops ask the system for large pages (csrc/ops/huge_pages.h)."""

import re
from pathlib import Path

import pytest
import torch

import braze

SMAPS = Path("/proc/self/smaps")
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def flags_at(address):
    """The flags of the mapping that holds an address."""
    inside = False
    for line in SMAPS.read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"no mapping holds {address:#x}")


@pytest.mark.skipif(not (SMAPS.exists() and SETTING.exists()), reason="no transparent huge pages")
def test_large_results_ask_for_huge_pages():
    # More than the allocator serves from its heap, whose pages may have been asked for before.
    large = braze.nn.functional.relu(torch.randn(12 << 20))
    middle = large.data_ptr() + large.numel() * 2
    assert "hg" in flags_at(middle)


def test_results_around_the_limit_are_right():
    for elements in ((1 << 20) - 1, 1 << 20, (1 << 20) + 1, (1 << 21) + 3):
        x = torch.randn(elements)
        assert torch.equal(braze.nn.functional.relu(x), torch.relu(x))
