// Of Python objects, what the functions beside this file share.
#pragma once
#include <Python.h>

namespace braze {

inline PyObject* interned(const char* name) { return PyUnicode_InternFromString(name); }

// Objects one after the other, compared by identity with those of a list.
class Expected {
 public:
  explicit Expected(PyObject* values) : values_(values) {}

  bool is_next(PyObject* value) {
    return at_ < PyList_GET_SIZE(values_) && PyList_GET_ITEM(values_, at_++) == value;
  }

  bool is_end() const { return at_ == PyList_GET_SIZE(values_); }

 private:
  PyObject* values_;  // borrowed
  Py_ssize_t at_ = 0;
};

}  // namespace braze
