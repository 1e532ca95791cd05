"""What the names in a function stand for, found without running anything."""

import ast
import types

from braze.convert.emit import SCOPES
from braze.convert.modules import child_of, is_container
from braze.convert.source import VARIABLE, constant


class Outer:
    """What names stand for outside of a function, of which there are `python` and `tree`."""

    def attribute_name(self, node):
        """The name of an attribute: Python spells private ones after the class."""
        name, kind = node.attr, (self.tree.class_name or "").lstrip("_")
        return f"_{kind}{name}" if kind and name[:2] == "__" != name[-2:] else name

    def value(self, node):
        """What an expression of names stands for outside of the function, or None."""
        if isinstance(node, ast.Name):
            return self.outer(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.value(node.value)
            if isinstance(owner, types.ModuleType):
                return vars(owner).get(node.attr)
        return None

    def outer(self, name):
        """What a name stands for outside of the function, or None."""
        code = self.python.__code__
        if name in code.co_freevars:
            cell = self.python.__closure__[code.co_freevars.index(name)]
            return cell.cell_contents if cell != types.CellType() else None
        if name in self.tree.locals:
            return None
        scope = self.python.__globals__
        builtins = scope.get("__builtins__", {})
        builtins = vars(builtins) if isinstance(builtins, types.ModuleType) else builtins
        return scope.get(name, builtins.get(name))


class Names(Outer):
    """What names stand for in one function: the part of splice._Function that asks for that."""

    def find_names(self):
        """Finds where the function's variables are set and read, and which hold layers."""
        self.declared = declared(self.tree.node)
        self.nodes = list(_nodes(self.tree.node))
        self.stores, self.loads = {}, {}
        for node in self.tree.numbered:
            if isinstance(node, ast.Name):
                uses = self.loads if isinstance(node.ctx, ast.Load) else self.stores
                uses.setdefault(node.id, []).append(node)
        if self.me in self.stores:
            self.me = None
        self.aliases = {}  # layers by the local variables that hold them
        self._children = {}  # of containers, by name and container
        # Local variables that are set once, to a layer, or by a loop over layers.
        for node in self.nodes:
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                self._alias(node.targets[0], self.layers(node.value))
            elif isinstance(node, ast.For):
                self._alias_loop(node.target, node.iter)

    def is_set_once(self, name):
        """Whether a variable is set in one place, and nothing but the function sees it."""
        return (
            len(self.stores.get(name, ())) == 1
            and name not in self.tree.shared
            and name not in self.declared
        )

    def changes_context(self):
        """Whether part of the function may run under other settings, such as another autocast."""
        return any(isinstance(node, (ast.With, ast.AsyncWith)) for node in self.nodes)

    def _alias(self, target, layers):
        if layers and isinstance(target, ast.Name) and self.is_set_once(target.id):
            self.aliases[target.id] = layers

    def _alias_loop(self, target, iterated):
        self._alias(target, self.elements(iterated))
        if (
            isinstance(iterated, ast.Call)
            and self.value(iterated.func) in (zip, enumerate)
            and isinstance(target, ast.Tuple)
            and not iterated.keywords
        ):
            args = iterated.args
            if self.value(iterated.func) is enumerate:
                args = [None, *args[:1]]
            for name, argument in zip(target.elts, args, strict=False):
                if argument is not None:
                    self._alias(name, self.elements(argument))

    def elements(self, node):
        """The layers that a container expression holds, as (name, module), or None."""
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
            found = self.elements(node.value)
            parts = (node.slice.lower, node.slice.upper, node.slice.step)
            bounds = [None if part is None else constant(part) for part in parts]
            return None if not found or VARIABLE in bounds else found[slice(*bounds)]
        is_me = isinstance(node, ast.Name) and node.id == self.me
        holders = (("", self.module),) if is_me else self.layers(node)
        if not holders or len(holders) > 1 or not is_container(holders[0][1]):
            return None
        (holder,) = holders
        if holder not in self._children:
            name, container = holder
            prefix = f"{name}." if name else ""
            children = container.__dict__["_modules"].items()
            self._children[holder] = tuple((prefix + k, m) for k, m in children)
        return self._children[holder]

    def layers(self, node):
        """The modules that an expression may stand for, as ((name, module), ...), or None."""
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Subscript):
            found = self.elements(node.value)
            index = constant(node.slice)
            if found and isinstance(index, int) and -len(found) <= index < len(found):
                return (found[index],)
            return found if isinstance(node.slice, ast.Name) else None
        return None

    def _attribute(self, node):
        if isinstance(node.value, ast.Name) and node.value.id == self.me:
            owners = (("", self.module),)
        else:
            owners = self.layers(node.value)
        if not owners or len(owners) > 1:
            return None
        ((prefix, owner),) = owners
        name = self.attribute_name(node)
        child = child_of(owner, name)
        return None if child is None else ((f"{prefix}.{name}" if prefix else name, child),)


def _nodes(node):
    """A node and what is in it, outermost first, without the functions and classes in it."""
    pending = [node]
    while pending:
        node = pending.pop()
        yield node
        inner = [c for c in ast.iter_child_nodes(node) if not isinstance(c, SCOPES)]
        pending += reversed(inner)


def declared(node):
    """The names that a function declares as global or nonlocal."""
    found = (n for n in ast.walk(node) if isinstance(n, (ast.Global, ast.Nonlocal)))
    return {name for n in found for name in n.names}
