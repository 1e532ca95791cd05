"""Modules whose forward is a product with a parameter, found in the code of their classes."""

import ast

from braze.convert import additions
from braze.convert.code import MORE
from braze.convert.passes import PassCode, compiled_all
from braze.convert.scales import Scales, view_of


class ScaleCode(PassCode):
    """The code of a forward that may be ``return input * self.gamma``."""

    def scales(self):
        """A :class:`scales.Scales`, or None."""
        *body, last = self.body or [None]
        if not isinstance(last, ast.Return) or self.tree.shared or self.assigns(self.input):
            return None
        if any(isinstance(n, MORE) for n in self.tree.numbered):
            return None
        self.views = {}  # by local variables
        if not all(map(self._is_view, body)):
            return None
        tests, product = [], last.value
        if isinstance(product, ast.IfExp):
            test = self.test(product.test)
            if test is None:
                return None
            scaled = self._scaled(product.body)
            tests.append(test if scaled else ast.UnaryOp(ast.Not(), test))
            product = product.body if scaled else product.orelse
        found = self._scaled(product)
        if found is None:
            return None
        return Scales(*found, compiled_all(tests), self.same())

    def _is_view(self, statement):
        """Takes ``gamma = self.gamma.view(...)``; whether a statement is that."""
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        if not isinstance(target, ast.Name) or len(statement.targets) > 1:
            return False
        found = self._parameter(statement.value)
        if found is None or target.id in (self.me, *self.views):
            return False
        self.views[target.id] = found
        return True

    def _parameter(self, node):
        """The name of a parameter and its view, or None."""
        if isinstance(node, ast.Name):
            return self.views.get(node.id)
        root, view = view_of(node, self.attribute)
        name = self.attribute(root)
        return None if name is None else (name, view)

    def _scaled(self, node):
        """By what the input is scaled, see :meth:`_parameter`, or None."""
        for form in additions.scale_forms(node) if additions.is_scaling(node) else ():
            input, scale = additions.parts(node, form)
            if self.is_input(input):
                return self._parameter(scale)
        return None
