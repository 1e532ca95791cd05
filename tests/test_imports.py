"""Which module may import which: no circles, and nothing of a step in the ops."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "python" / "braze"
MODULES = {
    ".".join(("braze", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in PACKAGE.rglob("*.py")
}


def imported(tree):
    """The modules of braze that a module imports when it is imported itself.

    Importing a submodule runs the package around it first, but that is the same for all.
    """
    names, inside = set(), [tree]
    while inside:
        node = inside.pop()
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                names.add(whole if whole in MODULES else node.module)
        elif not isinstance(node, (ast.FunctionDef, ast.Lambda)):
            inside += ast.iter_child_nodes(node)
    return {name for name in names if name in MODULES}


IMPORTS = {
    name: imported(ast.parse(path.read_text(encoding="utf-8"))) for name, path in MODULES.items()
}


def reached(name):
    """All that importing a module imports, but through the package braze itself."""
    found, new = set(), {name}
    while new:
        found |= new
        new = {other for one in new for other in IMPORTS[one]} - found - {"braze"}
    return found


def test_there_are_no_circles():
    list(TopologicalSorter(IMPORTS).static_order())


def test_a_circle_would_be_found():
    with pytest.raises(CycleError):
        list(TopologicalSorter({**IMPORTS, "braze._step_scope": {"braze.step"}}).static_order())


@pytest.mark.parametrize("package", ["braze._ops", "braze.nn", "braze.optim", "braze.data"])
def test_ops_and_layers_know_nothing_of_a_step(package):
    names = [name for name in MODULES if name == package or name.startswith(package + ".")]
    assert names
    for name in names:
        above = {other for other in reached(name) if other.split(".")[:2] == ["braze", "step"]}
        assert not above, name


def test_the_channel_imports_nothing():
    assert not IMPORTS["braze._step_scope"]
    assert {"braze.optim._multi_tensor", "braze._ops._common", "braze.step.body"} <= {
        name for name, others in IMPORTS.items() if "braze._step_scope" in others
    }
