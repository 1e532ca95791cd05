// braze._C: the only part that depends on the Python version. Loads the op libraries and asks them
// for their kernels and the CUDA device's properties; hands them what tuning found.
#include <dlfcn.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/modules.h"
#include "bindings/places.h"
#include "bindings/tensors.h"
#include "exports.h"
#include "launchers/common/registry.h"
#include "launchers/conv_bn_relu2d.h"
#include "launchers/conv_bn_relu_max_pool2d.h"
#include "launchers/graph.h"
#include "launchers/muon.h"
#include "libraries/libraries.h"

namespace py = pybind11;

namespace {

class Library {
 public:
  // RTLD_LOCAL: nothing links against the library; its static initialisers register the ops.
  explicit Library(const std::string& path) : handle_(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (!handle_) throw py::import_error(dlerror());
  }

  py::list kernels() const {
    const auto count = symbol<int()>("braze_kernel_count");
    const auto info = symbol<const braze::KernelInfo*(int)>("braze_kernel_info");
    py::list result;
    for (int i = 0; i < count(); ++i) {
      const braze::KernelInfo& k = *info(i);
      py::dict d;
      d["op"] = k.op;
      d["name"] = k.name;
      d["dtypes"] = k.dtypes;
      d["arch"] = k.arch;
      d["shipped"] = k.shipped;
      d["note"] = k.note;
      result.append(d);
    }
    return result;
  }

  // Only in libbraze_cuda. Name -> version and, where the library cannot be used, the reason (""
  // where it can).
  py::dict vendor() const {
    const auto count = symbol<int()>("braze_vendor_count");
    const auto get = symbol<void(int, BrazeVendorLibrary*)>("braze_vendor_library");
    py::dict result;
    for (int i = 0; i < count(); ++i) {
      BrazeVendorLibrary library{};
      get(i, &library);
      py::dict d;
      d["version"] = library.version;
      d["missing"] = library.missing;
      result[library.name] = d;
    }
    return result;
  }

  py::dict device_attributes(int device) const {
    BrazeDeviceAttributes a{};
    const int error =
        symbol<int(int, BrazeDeviceAttributes*)>("braze_device_attributes")(device, &a);
    if (error) {
      throw std::runtime_error("CUDA error " + std::to_string(error) + " while reading device " +
                               std::to_string(device));
    }
    py::dict d;
    d["sm_count"] = a.sm_count;
    d["sm_clock_khz"] = a.sm_clock_khz;
    d["memory_clock_khz"] = a.memory_clock_khz;
    d["memory_bus_bits"] = a.memory_bus_bits;
    d["l2_bytes"] = a.l2_bytes;
    d["shared_bytes_per_block"] = a.shared_bytes_per_block;
    return d;
  }

  // op: "matmul" or "conv2d". problem: the words of its Problem in ops/tuned.h.
  void set_tuned(const std::string& op, const std::vector<int64_t>& problem,
                 const std::string& choice, bool measured) const {
    const BrazeTuning& table = tuning(op);
    if (problem.size() != static_cast<size_t>(table.words)) {
      throw std::invalid_argument(op + ": expected a problem of " + std::to_string(table.words) +
                                  " words, but got " + std::to_string(problem.size()));
    }
    table.set(problem.data(), choice.c_str(), measured);
  }

  void clear_tuned() const {
    for (const char* op : kTunedOps) tuning(op).clear();
  }

  // Tuples (problem, choice, measured).
  py::list tuned(const std::string& op) const {
    const BrazeTuning& table = tuning(op);
    Found found{table.words, py::list()};
    const auto append = [](void* state, const int64_t* words, const char* choice, int measured) {
      Found& into = *static_cast<Found*>(state);
      into.list.append(py::make_tuple(into.tuple(words), choice, measured != 0));
    };
    table.for_each(append, &found);
    return found.list;
  }

  // How often this library has planned: not for problems that it had seen before.
  int64_t plans_made() const { return symbol<int64_t()>("braze_plans_made")(); }

