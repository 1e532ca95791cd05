"""Tracing of a module's own forward for :func:`braze.convert`, by torch.fx, with everything refused
that a trace would get wrong in silence, and everything noted that it holds for only as long as."""

import random
import types

import numpy
import torch

#: What a forward may ask about its surroundings or about a proxy that a trace would answer once
#: and for all.
_UNTRACEABLE = {
    "callable",
    "checkpoint",
    "hasattr",
    "is_autocast_enabled",
    "is_compiling",
    "is_grad_enabled",
    "is_inference_mode_enabled",
    "isinstance",
    "item",
    "print",
    "tolist",
    "type",
}
#: Where a rewritten class keeps the forward that it stands for.
OWN_FORWARD = "_forward_before_convert"
_INTERNALS = frozenset(torch.nn.Module().__dict__) - {"training"}
#: Settings that a later read can be compared with: nothing changes inside of them.
_CONSTANTS = (bool, int, float, str, type(None), torch.dtype)
_CONSTANTS += types.FunctionType, types.BuiltinFunctionType
#: What a forward reads of a module without depending on its value.
_NO_SETTINGS = types.MethodType, torch.nn.Module, torch.fx.Proxy
_CONTAINERS = torch.nn.ModuleDict, torch.nn.ModuleList, torch.nn.Sequential


class Untraceable(Exception):
    """A forward that stays as it is; the message says why."""


class _Tracer(torch.fx.Tracer):
    """Every child is a leaf. What fx would lose in silence is refused."""

    proxy_buffer_attributes = True

    def __init__(self, function_name):
        super().__init__()
        self.traced_func_name = function_name
        self.modes = _modes()

    def is_leaf_module(self, module, name):
        return True

    def create_node(self, *args, **kwargs):
        if _modes() != self.modes:
            raise Untraceable("it switches gradients, inference mode or autocast on or off")
        return super().create_node(*args, **kwargs)


def _modes():
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")),
    )


def _own_forward(module):
    """The forward of the module's class as the user wrote it, and the name it has there."""
    name = OWN_FORWARD if hasattr(type(module), OWN_FORWARD) else "forward"
    return getattr(type(module), name), name


def names_used(module):
    """The names in the code of forward and of the methods and functions that it may reach."""
    forward, _ = _own_forward(module)
    if not isinstance(forward, types.FunctionType):
        return set()
    classes = {c for m in module.modules() for c in type(m).__mro__ if not _is_librarys(c)}
    names, seen, todo = set(), set(), [(forward.__code__, forward.__globals__)]
    while todo:
        code, scope = todo.pop()
        if code in seen:
            continue
        seen.add(code)
        names.update(code.co_names)
        todo += [(c, scope) for c in code.co_consts if isinstance(c, types.CodeType)]
        for name in code.co_names:
            for found in (scope.get(name), *(vars(c).get(name) for c in classes)):
                found = getattr(found, "__func__", found)  # of static and class methods
                found = getattr(found, "__wrapped__", found)
                if isinstance(found, types.FunctionType) and not _is_librarys(found):
                    todo.append((found.__code__, found.__globals__))
    return names


def _is_librarys(thing):
    return (thing.__module__ or "").split(".")[0] in ("torch", "braze")


class Recorder:
    """While active, notes which attributes of modules (not parameters, buffers, children, methods)
    Python code reads: a trace holds only for the values it has seen."""

    def __init__(self):
        self.reads = {}

    def __enter__(self):
        stock = torch.nn.Module.__getattribute__
        reads = self.reads

        def recording(module, name):
            value = stock(module, name)
            internal = name in _INTERNALS or name.startswith("__")
            if not internal and not isinstance(value, _NO_SETTINGS):
                reads.setdefault((id(module), name), (module, name, value))
            return value

        torch.nn.Module.__getattribute__ = recording
        return self

    def __exit__(self, *_):
        del torch.nn.Module.__getattribute__


def _is_constant(value):
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return isinstance(value, _CONSTANTS)


def containers(module):
    """The containers whose children a forward may iterate over, with those children."""
    todo, found = [module], []
    while todo:
        container = todo.pop()
        children = tuple(container._modules.values())
        found.append((container, children))
        todo += [c for c in children if isinstance(c, _CONTAINERS)]
    return found


def _required(forward):
    """The number of forward's arguments, and the defaults of those that may be left out."""
    code = forward.__code__
    if code.co_flags & 0x0C or code.co_kwonlyargcount:
        raise Untraceable("it takes *args, **kwargs or keyword-only arguments")
    defaults = forward.__defaults__ or ()
    names = code.co_varnames[1 : code.co_argcount]
    required = len(names) - len(defaults)
    for name, value in zip(names[required:], defaults, strict=True):
        if not isinstance(value, (bool, int, float, type(None))):
            raise Untraceable(f"its argument {name!r} has a {type(value).__name__} as its default")
    return required, dict(zip(names[required:], defaults, strict=True))


def trace(module, recorder):
    """The graph of a module's own forward, with optional arguments at their defaults."""
    forward, name = _own_forward(module)
    if not isinstance(forward, types.FunctionType):
        raise Untraceable("its forward is not a Python function")
    refused = sorted(names_used(module) & _UNTRACEABLE)
    if refused:
        raise Untraceable(f"it uses {', '.join(refused)}")
    required, defaults = _required(forward)
    before = [(m, dict(m.__dict__)) for m in module.modules()]
    states = _random_states()
    tracer = _Tracer(name)
    try:
        with recorder:
            graph = tracer.trace(module, concrete_args=defaults or None)
    except Untraceable:
        raise
    except Exception as error:  # a forward that meets proxies may raise anything
        message = str(error).strip().splitlines()
        raise Untraceable(message[0] if message else type(error).__name__) from error
    finally:
        changed = [(m, old) for m, old in before if not _same(m.__dict__, old)]
        for m, old in changed:
            m.__dict__.clear()
            m.__dict__.update(old)
        vars(tracer).clear()  # it is part of a cycle that would keep the module alive
        drawn = _random_states() != states
        random.setstate(states[0])
        torch.set_rng_state(torch.tensor(states[1], dtype=torch.uint8))
        numpy.random.set_state(states[2])  # noqa: NPY002
    if changed:
        raise Untraceable("it makes tensors or sets attributes")
    if drawn:
        raise Untraceable("it draws random numbers outside of modules")
    for _, name, value in recorder.reads.values():
        if not _is_constant(value):
            raise Untraceable(f"it reads {name!r}, a {type(value).__name__}, which may change")
    _drop_optional(graph, required)
    return graph, required


def _drop_optional(graph, required):
    """Removes the arguments that were traced at their defaults, and fx's checks of them."""

    def erase(node):
        for user in list(node.users):
            erase(user)
        graph.erase_node(node)

    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node in placeholders[required:]:
        erase(node)
    for node in graph.nodes:
        node.type = None  # annotations may name what only the module's own file knows


def _random_states():
    # numpy's global generator is what a forward may draw from.
    name, words, *rest = numpy.random.get_state()  # noqa: NPY002
    return random.getstate(), torch.get_rng_state().tolist(), (name, words.tolist(), *rest)


def _same(now, before):
    return now.keys() == before.keys() and all(now[k] is before[k] for k in before)
