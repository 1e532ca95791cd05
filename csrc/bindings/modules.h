// What is asked of every module at each call of a converted model or of a captured function: loops
// in Python take two to four times as long.
#pragma once
#include <Python.h>

#include <iterator>

#include "bindings/objects.h"

namespace braze {

// 1, 0, or -1 with an exception set.
inline int is_unwatched(PyObject* module) {
  static PyObject* const kHooks[] = {interned("_forward_hooks"), interned("_forward_pre_hooks"),
                                     interned("_backward_hooks"), interned("_backward_pre_hooks")};
  // METHODS_OF_LAYERS in braze/convert/kinds.py
  static PyObject* const kMethods[] = {interned("forward"), interned("_conv_forward"),
                                       interned("_check_input_dim"), interned("_call_impl"),
                                       interned("_compiled_call_impl")};
  PyObject* own = PyObject_GenericGetDict(module, nullptr);
  if (!own) return -1;
  int result = 1;
  for (auto name = std::begin(kHooks); result == 1 && name != std::end(kHooks); ++name) {
    PyObject* hooks = PyDict_GetItemWithError(own, *name);  // borrowed
    if (!hooks) {
      if (!PyErr_Occurred()) PyErr_SetObject(PyExc_AttributeError, *name);
      result = -1;
    } else {
      const int any = PyObject_IsTrue(hooks);
      if (any != 0) result = any < 0 ? -1 : 0;
    }
  }
  for (auto name = std::begin(kMethods); result == 1 && name != std::end(kMethods); ++name) {
    const int there = PyDict_Contains(own, *name);
    if (there != 0) result = there < 0 ? -1 : 0;
  }
  Py_DECREF(own);
  return result;
}

// braze._C.unwatched(modules): whether calls of modules run their classes' forwards and nothing
// else. Of a list or tuple; elements that are tuples stand for functions and are passed over.
inline PyObject* unwatched(PyObject*, PyObject* modules) {
  PyObject* items = PySequence_Fast(modules, "unwatched() takes a list or a tuple");
  if (!items) return nullptr;
  int result = 1;
  for (Py_ssize_t i = 0; result == 1 && i < PySequence_Fast_GET_SIZE(items); ++i) {
    PyObject* item = PySequence_Fast_GET_ITEM(items, i);
    if (!PyTuple_CheckExact(item)) result = is_unwatched(item);
  }
  Py_DECREF(items);
  if (result < 0) return nullptr;
  return PyBool_FromLong(result);
}

// braze._C.share(modules, links): whether one of a list of modules is one of a tuple's links, which
// are modules, or (function, arguments, keyword arguments) with a module as the first argument.
inline PyObject* share(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2 || !PyList_Check(args[0]) || !PyTuple_Check(args[1])) {
    PyErr_SetString(PyExc_TypeError, "share() takes a list and a tuple");
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[1]); ++i) {
    PyObject* link = PyTuple_GET_ITEM(args[1], i);
    if (PyTuple_Check(link)) {
      PyObject* given = PyTuple_GET_SIZE(link) > 1 ? PyTuple_GET_ITEM(link, 1) : nullptr;
      const bool any = given && PyTuple_Check(given) && PyTuple_GET_SIZE(given) > 0;
      if (!any) continue;
      link = PyTuple_GET_ITEM(given, 0);
    }
    for (Py_ssize_t j = 0; j < PyList_GET_SIZE(args[0]); ++j) {
      if (PyList_GET_ITEM(args[0], j) == link) Py_RETURN_TRUE;
    }
  }
  Py_RETURN_FALSE;
}

// One of a module's dicts ("_parameters", "_buffers", ...), borrowed from `own`, its __dict__; null
// with an exception set where it has none of this name.
inline PyObject* dict_of(PyObject* own, PyObject* name) {
  PyObject* values = PyDict_GetItemWithError(own, name);
  if (values && PyDict_Check(values)) return values;
  if (!PyErr_Occurred()) PyErr_SetObject(PyExc_AttributeError, name);
  return nullptr;
}

// Calls visit(value), with a borrowed reference, for the values of these dicts of modules, of the
// first module first. False where visit returned false, or with an exception set.
template <typename Visit>
bool each_held(PyObject* modules, PyObject* names, Visit visit) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(modules); ++i) {
    PyObject* own = PyObject_GenericGetDict(PyList_GET_ITEM(modules, i), nullptr);
    bool goes_on = own != nullptr;
    for (Py_ssize_t j = 0; goes_on && j < PyTuple_GET_SIZE(names); ++j) {
      PyObject* values = dict_of(own, PyTuple_GET_ITEM(names, j));
      goes_on = values != nullptr;
      PyObject *key, *value;
      for (Py_ssize_t at = 0; goes_on && PyDict_Next(values, &at, &key, &value);) {
        goes_on = visit(value);
      }
    }
    Py_XDECREF(own);
    if (!goes_on) return false;
  }
  return true;
}

// braze._C.held(modules, names): a list of the values of these dicts of modules ("_parameters",
// "_buffers", ...), of the first module first.
inline PyObject* held(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2 || !PyList_Check(args[0]) || !PyTuple_Check(args[1])) {
    PyErr_SetString(PyExc_TypeError, "held() takes a list and a tuple");
    return nullptr;
  }
  return listed([&](auto visit) { return each_held(args[0], args[1], visit); });
}

// braze._C.holds(modules, names, values): whether held(modules, names) would have the same objects
// in the same order as the list of values.
inline PyObject* holds(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 3 || !PyList_Check(args[0]) || !PyTuple_Check(args[1]) || !PyList_Check(args[2])) {
    PyErr_SetString(PyExc_TypeError, "holds() takes a list, a tuple and a list");
    return nullptr;
  }
  return are_those(args[2], [&](auto visit) { return each_held(args[0], args[1], visit); });
}

// braze._C.same(a, b): whether two lists have the same objects in the same order.
inline PyObject* same(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2 || !PyList_Check(args[0]) || !PyList_Check(args[1])) {
    PyErr_SetString(PyExc_TypeError, "same() takes two lists");
    return nullptr;
  }
  const Py_ssize_t size = PyList_GET_SIZE(args[0]);
  bool equal = size == PyList_GET_SIZE(args[1]);
  for (Py_ssize_t i = 0; equal && i < size; ++i) {
    equal = PyList_GET_ITEM(args[0], i) == PyList_GET_ITEM(args[1], i);
  }
  return PyBool_FromLong(equal);
}

}  // namespace braze
