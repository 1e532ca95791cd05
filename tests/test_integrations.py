"""The recipes of docs/integrations.md, with the packages they are for: `make test-integrations`.

Each is run from the page as it stands there, and once more without braze.
"""

import copy
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import braze

PAGE = Path(__file__).parent.parent / "docs" / "integrations.md"
LR, MOMENTUM = 0.05, 0.9


def recipe(title):
    """The code of a section of the page."""
    section = re.search(rf"^## {title}\n```python\n(.*?)^```$", PAGE.read_text(), re.S | re.M)
    code = section.group(1)
    assert len(code.strip().splitlines()) < 10
    return compile(code, f"{PAGE.name}: {title}", "exec")


def run(code, **names):
    """What the code leaves behind, for code that finds `names`."""
    exec(code, names)
    return SimpleNamespace(**names)


def small_network():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * 8 * 8, 5),
    ).double()


def batches(count, size=16, images=4, classes=5):
    """The same batches at each call, in float64."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count * images, 3, size, size, generator=generator, dtype=torch.float64)
    y = torch.randint(classes, (count * images,), generator=generator)
    data = torch.utils.data.TensorDataset(x, y)
    return torch.utils.data.DataLoader(data, batch_size=images)


def train(model, optimizer, loader):
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def assert_same_state(ours, theirs, before):
    """That two state dicts agree, and that training changed them.

    In float64 whatever is not the same computation differs by much more than by rounding.
    """
    assert list(ours) == list(theirs) == list(before)
    moved = 0
    for name, b in theirs.items():
        assert (ours[name] - b).double().norm() <= 1e-6 * b.double().norm() + 1e-9, name
        moved += not torch.equal(b, before[name])
    assert moved > len(before) / 2


@pytest.fixture
def lightning():
    return pytest.importorskip("lightning.pytorch")


@pytest.fixture
def module(lightning):
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = small_network()
            self.classes = []

        def training_step(self, batch, _):
            x, y = batch
            self.classes.append(type(self.network[0]))
            return torch.nn.functional.cross_entropy(self.network(x), y)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=LR, momentum=MOMENTUM)

    return Module()


@pytest.fixture
def quiet_trainer(lightning, tmp_path, monkeypatch):
    """Lightning's Trainer as the page calls it, for a test: files in tmp_path, a CPU, no bars."""
    initialise = lightning.Trainer.__init__

    def quiet(self, **arguments):
        options = {"default_root_dir": tmp_path, "accelerator": "cpu", "logger": False}
        options |= {"enable_progress_bar": False, "enable_model_summary": False}
        initialise(self, **options, **arguments)

    monkeypatch.setattr(lightning.Trainer, "__init__", quiet)
    return lightning.Trainer


def test_lightning(module, quiet_trainer, tmp_path):
    before, plain = copy.deepcopy(module.state_dict()), copy.deepcopy(module)
    trainer = run(recipe("Lightning"), module=module, loader=batches(3)).trainer
    quiet_trainer(max_epochs=1, enable_checkpointing=False).fit(plain, batches(3))
    assert set(module.classes) == {braze.nn.Conv2d}
    assert set(plain.classes) == {torch.nn.Conv2d}
    assert_same_state(module.state_dict(), plain.state_dict(), before)
    # The report is there, the classes are the module's own again, and nothing in the checkpoint
    # needs braze.
    (report,) = [c.report for c in trainer.callbacks if hasattr(c, "report")]
    assert len(report.fused) == 1
    assert type(module.network[0]) is torch.nn.Conv2d
    (path,) = tmp_path.rglob("*.ckpt")
    checkpoint = torch.load(path, weights_only=True)
    assert_same_state(checkpoint["state_dict"], plain.state_dict(), before)


def test_lightning_leaves_nothing_alone_in_strict_mode(module, quiet_trainer):
    from braze.integrations.lightning import ConvertCallback

    module.network.append(torch.nn.Dropout(0.5))
    trainer = quiet_trainer(
        max_epochs=1, callbacks=[ConvertCallback(strict=True)], enable_checkpointing=False
    )
    with pytest.raises(RuntimeError, match="Dropout"):
        trainer.fit(module, batches(1))
    assert type(module.network[0]) is torch.nn.Conv2d


def test_lightning_resumes_with_and_without(module, quiet_trainer, tmp_path):
    from braze.integrations.lightning import ConvertCallback

    before, plain = copy.deepcopy(module.state_dict()), copy.deepcopy(module)
    quiet_trainer(max_epochs=2, enable_checkpointing=False).fit(plain, batches(2))
    first = quiet_trainer(max_epochs=1, callbacks=[ConvertCallback()], enable_checkpointing=False)
    first.fit(module, batches(2))
    first.save_checkpoint(tmp_path / "first.ckpt")
    second = quiet_trainer(max_epochs=2, enable_checkpointing=False)
    second.fit(module, batches(2), ckpt_path=tmp_path / "first.ckpt")
    assert_same_state(module.state_dict(), plain.state_dict(), before)


def test_timm():
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    ours = run(recipe("timm"))
    assert type(ours.model.layer1[0].conv1) is braze.nn.Conv2d
    assert len(braze.convert_report(ours.model).fused) >= 1
    before = copy.deepcopy(ours.model.double().state_dict())
    model = timm.create_model("resnet18", num_classes=10).double()
    model.load_state_dict(before)
    groups = ours.param_groups_weight_decay(model, weight_decay=1e-4)
    assert len(groups) == 2
    stock = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)
    assert isinstance(ours.optimizer, braze.optim.SGD)
    train(ours.model, ours.optimizer, batches(2, size=32, images=8, classes=10))
    train(model, stock, batches(2, size=32, images=8, classes=10))
    assert_same_state(ours.model.state_dict(), model.state_dict(), before)


def test_hugging_face(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    pytest.importorskip("safetensors")
    from safetensors.torch import load_file

    torch.manual_seed(0)
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=5
    )
    plain = transformers.ResNetForImageClassification(config).double()
    model, before = copy.deepcopy(plain), copy.deepcopy(plain.state_dict())
    dataset = [{"pixel_values": x, "labels": y} for x, y in batches(6, size=32).dataset]
    arguments = transformers.TrainingArguments(
        output_dir=tmp_path, use_cpu=True, max_steps=3, report_to=[], disable_tqdm=True
    )
    trainer = run(
        recipe("Hugging Face's Trainer"), model=model, arguments=arguments, dataset=dataset
    ).trainer
    assert len(braze.convert_report(trainer.model).fused) >= 3
    stock = torch.optim.SGD(plain.parameters(), lr=LR, momentum=MOMENTUM)
    optimizers = (stock, None)
    transformers.Trainer(plain, arguments, train_dataset=dataset, optimizers=optimizers).train()
    assert_same_state(model.state_dict(), plain.state_dict(), before)
    saved = load_file(tmp_path / "model.safetensors")
    fresh = transformers.ResNetForImageClassification(config).double()
    fresh.load_state_dict(saved)
    assert_same_state(fresh.state_dict(), plain.state_dict(), before)
