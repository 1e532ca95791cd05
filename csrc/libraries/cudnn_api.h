// cuDNN's backend (graph) API: the entry points, looked up at run time, and an owner for its one
// kind of object, the descriptor: created, given attributes, finalized, and constant from then on.
#pragma once

#include <cudnn.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "libraries/loader.h"

namespace braze::vendor {

struct CudnnError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct CudnnApi {
  std::string missing;
  decltype(cudnnCreate)* create;
  decltype(cudnnSetStream)* set_stream;
  decltype(cudnnGetVersion)* get_version;
  decltype(cudnnGetErrorString)* get_error_string;
  decltype(cudnnBackendCreateDescriptor)* create_descriptor;
  decltype(cudnnBackendDestroyDescriptor)* destroy_descriptor;
  decltype(cudnnBackendSetAttribute)* set_attribute;
  decltype(cudnnBackendGetAttribute)* get_attribute;
  decltype(cudnnBackendFinalize)* finalize;
  decltype(cudnnBackendExecute)* execute;

  CudnnApi() {
    void* lib = open_library("libcudnn.so." + std::to_string(CUDNN_MAJOR), &missing);
    lib&& load_symbol(lib, "cudnnCreate", &create, &missing) &&
        load_symbol(lib, "cudnnSetStream", &set_stream, &missing) &&
        load_symbol(lib, "cudnnGetVersion", &get_version, &missing) &&
        load_symbol(lib, "cudnnGetErrorString", &get_error_string, &missing) &&
        load_symbol(lib, "cudnnBackendCreateDescriptor", &create_descriptor, &missing) &&
        load_symbol(lib, "cudnnBackendDestroyDescriptor", &destroy_descriptor, &missing) &&
        load_symbol(lib, "cudnnBackendSetAttribute", &set_attribute, &missing) &&
        load_symbol(lib, "cudnnBackendGetAttribute", &get_attribute, &missing) &&
        load_symbol(lib, "cudnnBackendFinalize", &finalize, &missing) &&
        load_symbol(lib, "cudnnBackendExecute", &execute, &missing);
  }
};

inline const CudnnApi& cudnn_api() {
  static const CudnnApi instance;
  return instance;
}

inline void check_cudnn(cudnnStatus_t status, const char* what) {
  if (status != CUDNN_STATUS_SUCCESS) {
    throw CudnnError(std::string("cudnn: ") + what + ": " + cudnn_api().get_error_string(status));
  }
}

class Descriptor {
 public:
  explicit Descriptor(cudnnBackendDescriptorType_t type) {
    check_cudnn(cudnn_api().create_descriptor(type, &raw_), "create descriptor");
  }
  Descriptor(Descriptor&& other) noexcept : raw_(std::exchange(other.raw_, nullptr)) {}
  Descriptor(const Descriptor&) = delete;
  ~Descriptor() {
    if (raw_) cudnn_api().destroy_descriptor(raw_);
  }

  cudnnBackendDescriptor_t raw() const { return raw_; }

  template <typename T>
  Descriptor& set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                  const T& value) {
    return set_array(name, type, 1, &value);
  }
  Descriptor& set(cudnnBackendAttributeName_t name, const std::vector<int64_t>& values) {
    return set_array(name, CUDNN_TYPE_INT64, static_cast<int64_t>(values.size()), values.data());
  }
  Descriptor& set(cudnnBackendAttributeName_t name, const Descriptor& value) {
    return set_array(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &value.raw_);
  }
  Descriptor& set_array(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                        int64_t count, const void* values) {
    check_cudnn(cudnn_api().set_attribute(raw_, name, type, count, values), "set attribute");
    return *this;
  }

  // Reads up to `count` values; returns how many there are.
  int64_t get(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, int64_t count,
              void* values) const {
    int64_t found = 0;
    check_cudnn(cudnn_api().get_attribute(raw_, name, type, count, &found, values),
                "get attribute");
    return found;
  }

  // Throws where cuDNN cannot do what the attributes ask for.
  Descriptor& finalize(const char* what) {
    check_cudnn(cudnn_api().finalize(raw_), what);
    return *this;
  }

 private:
  cudnnBackendDescriptor_t raw_ = nullptr;
};

}  // namespace braze::vendor
