"""braze.tune for convolutions: what is recorded, measured, chosen and kept."""

import json
import os

import pytest
import torch

import braze
import braze.nn.functional as F
from braze import _tuned, _tuning_conv2d, tuning
from braze.__main__ import main
from braze._problems import PASSES, Convolution
from common import assert_by_rule, cuda_kernels_of, hopper_only
from tune_common import PRODUCT, index_of, place, timed

pytestmark = pytest.mark.usefixtures("empty_tables")

# A kernel that both devices have and that neither would choose for these tensors; it adds in an
# order of its own, so that the bits of a long sum show that it ran.
OTHER = "direct"
X, W = (3, 40, 9, 11), (24, 40, 3, 3)
FPROP = Convolution("float32", "fprop", 3, 40, 9, 11, 24, 3, 3, pad_h=1, pad_w=1)


def of(device, layout="contiguous", dtype=torch.float32):
    """Input, filters and the gradient of the result."""
    form = torch.channels_last if layout == "channels_last" else torch.contiguous_format
    return [
        torch.randn(shape, device=device).to(dtype, memory_format=form)
        for shape in (X, W, (3, 24, 9, 11))
    ]


def passes_of(function, *args):
    return [problem for _, problem in tuning.products_of(function, *args)]


def results(x, w, dy, backend="auto", tf32=False, deterministic=False):
    """Of the three passes."""
    where, settings = ([1, 1], [1, 1], [1, 1], 1), (tf32, deterministic, backend)
    y = torch.ops.braze.conv2d(x, w, None, *where, *settings)
    dx, dw, _ = torch.ops.braze.conv2d_backward(dy, x, w, *where, [True, True, False], *settings)
    return [y, dx, dw]


def same(results, others):
    return [torch.equal(a, b) for a, b in zip(results, others, strict=True)]


# --- recording ---


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_recorded_passes(device, layout):
    x, w, _ = (t.requires_grad_() for t in of(device, layout))
    bias = torch.randn(24, device=device, requires_grad=True)

    def step():
        for _ in range(2):
            F.conv2d(x, w, bias, padding=1).sum().backward()

    expected = FPROP._replace(channels_last=layout == "channels_last")
    assert tuning.products_of(step) == [
        (x.device, expected._replace(bias=True)),
        (x.device, expected._replace(pass_name="dgrad")),
        (x.device, expected._replace(pass_name="wgrad")),
    ]
    assert passes_of(F.conv2d, x.detach(), w.detach(), None, 2, (1, 0), 1) == [
        expected._replace(stride_h=2, stride_w=2, pad_w=0)
    ]
    half = x.detach().bfloat16()[:, :8], w.detach().bfloat16()[:8, :2]
    dense = [t.contiguous(memory_format=torch.channels_last) for t in half]
    (found,) = passes_of(F.conv2d, *dense, None, 1, 0, 2, 4)
    assert found == Convolution(
        *("bfloat16", "fprop", 3, 8, 9, 11, 8, 3, 3, 1, 1, 0, 0, 2, 2, 4), channels_last=True
    )


def test_a_block_is_recorded_unless_it_leaves_moments(device):
    """Its convolution; on a GPU a kernel that leaves batch norm's moments is not for tuning."""
    x, w, _ = of(device, "channels_last")
    norm = [torch.zeros(24, device=device), torch.ones(24, device=device)]
    asked = passes_of(
        lambda: F.conv_bn_relu2d(x, w, None, *norm, training=True, padding=1)  # 40 channels
    )
    expected = FPROP._replace(channels_last=True)
    assert asked in ([expected], []) if device == "cuda" else asked == [expected]


def test_what_is_not_recorded(device):
    x, w, _ = of(device)
    assert passes_of(F.conv2d, x[:0], w) == []
    assert passes_of(F.conv2d, x[:, :, ::2], w) == []  # gaps
    odd = torch.randn(x.numel() + 1, device=device)[1:].view(X)
    assert passes_of(F.conv2d, odd, w) == []
    with braze.backend(conv2d="braze"):
        assert passes_of(F.conv2d, x, w) == []
    F.conv2d(x, w)
    assert passes_of(lambda: None) == []


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_a_transposed_convolution_is_recorded_as_the_passes_it_is(device, layout):
    _, w, y = (t.requires_grad_() for t in of(device, layout))
    bias = torch.randn(40, device=device, requires_grad=True)
    expected = FPROP._replace(channels_last=layout == "channels_last")
    assert passes_of(lambda: F.conv_transpose2d(y, w, bias, 1, 1).sum().backward()) == [
        expected._replace(pass_name=name) for name in ("dgrad", "fprop", "wgrad")
    ]
    # A convolution of the result's size would have a row and a column more.
    assert passes_of(F.conv_transpose2d, y, w, None, 1, 1, 1, 1, 2) == []


