// What is asked of every parameter and buffer at each call of a captured function or step.
#pragma once
#include <Python.h>

#include <cstdint>
#include <string>

#include "bindings/modules.h"
#include "bindings/objects.h"

namespace braze {

using DataPointer = void*(PyObject* tensor);

// The function that torch gives the wrappers of its compiled kernels; null where it has none. Set
// when braze._C is imported.
inline DataPointer* data_pointer = nullptr;

inline void find_data_pointer() {
  PyObject* guards = PyImport_ImportModule("torch._C._dynamo.guards");
  PyObject* address =
      guards ? PyObject_GetAttrString(guards, "_torchinductor_pyobject_tensor_data_ptr") : nullptr;
  void* found = address ? PyLong_AsVoidPtr(address) : nullptr;
  Py_XDECREF(address);
  Py_XDECREF(guards);
  PyErr_Clear();
  data_pointer = reinterpret_cast<DataPointer*>(found);
}

// tensor.data_ptr(), or -1 with an exception set. The method takes five times as long as torch's
// function; it is for tensors that the function refuses, and for a torch that lacks it.
inline int64_t address_of(PyObject* tensor) {
  static PyObject* const kMethod = interned("data_ptr");
  if (data_pointer) {
    try {
      return reinterpret_cast<intptr_t>(data_pointer(tensor));
    } catch (...) {
      PyErr_Clear();
    }
  }
  PyObject* address = PyObject_CallMethodNoArgs(tensor, kMethod);
  if (!address) return -1;
  const auto value = static_cast<int64_t>(PyLong_AsUnsignedLongLongMask(address));
  Py_DECREF(address);
  return value;
}

inline bool append_address(std::string& to, PyObject* tensor) {
  const int64_t address = address_of(tensor);
  if (address == -1 && PyErr_Occurred()) return false;
  to.append(reinterpret_cast<const char*>(&address), sizeof address);
  return true;
}

inline bool append_flag(std::string& to, PyObject* value) {
  const int flag = PyObject_IsTrue(value);
  if (flag >= 0) to.push_back(static_cast<char>(flag));
  return flag >= 0;
}

inline bool append_attribute(std::string& to, PyObject* object, PyObject* name) {
  PyObject* value = PyObject_GetAttr(object, name);
  const bool appended = value && append_flag(to, value);
  Py_XDECREF(value);
  return appended;
}

// Whether a module trains, and where its buffers lie: out of its __dict__, where nearly all modules
// have the former, in half the time.
inline bool append_module(std::string& modes, std::string& buffers, PyObject* module) {
  static PyObject* const kTraining = interned("training");
  static PyObject* const kBuffers = interned("_buffers");
  PyObject* own = PyObject_GenericGetDict(module, nullptr);
  if (!own) return false;
  PyObject* training = PyDict_GetItemWithError(own, kTraining);  // borrowed
  bool appended = training ? append_flag(modes, training)
                           : !PyErr_Occurred() && append_attribute(modes, module, kTraining);
  PyObject* held = appended ? dict_of(own, kBuffers) : nullptr;
  appended = held != nullptr;
  PyObject *name, *buffer;
  for (Py_ssize_t at = 0; appended && PyDict_Next(held, &at, &name, &buffer);) {
    appended = buffer == Py_None || append_address(buffers, buffer);
  }
  Py_DECREF(own);
  return appended;
}

inline PyObject* as_bytes(const std::string& contents) {
  return PyBytes_FromStringAndSize(contents.data(), static_cast<Py_ssize_t>(contents.size()));
}

// braze._C.state(params, modules): (bytes, bytes). The first are, of the parameters, the addresses
// and whether they require grad, of the modules whether they train; the second are the addresses of
// the modules' buffers.
inline PyObject* state(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2 || !PyList_Check(args[0]) || !PyList_Check(args[1])) {
    PyErr_SetString(PyExc_TypeError, "state() takes two lists");
    return nullptr;
  }
  static PyObject* const kRequiresGrad = interned("requires_grad");
  std::string result, buffers;
  result.reserve(PyList_GET_SIZE(args[0]) * (sizeof(int64_t) + 1) + PyList_GET_SIZE(args[1]));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[0]); ++i) {
    PyObject* tensor = PyList_GET_ITEM(args[0], i);
    if (!append_address(result, tensor)) return nullptr;
    if (!append_attribute(result, tensor, kRequiresGrad)) return nullptr;
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[1]); ++i) {
    if (!append_module(result, buffers, PyList_GET_ITEM(args[1], i))) return nullptr;
  }
  return Py_BuildValue("(NN)", as_bytes(result), as_bytes(buffers));
}

// braze._C.addresses(tensors): where the tensors of a list lie, as bytes.
inline PyObject* addresses(PyObject*, PyObject* tensors) {
  if (!PyList_Check(tensors)) {
    PyErr_SetString(PyExc_TypeError, "addresses() takes a list");
    return nullptr;
  }
  std::string result;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) {
    if (!append_address(result, PyList_GET_ITEM(tensors, i))) return nullptr;
  }
  return as_bytes(result);
}

// braze._C.have_gradients(pairs): whether parameters have these gradients, each the same object or
// None. Of a list of tuples (parameter, gradient).
inline PyObject* have_gradients(PyObject*, PyObject* pairs) {
  static PyObject* const kGrad = interned("grad");
  bool fits = PyList_Check(pairs), equal = true;
  for (Py_ssize_t i = 0; fits && equal && i < PyList_GET_SIZE(pairs); ++i) {
    PyObject* pair = PyList_GET_ITEM(pairs, i);
    fits = PyTuple_Check(pair) && PyTuple_GET_SIZE(pair) == 2;
    if (!fits) break;
    PyObject* gradient = PyObject_GetAttr(PyTuple_GET_ITEM(pair, 0), kGrad);
    if (!gradient) return nullptr;
    equal = gradient == PyTuple_GET_ITEM(pair, 1);
    Py_DECREF(gradient);
  }
  if (fits) return PyBool_FromLong(equal);
  PyErr_SetString(PyExc_TypeError, "have_gradients() takes a list of pairs");
  return nullptr;
}

}  // namespace braze
