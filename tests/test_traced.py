"""Which op stands in a traced graph: python/braze/_ops/_traced.py."""

import copy

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import braze


def network():
    """An op that writes to its arguments (batch norm's statistics), and some that do not."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Conv2d(8, 8, 3),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * 36, 5),
    )


def ops_in(graph):
    """Names of braze's ops in it, those that functionalisation has wrapped among them."""
    names = []
    for node in graph.nodes:
        of_node = (node.target, *node.args[:1]) if node.op == "call_function" else ()
        names += [str(t) for t in of_node if isinstance(t, torch._ops.OpOverload)]
    return [name for name in names if name.startswith("braze")]


@pytest.mark.parametrize("autocast", [False, True])
def test_compiled_graphs_have_ops_without_formulas(device, autocast):
    model = braze.convert(network().to(device))
    other, graphs = copy.deepcopy(model), []

    def compiler(module, _):
        graphs.append(ops_in(module.graph))
        return make_boxed_func(module.forward)

    x = torch.randn(2, 3, 8, 8, device=device)
    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=compiler), fullgraph=True)
    for run in (compiled, other):
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            result = run(x)
        result.float().square().sum().backward()
    assert len(graphs) == 2
    assert all(len(ops) >= 3 for ops in graphs)
    assert all(op.startswith("braze_kernels.") for ops in graphs for op in ops)
    for p, expected in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, expected.grad)
    assert torch.equal(model.state_dict()["1.num_batches_tracked"].cpu(), torch.tensor(1))
    torch.testing.assert_close(model.state_dict(), other.state_dict())


def test_other_graphs_can_be_differentiated(device):
    x = torch.randn(2, 3, 8, 8, device=device)
    weight = torch.randn(4, 3, 3, 3, device=device, requires_grad=True)
    graph = make_fx(torch.ops.braze.conv2d.default)(x, weight.detach())
    assert ops_in(graph.graph) == ["braze.conv2d.default"]
    graph(x, weight).sum().backward()
    (expected,) = torch.autograd.grad(torch.ops.braze.conv2d.default(x, weight).sum(), weight)
    torch.testing.assert_close(weight.grad, expected)

    torch.backends.cudnn.allow_tf32 = False  # a legacy flag that export reads: sets the newer ones
    exported = torch.export.export(braze.convert(network().to(device)), (x,))
    ops = ops_in(exported.graph)
    assert ops
    assert all(op.startswith("braze.") for op in ops)


def test_both_count_the_same(device):
    x, weight = torch.randn(2, 3, 8, 8, device=device), torch.randn(4, 3, 3, 3, device=device)
    counted = []
    for ops in (torch.ops.braze, torch.ops.braze_kernels):
        with FlopCounterMode(display=False) as counter:
            result = ops.conv2d.default(x, weight)
        counted.append((counter.get_total_flops(), result))
    assert counted[0][0] == counted[1][0] > 0
    torch.testing.assert_close(counted[0][1], counted[1][1], rtol=0, atol=0)


def test_without_a_formula_there_is_no_gradient(device):
    """The op is for graphs that run without: its result is a constant to autograd."""
    weight = torch.randn(4, 3, 3, 3, device=device, requires_grad=True)
    result = torch.ops.braze_kernels.conv2d.default(torch.randn(2, 3, 8, 8, device=device), weight)
    assert not result.requires_grad
