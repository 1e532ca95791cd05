// What a captured function reads beside its arguments, read anew at each of its calls.
#pragma once
#include <Python.h>

#include "bindings/objects.h"

namespace braze {

// Calls visit(value), with a borrowed reference, for each item of a list, a tuple or another
// iterable. Here and below: false where visit returned false, or with an exception set.
template <typename Visit>
bool each_item(PyObject* items, Visit visit) {
  PyObject* fast = PySequence_Fast(items, "expected a list, a tuple or a dict");
  bool goes_on = fast != nullptr;
  for (Py_ssize_t i = 0; goes_on && i < PySequence_Fast_GET_SIZE(fast); ++i) {
    goes_on = visit(PySequence_Fast_GET_ITEM(fast, i));
  }
  Py_XDECREF(fast);
  return goes_on;
}

// Keys, then values.
template <typename Visit>
bool each_entry(PyObject* dict, Visit visit) {
  if (!PyDict_CheckExact(dict)) {  // one that may have an order of its own
    for (const auto part : {PyMapping_Keys, PyMapping_Values}) {
      PyObject* items = part(dict);
      const bool goes_on = items && each_item(items, visit);
      Py_XDECREF(items);
      if (!goes_on) return false;
    }
    return true;
  }
  PyObject *key, *value;
  for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &key, &value);) {
    if (!visit(key)) return false;
  }
  for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &key, &value);) {
    if (!visit(value)) return false;
  }
  return true;
}

// Contents of the cells of its closure, defaults, and those of keywords.
template <typename Visit>
bool each_of_function(PyObject* function, PyObject* missing, Visit visit) {
  PyObject* cells = PyFunction_GetClosure(function);
  for (Py_ssize_t i = 0; cells && i < PyTuple_GET_SIZE(cells); ++i) {
    PyObject* contents = PyCell_GET(PyTuple_GET_ITEM(cells, i));
    if (!visit(contents ? contents : missing)) return false;
  }
  PyObject* defaults = PyFunction_GetDefaults(function);
  if (defaults && !each_item(defaults, visit)) return false;
  PyObject* named = PyFunction_GetKwDefaults(function);
  PyObject *key, *value;
  for (Py_ssize_t at = 0; named && PyDict_Next(named, &at, &key, &value);) {
    if (!visit(value)) return false;
  }
  return true;
}

// place: (source, names, ...). Of a dict with names their values, `missing` where there is none;
// without names, None, all that a function, a dict, a list or a tuple holds.
template <typename Visit>
bool each_at(PyObject* place, PyObject* missing, Visit visit) {
  PyObject *source = PyTuple_GET_ITEM(place, 0), *names = PyTuple_GET_ITEM(place, 1);
  if (names == Py_None) {
    if (PyFunction_Check(source)) return each_of_function(source, missing, visit);
    return PyDict_Check(source) ? each_entry(source, visit) : each_item(source, visit);
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i) {
    PyObject* value = PyDict_GetItemWithError(source, PyTuple_GET_ITEM(names, i));
    if (!value && PyErr_Occurred()) return false;
    if (!visit(value ? value : missing)) return false;
  }
  return true;
}

inline bool is_place(PyObject* place) {
  if (!PyTuple_Check(place) || PyTuple_GET_SIZE(place) < 2) return false;
  PyObject *source = PyTuple_GET_ITEM(place, 0), *names = PyTuple_GET_ITEM(place, 1);
  return names == Py_None || (PyTuple_Check(names) && PyDict_Check(source));
}

template <typename Visit>
bool each_place(PyObject* places, PyObject* missing, Visit visit) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(places); ++i) {
    PyObject* place = PyList_GET_ITEM(places, i);
    if (!is_place(place)) {
      PyErr_SetString(PyExc_TypeError, "expected places: a source, and names of a dict or None");
      return false;
    }
    if (!each_at(place, missing, visit)) return false;
  }
  return true;
}

// braze._C.read(places, missing): a list of the values at a list of places; see each_at().
inline PyObject* read(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2 || !PyList_Check(args[0])) {
    PyErr_SetString(PyExc_TypeError, "read() takes a list and what stands for nothing");
    return nullptr;
  }
  return listed([&](auto visit) { return each_place(args[0], args[1], visit); });
}

// braze._C.reads(places, missing, values): whether read(places, missing) would have the same
// objects in the same order as the list of values.
inline PyObject* reads(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 3 || !PyList_Check(args[0]) || !PyList_Check(args[2])) {
    PyErr_SetString(PyExc_TypeError, "reads() takes a list, what stands for nothing and a list");
    return nullptr;
  }
  return are_those(args[2], [&](auto visit) { return each_place(args[0], args[1], visit); });
}

}  // namespace braze