def test_tf32_is_a_precision_of_its_own(device):
    x, w, _ = of(device)
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    dtype = "float32" if device == "cpu" else "tf32"
    assert passes_of(F.conv2d, x, w, None, 1, 1) == [FPROP._replace(dtype=dtype)]


@pytest.mark.parametrize(
    "problem",
    [
        FPROP,
        FPROP._replace(bias=True, stride_h=2, channels_last=True),
        FPROP._replace(c=1, k=1),
        FPROP._replace(c=1, channels_last=True),
        FPROP._replace(h=1, w=1, r=1, s=1, pad_h=0, pad_w=0),
        FPROP._replace(groups=4, dilation_w=2, dtype="bfloat16"),
        FPROP._replace(n=1, c=24, groups=24, channels_last=True, dtype="float16"),
        FPROP._replace(dtype="float64", r=2, s=5, pad_h=0),
    ],
    ids=str,
)
def test_operands_ask_for_the_pass_that_they_are_for(device, problem):
    for pass_name in PASSES:
        p = problem._replace(pass_name=pass_name, bias=problem.bias and pass_name == "fprop")
        tensors = tuning.operands(p, torch.device(device))
        assert passes_of(tuning.bound(p, tensors), "auto") == [p]
        assert Convolution.from_words(p.words(3)) == (3, p)
        actual = tuning.bound(p, tensors)("auto")
        reference = tuning._reference(p, tensors)
        terms = p.n * p.c * p.k * p.h * p.w * p.r * p.s
        stock = torch.empty_like(actual).copy_(reference)
        assert_by_rule(actual, stock, reference, ulps=16, terms=terms, what=str(p))


def test_a_pass_in_words():
    assert str(FPROP) == "fprop 3x40x9x11 to 24, 3x3/1 pad 1 contiguous"
    other = FPROP._replace(pad_w=0, dilation_h=2, groups=4, channels_last=True, bias=True)
    assert str(other).endswith("3x3/1 pad 1,0 dilation 2,1 groups 4 channels_last bias")


# --- choosing ---


def test_a_choice_takes_effect_for_its_pass_alone(device):
    if device == "cuda":
        hopper_only(device)  # elsewhere what auto takes is OTHER already
    tensors = of(device)
    present, other = results(*tensors), results(*tensors, OTHER)
    assert same(present, other) == [False] * 3
    for i, pass_name in enumerate(PASSES):
        _tuned.forget()
        _tuned.put(index_of(device), FPROP._replace(pass_name=pass_name), OTHER, True)
        unchanged = same(results(*tensors), present)
        assert not unchanged[i]
        # On Hopper the two gradients share what is transposed for one of them.
        if device == "cpu" or i == 0:
            assert unchanged == [i != j for j in range(3)]
        assert same(results(*tensors, "braze"), other)[i] is False  # by name nothing changes
        last = of(device, "channels_last")
        assert not torch.equal(results(*last)[i], results(*last, OTHER)[i])
    x, w, _ = tensors
    bias = torch.randn(24, device=device)
    _tuned.put(index_of(device), FPROP, OTHER, True)
    with braze.backend(conv2d=OTHER):
        wanted = F.conv2d(x, w, bias, padding=1)
    assert not torch.equal(F.conv2d(x, w, bias, padding=1), wanted)
    _tuned.put(index_of(device), FPROP._replace(bias=True), OTHER, True)
    assert torch.equal(F.conv2d(x, w, bias, padding=1), wanted)
    _tuned.forget()
    assert same(results(*tensors), present) == [True] * 3


@pytest.mark.parametrize("choice", ["depthwise", "cudnn:99", "no_such_kernel", "braze", "auto", ""])
def test_a_choice_that_is_refused_leaves_it_to_the_rules(device, choice):
    tensors = of(device)

    def what_runs():
        # (The vendor's input gradients may add in any order.)
        if device == "cuda":
            return sorted(cuda_kernels_of(lambda: results(*tensors)).split())
        return [result.tolist() for result in results(*tensors)]

    if device == "cuda":
        results(*tensors, "cudnn")  # asked for the first time, it sets memory
    present = what_runs()
    for pass_name in PASSES:
        _tuned.put(index_of(device), FPROP._replace(pass_name=pass_name), choice, True)
    assert what_runs() == present


