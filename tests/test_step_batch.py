"""Where a captured step finds its batch: python/braze/step/places.py."""

import pytest
import torch

import braze
from conftest import cuda_only
from fake_cuda import FakeCuda
from step_common import assert_same, entries, loss_fn, plain_loop

pytestmark = pytest.mark.usefixtures("deterministic")  # which have torch fill new memory


class Reads(torch.nn.Module):
    """A convolution, and what else reads or writes its input."""

    def __init__(self, how):
        super().__init__()
        self.how, self.conv = how, braze.nn.Conv2d(3, 8, 3, padding=1)
        self.last = braze.nn.Linear(8 * 36, 5)
        self.seen = None

    def forward(self, x):
        if self.how == "written":
            x.mul_(0.5)
        if self.how == "kept":
            self.seen = x[1:]
        y = self.convolved(x)
        if self.how == "twice":
            y = y + self.convolved(x)
        if self.how == "read":
            y = y + x.mean()
        if self.how == "later":
            y = y.relu() + x[:, :1].bfloat16()
        return braze.nn.functional.linear(y.flatten(1), self.last.weight, self.last.bias)

    def convolved(self, x):  # by the function: on a fake GPU layers give way to torch's
        return braze.nn.functional.conv2d(x, self.conv.weight, self.conv.bias, padding=1)


def reader(how, device):
    torch.manual_seed(0)
    return Reads(how).to(device)


def images(device, channels_last):
    generator = torch.Generator().manual_seed(1)
    data = []
    for _ in range(6):
        x = torch.randn(4, 3, 6, 6, generator=generator).to(device)
        x = x.to(memory_format=torch.channels_last) if channels_last else x
        data.append((x, torch.randint(5, (4,), generator=generator).to(device)))
    return data


def check_reader(how, channels_last, device):
    data = images(device, channels_last)
    before = [x.clone() for x, _ in data]
    plain, model = reader(how, device), reader(how, device)
    optimizer = braze.optim.SGD(plain.parameters(), lr=0.1)
    copies = [(x.clone(), y) for x, y in data]
    expected = plain_loop(plain, optimizer, copies, autocast=torch.bfloat16)
    optimizer = braze.optim.SGD(model.parameters(), lr=0.1)
    step = braze.TrainStep(model, loss_fn, optimizer, autocast=torch.bfloat16)
    losses = []
    for x, y in data:
        losses.append(step(x, y))
        assert how != "kept" or torch.equal(model.seen, x[1:])
    assert_same(model, losses, plain, expected)
    for (x, _), as_given in zip(data, before, strict=True):
        assert torch.equal(x, as_given)  # though the model writes to what it is given
    (entry,) = entries(step)
    dtype = torch.bfloat16 if how == "once" else torch.float32
    assert [t.dtype for t in entry.leaves] == [dtype, torch.int64]


HOW = pytest.mark.parametrize("how", ["once", "twice", "read", "later", "written", "kept"])
LAYOUT = pytest.mark.parametrize("channels_last", [False, True])


@HOW
@LAYOUT
@cuda_only
def test_a_batch_that_is_only_cast_has_no_copy(how, channels_last, device):
    check_reader(how, channels_last, device)


@HOW
@LAYOUT
def test_the_same_on_a_fake_gpu(how, channels_last):
    with FakeCuda():
        check_reader(how, channels_last, "cuda")


def mentioned(run, tensors):
    """Which of the tensors a graph of run() mentions."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
        return [torch.ops.braze.capture_mentions.default(t) for t in tensors]


@cuda_only
@pytest.mark.parametrize(
    "kind", ["add", "copy", "fill", "cat", "cast", "cuBLAS", "cuDNN", "TMA", "depthwise", "SGD"]
)
def test_what_a_capture_mentions(kind, device):
    def big(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, device=device, dtype=dtype)

    far = [torch.empty(4 << 20, device=device) for _ in range(2)]  # neighbours are mentioned, too
    x, z, w = big(512, 512), big(512, 512), big(512, 512)
    image, filters = big(4, 64, 16, 16), big(64, 64, 3, 3)
    single, own = big(64, 1, 3, 3), torch.nn.Parameter(big(512, 512, dtype=torch.float32))
    own.grad = big(512, 512, dtype=torch.float32)
    optimizer = braze.optim.SGD([own], lr=0.1)
    run, read = {
        "add": (lambda: x[3:5] + 1, x),
        "copy": (lambda: z.copy_(x), x),
        "fill": (lambda: x.zero_(), x),
        "cat": (lambda: torch.cat([z, x]), x),
        "cast": (lambda: x.float(), x),
        "cuBLAS": (lambda: z @ x, x),
        "cuDNN": (lambda: torch.nn.functional.conv2d(image, filters, padding=1), image),
        "TMA": (lambda: torch.ops.braze.matmul(x, w), x),
        "depthwise": (lambda: braze.nn.functional.conv2d(image, single, None, 1, 1, 1, 64), image),
        "SGD": (optimizer.step, own.grad),
    }[kind]
    assert mentioned(run, [read, *far]) == [True, False, False]


class First(torch.nn.Module):
    """Of an input that the backward pass does not need."""

    def __init__(self, keeps):
        super().__init__()
        self.keeps, self.seen = keeps, None

    def forward(self, x):
        if self.keeps:
            self.seen = x
        return x.unflatten(1, (16, -1)).mean(2)


@pytest.mark.usefixtures("deterministic")  # which have torch fill new memory
@pytest.mark.parametrize("keeps", [False, True])
@cuda_only
def test_a_batch_is_freed_behind_the_forward_pass(device, keeps):
    torch.manual_seed(0)
    data = [
        (torch.randn(4, 1 << 20, device=device), torch.randint(5, (4,), device=device))
        for _ in range(6)
    ]
    models = []
    for _ in range(2):
        torch.manual_seed(1)
        models.append(torch.nn.Sequential(First(keeps), braze.nn.Linear(16, 5)).to(device))
    plain, model = models
    expected = plain_loop(plain, braze.optim.SGD(plain.parameters(), lr=0.1), data)
    step = braze.TrainStep(model, loss_fn, braze.optim.SGD(model.parameters(), lr=0.1))
    before, losses = torch.cuda.memory_allocated(), []
    for x, y in data:
        losses.append(step(x, y))
        assert not keeps or torch.equal(model[0].seen, x)
    held = torch.cuda.memory_allocated() - before
    assert (held > 12 << 20) if keeps else (held < 8 << 20)  # a batch has 16 MiB
    assert_same(model, losses, plain, expected)
