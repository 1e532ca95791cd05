"""What brings the dimensions of its input into another order, found in the code of its class."""

import ast

import torch

from braze.convert.code import Code
from braze.convert.parts import Permutes


class PermuteCode(Code):
    """The code of a forward that may be ``return torch.permute(input, self.dims)``."""

    def permutes(self):
        """A :class:`parts.Permutes`, or None."""
        returned = self.body[0] if len(self.body) == 1 else None
        call = returned.value if isinstance(returned, ast.Return) else None
        if not (isinstance(call, ast.Call) and len(call.args) == 2 and not call.keywords):
            return None
        name = self.attribute(call.args[1]) if self.is_input(call.args[0]) else None
        if name is None or self.known(call.func) is not torch.permute:
            return None
        return Permutes(name, self.same())