def test_deterministic_ignores_measured_choices(device):
    tensors = of(device)
    other = results(*tensors, OTHER, deterministic=True)
    present = results(*tensors, deterministic=True)
    _tuned.put(index_of(device), FPROP, OTHER, True)
    assert torch.equal(results(*tensors)[0], other[0])
    assert torch.equal(results(*tensors, deterministic=True)[0], present[0])
    _tuned.forget()
    _tuned.put(index_of(device), FPROP, OTHER, False)  # built in
    assert torch.equal(results(*tensors, deterministic=True)[0], other[0])


def test_the_gradients_of_a_layer_follow(device):
    x, w, dy = of(device)
    _tuned.put(index_of(device), FPROP._replace(pass_name="wgrad"), OTHER, True)
    conv = braze.nn.Conv2d(40, 24, 3, padding=1, bias=False, device=device)
    with torch.no_grad():
        conv.weight.copy_(w)
    conv(x).backward(dy)
    assert torch.equal(conv.weight.grad, results(x, w, dy, OTHER)[2])


# --- measuring ---


def test_tune_replaces_a_slow_choice(device):
    """All for real: the plain loops are many times slower than the kernel that wins."""
    x, w, _ = of(device)
    good = "implicit_gemm" if device == "cpu" else "implicit_gemm_simt"
    _tuned.put(index_of(device), FPROP, OTHER, True)
    if device == "cuda":  # there it is not that slow
        large = FPROP._replace(n=64, h=56, w=56)
        _tuned.put(index_of(device), large, OTHER, True)
        x = torch.randn(64, 40, 56, 56, device=device)
    (result,) = braze.tune(F.conv2d, x, w, None, 1, 1, candidates=[good], seconds=0.2)
    assert (result.device.type, result.choice) == (device, good)
    assert result.after < result.before / 1.5
    with braze.backend(conv2d=good):
        expected = F.conv2d(x, w, None, 1, 1)
    assert torch.equal(F.conv2d(x, w, None, 1, 1), expected)
    here = place(device)
    assert _tuned.read(here.user_file(), here) == {
        result.product: {
            "choice": good,
            "us": [round(result.before, 2), round(result.after, 2)],
        }
    }


def test_default_candidates(device, monkeypatch):
    seen = timed(monkeypatch, {"auto": 10})
    x, w, _ = of(device)
    (result,) = braze.tune(F.conv2d, x, w, None, 1, 1)
    assert result.choice == "auto"
    if device == "cpu":
        assert seen == ["auto", "implicit_gemm", "winograd", "blocked_im2col", "fft", "torch"]
    elif not braze._lib.cuda_library.vendor()["cudnn"]["missing"]:
        assert {"implicit_gemm_simt", "cudnn:0"} <= set(seen)


def test_products_and_convolutions_of_one_program(device, monkeypatch):
    seen = timed(monkeypatch, {"auto": 10, "01_naive": 1, OTHER: 1})
    x, w, _ = of(device)
    a, b = torch.randn(16, 3000, device=device), torch.randn(3000, 16, device=device)

    def both():
        F.conv2d(x, w, padding=1)
        braze.matmul(a, b)

    found = braze.tune(both, candidates=["01_naive", OTHER])
    assert [(result.product, result.choice) for result in found] == [
        (PRODUCT, "01_naive"),
        (FPROP, OTHER),
    ]
    assert seen == ["auto", "01_naive", "auto", OTHER]
    assert [entry[1:] for entry in _tuned.entries()] == [
        (PRODUCT, "01_naive", True),
        (FPROP, OTHER, True),
    ]
    _tuned.forget()
    _tuned.load(index_of(device))
    assert len(_tuned.entries()) == 2
    assert braze.info()["tuned"]["measured"] == 2


@pytest.mark.parametrize("fault", ["nan", "a channel is missing"])
def test_a_wrong_kernel_is_rejected(device, monkeypatch, fault):
    bound = _tuning_conv2d.bound

    def wrong(problem, tensors):
        run = bound(problem, tensors)
        if fault == "nan":
            return lambda name: run(name) * (float("nan") if name == OTHER else 1)
        short = [t if t is None else t.clone() for t in tensors]
        short[0][:, -1] = 0
        return lambda name: (bound(problem, short) if name == OTHER else run)(name)

    timed(monkeypatch, {"auto": 10, OTHER: 1})
    x, w, _ = of(device)
    tune = lambda: braze.tune(F.conv2d, x, w, None, 1, 1, candidates=[OTHER], save=False)  # noqa: E731
    assert tune()[0].choice == OTHER
    _tuned.forget()
    monkeypatch.setattr(_tuning_conv2d, "bound", wrong)
    assert tune()[0].choice == "auto"


def test_a_kernel_that_is_far_behind_is_not_timed(device, monkeypatch):
    seen = timed(monkeypatch, {"auto": 10, OTHER: 1})
    monkeypatch.setattr(tuning, "_SETUP_SECONDS", -1e9)
    x, w, _ = of(device)
    braze.tune(F.conv2d, x, w, None, 1, 1, candidates=[OTHER], save=False)
    assert seen == ["auto"]


