"""What a converted model's own code does, it goes on doing: results, state, exceptions, effects."""

import copy
import logging

import pytest
import torch
import torch.nn.functional as stock
from convert_common import Small, assert_same, call, state
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import braze

GLOBAL = []


class AssignsBuffers(Small):
    def forward(self, x):
        x = self.block(x)
        self.rm = 0.9 * self.rm + 0.1 * x.mean(0).detach()
        self.steps += 1
        return x


class Collects(Small):
    def forward(self, x):
        x = self.block(x)
        self.log.append(x.detach())
        self.seen[self.steps] = x.sum().item()
        return x


class RegistersLate(Small):
    def forward(self, x):
        x = self.block(x)
        if not hasattr(self, "late"):
            self.register_buffer("late", x.detach().mean(0))
        return x + self.late


class Freezes(Small):
    def forward(self, x):
        for p in self.last.parameters():
            p.requires_grad = False
        return self.last(self.block(x))


class Unpacks(Small):
    def forward(self, x):
        if not torch.is_tensor(x):
            x = x[0]
        return self.block(x)


class UnpacksInAHelper(Small):
    @staticmethod
    def first(x):
        try:
            return x.tensors
        except AttributeError:
            return getattr(x, "mask", None)

    def forward(self, x):
        found = self.first(x)
        x = found if found is not None else x if torch.is_tensor(x) else x[0]
        return self.block(x)


class WritesData(Small):
    def forward(self, x):
        self.fc.weight.data = stock.normalize(self.fc.weight.data)
        self.rm.data = self.rm + 1
        y = self.block(x)
        y.extra = self.steps
        return y


class ReadsProperties(Small):
    def forward(self, x):
        parameter = next(self.parameters())
        return self.block(x.to(parameter.dtype).to(parameter.device))


class DrawsFromGenerators(Small):
    def forward(self, x):
        x = self.block(x)
        return x + 1 if self.generator.random() + self.random.random() < 1 else x


class Checkpoints(Small):
    def forward(self, x):
        recompute = checkpoint
        x = recompute(self.block, x, use_reentrant=False)
        layers = nn.Sequential(self.last, self.relu)
        return checkpoint_sequential(layers, 2, x, use_reentrant=False)


class SavesTensorsElsewhere(Small):
    def forward(self, x):
        def pack(t):
            self.steps += 1
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            x = x.sigmoid()
        return self.block(x)


class Logs(Small):
    def forward(self, x):
        logging.getLogger("braze.test").warning("at %d", self.steps)
        with torch.autograd.profiler.record_function("block"):
            x = self.block(x)
        GLOBAL.append(self.steps)
        return x


class SwitchesBackend(Small):
    def forward(self, x):
        with braze.backend(matmul="braze"):
            self.seen["backend"] = braze.backend._get() if hasattr(braze.backend, "_get") else 1
            return self.block(x)


class RaisesMidway(Small):
    def forward(self, x):
        try:
            y = self.fc(x)
            if len(self.log) == 1:
                raise ValueError("midway")
            y = self.relu(y)
        except ValueError as error:
            self.log.append(str(error))
            y = y - 1
        self.log.append(0)
        return y


class BindsInLoops(Small):
    def forward(self, x):
        for layer in (self.fc, self.relu, self.last):
            x = layer(x)
        self.log.append(type(layer).__name__)
        return x


class Captures(Small):
    def forward(self, x):
        x = self.fc(x)

        def middle():
            return x

        x = self.relu(x)
        return x + middle()


class UsesPrivateNames(Small):
    def __tail(self, x):
        return stock.relu(self.fc(x))

    def forward(self, x, *, scale: "float" = 2.0):
        """Has a docstring."""
        return self.__tail(x) * scale


FORWARDS = [c for c in Small.__subclasses__() if c.__module__ == __name__]


@pytest.mark.parametrize("kind", FORWARDS, ids=lambda kind: kind.__name__)
def test_forwards_do_what_they_did(kind):
    original = kind()
    model = copy.deepcopy(original)
    before = state(model)
    report = braze.convert_report(model)
    assert_same(state(model), before)
    braze.convert(model)
    assert_same(state(model), before)
    assert "left alone" not in str(report).replace("0 left alone", "")
    for dtype in (torch.float32, torch.float32, torch.float64):
        model.to(dtype)
        original.to(dtype)
        x = torch.randn(3, 4, dtype=dtype)
        if kind.__name__.startswith("Unpacks"):
            assert_same(call(model, [x])[0], call(original, [x])[0])
        x = x.float() if kind is ReadsProperties else x
        ours, seen = call(model, x), len(GLOBAL)
        theirs = call(original, x)
        assert_same(ours, theirs)
        assert len(GLOBAL) - seen == seen % 2 if kind is Logs else True
        assert_same(state(model), state(original))
        for p, q in zip(model.parameters(), original.parameters(), strict=True):
            p.grad = q.grad = None
        for y in (ours[0], theirs[0]):
            y.sum().backward()
        grads = [[p.grad for p in m.parameters() if p.grad is not None] for m in (model, original)]
        assert grads[0]
        assert_same(*grads)
    assert getattr(ours[0], "extra", None) == getattr(theirs[0], "extra", None)


def test_most_of_them_are_fused():
    """What the forwards above do has to be done by rewritten ones."""
    fused = {kind.__name__: bool(braze.convert_report(kind()).fused) for kind in FORWARDS}
    not_fused = {name for name, is_fused in fused.items() if not is_fused}
    assert not_fused == {"RaisesMidway", "BindsInLoops", "Captures", "Checkpoints"}
