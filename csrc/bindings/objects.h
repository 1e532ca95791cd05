// Of Python objects, what the functions beside this file share.
#pragma once
#include <Python.h>

namespace braze {

inline PyObject* interned(const char* name) { return PyUnicode_InternFromString(name); }

// each(visit) calls visit(value), with a borrowed reference, for one object after the other; it
// returns false where visit did, or with an exception set.

// A list of these objects.
template <typename Each>
PyObject* listed(const Each& each) {
  PyObject* result = PyList_New(0);
  if (!result) return nullptr;
  const auto append = [&](PyObject* value) { return PyList_Append(result, value) == 0; };
  if (!each(append)) Py_CLEAR(result);
  return result;
}

// Whether they are those of a list, in its order.
template <typename Each>
PyObject* are_those(PyObject* list, const Each& each) {
  Py_ssize_t at = 0;
  const auto is_next = [&](PyObject* value) {
    return at < PyList_GET_SIZE(list) && PyList_GET_ITEM(list, at++) == value;
  };
  const bool equal = each(is_next) && at == PyList_GET_SIZE(list);
  return PyErr_Occurred() ? nullptr : PyBool_FromLong(equal);
}

}  // namespace braze