# --- files ---


def test_files_of_products_alone_are_what_they_were(device):
    here = place(device)
    _tuned.write(here.user_file(), here, {PRODUCT: {"choice": "01_naive"}})
    content = json.loads(here.user_file().read_text())
    assert set(content) == {"format", "device", "library", "braze", "products"}
    _tuned.write(here.user_file(), here, {FPROP: {"choice": OTHER}})
    assert _tuned.read(here.user_file(), here) == {
        PRODUCT: {"choice": "01_naive"},
        FPROP: {"choice": OTHER},
    }
    _tuned.write(here.user_file(), here, {FPROP: None})
    assert json.loads(here.user_file().read_text()) == content


def damaged(content):
    (row,) = content["convolutions"]
    wrong = [{"n": "3"}, {"n": 0}, {"stride_h": 0}, {"pad_h": -1}, {"pad_h": 1.5}, {"bias": 0}]
    wrong += [{"dtype": "int8"}, {"pass_name": "forward"}, {"choice": 3}, {"k": 1 << 63}]
    for cells in wrong:
        yield content | {"convolutions": [row, row | cells]}
    yield content | {"convolutions": 3}
    yield content | {"convolutions": [{"choice": OTHER}]}
    yield content | {"cudnn": 3}
    yield {key: value for key, value in content.items() if key != "cudnn"}


def test_a_damaged_file_is_ignored(device):
    here = place(device)
    path = here.user_file()
    _tuned.write(path, here, {FPROP: {"choice": OTHER}, PRODUCT: {"choice": "01_naive"}})
    content = json.loads(path.read_text())
    for wrong in damaged(content):
        path.write_text(json.dumps(wrong))
        with pytest.warns(UserWarning, match="ignores the tuned choices in") as caught:
            _tuned.load(index_of(device))
        assert os.fspath(path) in str(caught[0].message)
        assert _tuned.entries() == []
    path.write_text(json.dumps(content))
    _tuned.load(index_of(device))
    assert len(_tuned.entries()) == 2


def test_another_cudnn_numbers_its_engines_otherwise(device):
    here = place(device)
    other = FPROP._replace(n=7)
    rows = {PRODUCT: {"choice": "01_naive"}, FPROP: {"choice": "cudnn:3"}, other: {"choice": OTHER}}
    _tuned.write(here.user_file(), here._replace(cudnn="1.2.3"), rows)
    _tuned.load(index_of(device))
    assert [entry[1] for entry in _tuned.entries()] == [PRODUCT]
    here.user_file().unlink()
    _tuned.write(_tuned.BUILT_IN / f"{here.slug()}.json", here._replace(cudnn="1.2.3"), rows)
    _tuned.forget()
    _tuned.load(index_of(device))
    assert [entry[1:] for entry in _tuned.entries()] == [
        (PRODUCT, "01_naive", False),
        (other, OTHER, False),
    ]


# --- the command line ---


def run(capsys, device, *arguments):
    pytest.importorskip("rich")
    code = main(["tune", "--device", device, *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_command_line(device, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "140")
    timed(monkeypatch, {"auto": 12.5})
    shapes = "2x12x9x9,8,3x3/2,p1,d1,g4,channels_last", "2x12x9x9,8,1x1", "16,16,3000"
    code, out, _ = run(capsys, device, *shapes, "--dtype", "float32")
    assert code == 0
    rows = [line.split("│")[1].strip() for line in out.splitlines() if line.startswith("│")]
    assert rows == [
        *(
            f"{name} 2x12x9x9 to 8, 3x3/2 pad 1 groups 4 channels_last"
            for name in ("fprop", "dgrad", "wgrad")
        ),
        *(f"{name} 2x12x9x9 to 8, 1x1/1 contiguous" for name in ("fprop", "dgrad", "wgrad")),
        "16x16x3000 nn",
    ]
    assert "0 of 7 problems changed" in out


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("2x12x9x9,8,3x3,g5", "there is no such convolution"),
        ("2x12x9x9,8,13x3", "there is no such convolution"),
        ("0x12x9x9,8,3x3", "there is no such convolution"),
        ("2x12x9x9,8,3x3/0", "there is no such convolution"),
        ("2x12x9x9,8,3x3,nhwc", "expected M,N,K, M,N,K,nt or M,N,K,nt,BATCH, or NxCxHxW,K,RxS"),
    ],
)
def test_command_line_errors(capsys, shape, message):
    code, _, errors = run(capsys, "cpu", shape)
    assert code == 2
    assert message in errors
