"""MultiheadAttention beside torch's: values, gradients, and that nothing is copied."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import braze
from braze.testing import check_against_stock

SETTINGS = [
    {"batch_first": True},
    {"batch_first": False},
    {"batch_first": True, "bias": False},
]
EMBED, HEADS = 48, 3


def pair(device, dtype, **settings):
    """Our layer and torch's with the same parameters."""
    stock = torch.nn.MultiheadAttention(EMBED, HEADS, device=device, dtype=dtype, **settings)
    ours = braze.nn.MultiheadAttention(EMBED, HEADS, device=device, dtype=dtype, **settings)
    with torch.no_grad():
        for p in stock.parameters():
            p.normal_(std=EMBED**-0.5)
    ours.load_state_dict(stock.state_dict())
    return ours, stock


def as_function(layer, causal):
    names = [name for name, _ in layer.named_parameters()]

    def function(x, *parameters):
        options = {"need_weights": False}
        if causal:
            length = x.shape[1 if layer.batch_first else 0]
            options["attn_mask"] = torch.nn.Transformer.generate_square_subsequent_mask(
                length, device=x.device, dtype=x.dtype
            )
            options["is_causal"] = True
        given = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(layer, given, (x, x, x), options)[0]

    return function


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_matches_stock(device, dtype, settings, causal):
    ours, stock = pair(device, dtype, **settings)
    x = torch.randn(5, 7, EMBED, device=device).to(dtype).requires_grad_()
    inputs = [x, *(p.detach().requires_grad_() for p in stock.parameters())]
    check_against_stock(as_function(ours, causal), as_function(stock, causal), inputs)


def masks(x, length):
    return {
        "weights": {"need_weights": True},
        "weights of each head": {"need_weights": True, "average_attn_weights": False},
        "padding": {
            "need_weights": False,
            "key_padding_mask": torch.arange(length, device=x.device).expand(x.shape[0], -1) > 4,
        },
        "mask": {"need_weights": False, "attn_mask": torch.eye(length, device=x.device) > 0},
    }


@pytest.mark.parametrize("case", [*masks(torch.empty(0, 0), 0), "other keys", "one sequence"])
def test_what_torchs_layer_does(device, case):
    ours, stock = pair(device, torch.float32, batch_first=True)
    x = torch.randn(4, 6, EMBED, device=device)
    key = torch.randn(4, 9, EMBED, device=device) if case == "other keys" else x
    x, key = (x[0], x[0]) if case == "one sequence" else (x, key)
    options = masks(x, 6).get(case, {"need_weights": False})
    actual, expected = (layer(x, key, key, **options) for layer in (ours, stock))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_bad_input_is_torchs(device):
    ours, stock = pair(device, torch.float32, batch_first=True)
    x = torch.randn(2, 3, EMBED + 1, device=device)
    for options in ({}, {"is_causal": True}):
        messages = []
        for layer in (ours, stock):
            with pytest.raises((AssertionError, RuntimeError)) as raised:
                layer(x, x, x, need_weights=False, **options)
            messages.append(str(raised.value))
        assert messages[0] == messages[1]


def test_other_settings(device):
    for settings in ({"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": EMBED}):
        ours, stock = pair(device, torch.float32, batch_first=True, **settings)
        x = torch.randn(3, 4, EMBED, device=device)
        actual, expected = (m(x, x, x, need_weights=False)[0] for m in (ours, stock))
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_dropout_is_torchs(device):
    ours, stock = pair(device, torch.float32, batch_first=True, dropout=0.5)
    x = torch.randn(3, 40, EMBED, device=device)
    results = []
    for layer in (ours, stock):
        torch.manual_seed(3)
        results.append(layer(x, x, x, need_weights=False)[0])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    assert not torch.equal(ours.eval()(x, x, x, need_weights=False)[0], results[0])


class Copies(TorchDispatchMode):
    """Counts the ops that only move or fill."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in ("clone", "copy_", "_to_copy", "zeros", "new_zeros", "zeros_like", "add"):
            self.names.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("batch_first", [True, False])
def test_nothing_is_copied(device, batch_first):
    def moved(layer):
        x = torch.randn(4, 64, EMBED, device=device, requires_grad=True)
        with Copies() as copies:
            y = layer(x, x, x, need_weights=False)[0]
            y.backward(torch.ones_like(y))
        return len(copies.names)

    ours, stock = pair(device, torch.float32, batch_first=batch_first)
    assert moved(stock) >= 5
    assert moved(ours) <= 1


def test_autocast(device):
    ours, stock = pair(device, torch.float32, batch_first=True)
    x = torch.randn(4, 16, EMBED, device=device)
    with torch.autocast(device, torch.bfloat16):
        actual, expected = (m(x, x, x, need_weights=False)[0] for m in (ours, stock))
    assert actual.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


def test_convert(device):
    torch.manual_seed(0)
    make = lambda: torch.nn.TransformerEncoderLayer(EMBED, HEADS, 96, 0.0, batch_first=True)  # noqa: E731
    stock = make().to(device)
    model = braze.convert(make().to(device))
    model.load_state_dict(stock.state_dict())
    assert type(model.self_attn) is braze.nn.MultiheadAttention
    x = torch.randn(3, 5, EMBED, device=device)
    torch.testing.assert_close(model(x), stock(x), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), stock.eval()(x), rtol=1e-4, atol=1e-5)
    assert type(braze.unconvert(model).self_attn) is torch.nn.MultiheadAttention


def test_the_tests_reject_a_wrong_layer(device):
    ours, stock = pair(device, torch.float32, batch_first=True)
    x = torch.randn(5, 7, EMBED, device=device).requires_grad_()
    inputs = [x, *(p.detach().requires_grad_() for p in stock.parameters())]
    with pytest.raises(AssertionError):
        check_against_stock(as_function(ours, True), as_function(stock, False), inputs)
