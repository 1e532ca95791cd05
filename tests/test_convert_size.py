"""Converting code of any size: the work grows with the length, and what is nested too deeply for
Python's own recursion stays as it is."""

import copy
import importlib.util
import sys
import textwrap

import pytest
import torch
from convert_common import assert_same, call
from torch import nn

import braze

HEAD = """
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.bn, self.fc, self.act = nn.BatchNorm2d(2), nn.Linear(3, 3), nn.ReLU()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.ReLU()][i % 2] for i in range(2 * n))
        self.pairs = nn.ModuleList(nn.Identity() for i in range(n))

    def helper(self, x):
        return self.act(self.fc(x))

    def forward(self, x):
"""


def make(tmp_path, body, n, name="net", methods=""):
    path = tmp_path / f"{name}.py"
    code = HEAD + textwrap.indent(body, " " * 8) + "\n        return x\n"
    path.write_text(code + textwrap.indent(methods, " " * 4))
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Net(n)


LONG = {
    "statements that continue": lambda n: "x = self.fc(x)\n" * n,
    "runs": lambda n: "x = self.fc(x)\nx = self.act(x)\n" * n,
    "runs in one expression": lambda n: "x = F.relu(self.fc(x))\n" * n,
    "other statements": lambda n: "y = x + 1\nz = x * y\n" * n,
    "additions": lambda n: "x = F.relu(self.bn(x) + x)\n" * n,
    "ifs in between": lambda n: "y = self.bn(x)\n" + "if self.act is None:\n    z = x\n" * n,
    "a sum": lambda n: "x = (" + " + ".join(["x"] * (n // 2)) + ")\n",
    "calls of a method": lambda n: "x = self.helper(x)\n" * n,
    "children by index": lambda n: "".join(
        f"x = self.layers[{2 * i}](x)\nx = self.layers[{2 * i + 1}](x)\n" for i in range(n)
    ),
    "children by variable": lambda n: "for i in range(3):\n    x = self.layers[i](x)\n" * n,
    "a loop over children": lambda n: "for layer in self.layers:\n    x = layer(x)\n",
    "nothing, of many children": lambda n: "x = F.relu(x)\n",
}


def steps(function):
    """How many functions a call runs, Python's and C's: its work, whatever the machine does."""
    count = 0

    def counted(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("name", LONG)
def test_the_work_grows_with_the_length(tmp_path, name):
    counts = []
    for n in (10, 50, 100, 200):  # the first one fills caches
        model = make(tmp_path, LONG[name](n), n, f"net{n}")
        counts.append(steps(lambda model=model: braze.convert_report(model)))
    first, second = counts[2] - counts[1], counts[3] - counts[2]
    assert second <= 2.2 * first + 200  # of a square it is four times the first


def test_the_count_sees_a_square():
    """The comparison above rejects work that grows with the square."""

    def square(n):
        return [abs(i) for i in range(n) for _ in range(n)]

    counts = [steps(lambda n=n: square(n)) for n in (50, 100, 200)]
    assert counts[2] - counts[1] > 2.2 * (counts[1] - counts[0]) + 200


@pytest.mark.parametrize("others", [False, True])
def test_the_work_of_a_loop_over_many_children(others):
    counts = []
    for n in (50, 100, 200):
        layers = []
        for _ in range(n):
            layers += [nn.Linear(3, 3), nn.ReLU(), *([nn.Identity()] * others)]
        model = braze.convert(nn.Sequential(*layers))
        x = torch.randn(2, 3)
        for _ in range(2):  # runs are recorded when they come for the second time
            model(x)
        counts.append(steps(lambda model=model, x=x: model(x)))
    assert counts[2] - counts[1] <= 2.2 * (counts[1] - counts[0])


DEEP = {
    "a sum": "x = (" + " + ".join(["x"] * 1500) + ") * 0.001\n",
    "ifs": "if x is None:\n    pass\n" + "elif self.training is None:\n    pass\n" * 1500,
    "attributes": "y = x" + ".data" * 1500 + "\n",
}


@pytest.mark.parametrize("name", DEEP)
def test_code_that_is_nested_deeply(tmp_path, name):
    try:
        original = make(tmp_path, DEEP[name] + "x = self.act(self.fc(x))\n", 1)
    except (MemoryError, RecursionError):
        return  # Python itself does not take it
    model = copy.deepcopy(original)
    kind, state = type(model), copy.deepcopy(model.state_dict())
    report = braze.convert_report(model)
    assert type(model) is kind
    assert type(model.fc) is nn.Linear
    with pytest.raises(RuntimeError, match="left alone"):
        braze.convert(copy.deepcopy(model), strict=True)
    reasons = [e.reason for e in report.left_alone if e.before == "Net.forward"]
    assert reasons == ["its code is nested too deeply"]
    braze.convert(model)
    assert type(model) is kind
    assert type(model.fc) is braze.nn.Linear
    assert_same(dict(model.state_dict()), dict(state))
    x = torch.randn(2, 3)
    assert_same(call(model, x), call(original, x))


def test_helpers_of_helpers(tmp_path):
    """Each calls the next one twice: as many calls as two to the power of their number."""
    counts = []
    for n in (2, 4, 8, 16):  # the first one fills caches
        methods = "".join(
            f"def f{i}(self, x):\n    return self.f{i + 1}(self.f{i + 1}(x))\n" for i in range(n)
        )
        methods += f"def f{n}(self, x):\n    return F.relu(x)\n"
        model = make(tmp_path, "x = self.f0(x)\n", n, f"helpers{n}", methods)
        counts.append(steps(lambda model=model: braze.convert_report(model)))
    assert counts[3] - counts[2] <= 2.2 * (counts[2] - counts[1]) + 200