  // How many of a GPU's multiprocessors kernels count on; 0: all.
  void set_multiprocessors(int count) const {
    symbol<void(int)>("braze_set_multiprocessors")(count);
  }

  // What the CPU library keeps for later calls of the thread that asks.
  int64_t kept_workspace_bytes() const { return symbol<int64_t()>("braze_kept_workspace_bytes")(); }

  void record(bool on) const {
    for (const char* op : kTunedOps) tuning(op).record(on);
  }

  py::list recorded(const std::string& op) const {
    const BrazeTuning& table = tuning(op);
    Found found{table.words, py::list()};
    const auto append = [](void* state, const int64_t* words) {
      Found& into = *static_cast<Found*>(state);
      into.list.append(into.tuple(words));
    };
    table.for_each_recorded(append, &found);
    return found.list;
  }

 private:
  static constexpr const char* kTunedOps[] = {"matmul", "conv2d"};

  struct Found {
    int words;
    py::list list;

    py::tuple tuple(const int64_t* problem) const {
      py::tuple result(words);
      for (int i = 0; i < words; ++i) result[i] = problem[i];
      return result;
    }
  };

  const BrazeTuning& tuning(const std::string& op) const {
    const auto get = symbol<const BrazeTuning*(const char*)>("braze_tuning");
    const BrazeTuning* const table = get(op.c_str());
    if (!table) throw std::invalid_argument("no op of this name is tuned: " + op);
    return *table;
  }

  template <typename Signature>
  Signature* symbol(const char* name) const {
    void* address = dlsym(handle_, name);
    if (!address) throw std::runtime_error(std::string("symbol not found: ") + name);
    return reinterpret_cast<Signature*>(address);
  }

  void* handle_;  // never closed: ops stay registered for the life of the process
};

// What Python has to know of the kernels' limits.
py::dict limits() {
  py::list filters;
  for (const braze::SmallKFilter& f : braze::kSmallKFilters) {
    filters.append(py::make_tuple(f.r, f.s, f.c));
  }
  py::dict d;
  d["patch_filters"] = filters;  // height, width, channels
  d["patch_moment_sets"] = braze::kSmallKMostSets;
  d["muon_squares"] = braze::kMuonSquares;  // elements
  d["pool_tiles"] = braze::kBnPoolMostTiles;
  d["urgent_priority"] = braze::kUrgentPriority;  // of a step's main stream
  d["library_candidates"] = braze::vendor::kMaxCandidates;
  return d;
}

PyMethodDef of_arguments(const char* name,
                         PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)),
          METH_FASTCALL, nullptr};
}

// By Python's own interface, whose calls take a fifth of pybind11's.
PyMethodDef functions[] = {{"unwatched", braze::unwatched, METH_O, nullptr},
                           of_arguments("share", braze::share),
                           of_arguments("held", braze::held),
                           of_arguments("holds", braze::holds),
                           {"addresses", braze::addresses, METH_O, nullptr},
                           of_arguments("state", braze::state),
                           {"have_gradients", braze::have_gradients, METH_O, nullptr},
                           of_arguments("read", braze::read),
                           of_arguments("reads", braze::reads),
                           of_arguments("same", braze::same),
                           {}};

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.attr("limits") = limits();
  braze::find_data_pointer();
  if (PyModule_AddFunctions(m.ptr(), functions) < 0) throw py::error_already_set();
  py::class_<Library>(m, "Library")
      .def(py::init<const std::string&>())
      .def("kernels", &Library::kernels)
      .def("vendor", &Library::vendor)
      .def("device_attributes", &Library::device_attributes)
      .def("set_tuned", &Library::set_tuned)
      .def("clear_tuned", &Library::clear_tuned)
      .def("tuned", &Library::tuned)
      .def("plans_made", &Library::plans_made)
      .def("set_multiprocessors", &Library::set_multiprocessors)
      .def("kept_workspace_bytes", &Library::kept_workspace_bytes)
      .def("record", &Library::record)
      .def("recorded", &Library::recorded);
}
