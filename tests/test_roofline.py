"""What the profile says an op cannot avoid, against figures worked out by hand."""

import pytest

pytest.importorskip("rich", reason="braze mnist needs rich")

from braze.mnist import roofline

N = 64
X1, W1, P1 = [N, 1, 28, 28], [32, 1, 3, 3], [N, 32, 14, 14]
W2, Y2, P2 = [64, 32, 3, 3], [N, 64, 14, 14], [N, 64, 7, 7]
FLOP2 = 2 * 9 * 32 * 64 * 14 * 14 * N  # of the second convolution


def numel(*shapes):
    total = 0
    for shape in shapes:
        product = 1
        for extent in shape:
            product *= extent
        total += product
    return total


@pytest.mark.parametrize(
    ("op", "shapes", "written", "flop"),
    [
        ("conv2d", [P1, W2], numel(Y2), FLOP2),
        ("conv2d_backward", [Y2, P1, W2], numel(P1, W2), 2 * FLOP2),
        ("conv_bn_relu_max_pool2d", [X1, W1], numel(P1) + numel(P1) / 8, 2 * 9 * 32 * 784 * N),
        ("conv_bn_relu2d", [P1, W2], numel(Y2, P2) + numel(P2) / 8, FLOP2),
        ("conv_bn_relu2d_backward", [P2, P1, W2, Y2], numel(P1, W2), 2 * FLOP2),
        ("linear", [[N, 3136], [128, 3136]], 128 * N, 2 * N * 3136 * 128),
        ("linear_relu", [[N, 3136], [128, 3136], [128]], 128 * N, 2 * N * 3136 * 128),
        (
            "linear_relu_linear",
            [[N, 784], [128, 784], [128], [10, 128], [10]],
            N * (128 + 10),
            2 * N * 128 * (784 + 10),
        ),
        (
            "linear_relu_backward",
            [[N, 128], [N, 128], [N, 3136], [128, 3136]],
            3136 * (N + 128),
            4 * N * 3136 * 128,
        ),
        ("relu_backward", [[N, 128], [N, 128]], 128 * N, 128 * N),
        ("transpose_copy", [[N, 49, 64]], N * 49 * 64, 0),
    ],
)
def test_work_of_an_op(op, shapes, written, flop):
    # The last argument is no tensor.
    found = roofline.cost(f"braze::{op}", [*shapes, []], [*["float"] * len(shapes), ""])
    assert found == (4 * (numel(*shapes) + written), flop)
    if "conv" in op:  # a code is half a byte for each window, whatever the images' dtype
        return
    half = roofline.cost(f"braze::{op}", shapes, ["c10::BFloat16"] * len(shapes))
    assert half == (2 * (numel(*shapes) + written), flop)


def test_unknown_ops_have_no_floor():
    assert roofline.cost("braze::something", [[2, 3]], ["float"]) is None
    assert roofline.cost("aten::copy_", [[2, 3]], ["float"]) is None
    assert roofline.floor(1, 1, {}, "fp32") is None


def test_the_floor_is_the_slower_of_memory_and_arithmetic():
    device = {"bandwidth": 4e12, "peak": {"fp32": 60e12, "tf32": 480e12, "bf16": 960e12}}
    assert roofline.floor(4e6, 1, device, "bf16") == pytest.approx(1e-6)
    assert roofline.floor(1, 960e6, device, "bf16") == pytest.approx(1e-6)
    assert roofline.floor(1, 160e6, device, "fp32") == pytest.approx(1e-6)  # three TF32 products
