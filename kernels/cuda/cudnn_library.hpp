// cuDNN, opened when attention first runs: the module links none of it, and works without it.
// Called by cudnn_graph.hpp and cudnn.cpp.
//
// Source: NVIDIA cuDNN, "Backend API", and <cudnn_graph.h>.
#pragma once

#include <cudnn_graph.h>

#include <stdexcept>
#include <string>
#include <vector>

namespace tessera::kernels::cuda::cudnn {

// The functions that are used, and where they came from. Stays open until the process ends.
struct Library {
  std::string file;         // which was opened; empty where none could be
  std::string reason;       // then: why not, of each file
  std::size_t version = 0;  // 91900 for 9.19.0

  decltype(&cudnnGetVersion) get_version = nullptr;
  decltype(&cudnnGetErrorString) error_string = nullptr;
  decltype(&cudnnGetLastErrorString) last_error = nullptr;
  decltype(&cudnnCreate) create = nullptr;
  decltype(&cudnnSetStream) set_stream = nullptr;
  decltype(&cudnnBackendCreateDescriptor) make = nullptr;
  decltype(&cudnnBackendDestroyDescriptor) end = nullptr;
  decltype(&cudnnBackendSetAttribute) set = nullptr;
  decltype(&cudnnBackendGetAttribute) get = nullptr;
  decltype(&cudnnBackendFinalize) finalize = nullptr;
  decltype(&cudnnBackendExecute) execute = nullptr;

  explicit operator bool() const noexcept { return !file.empty(); }

  // What the log is told where there is none.
  std::string absence() const {
    return "runs by our own kernels, several times slower, because there is no cuDNN 9.10 (" +
           reason.substr(0, 300) + "); install it, or name its folder in LD_LIBRARY_PATH";
  }

  // Throws: std::runtime_error with cuDNN's own words.
  void check(cudnnStatus_t status, const char* what) const {
    if (status == CUDNN_STATUS_SUCCESS) return;
    char more[256] = {};
    last_error(more, sizeof more);
    throw std::runtime_error(std::string(what) + ": " + error_string(status) + " " + more);
  }
};

// Where cuDNN may lie, in order: where the system looks, beside cuBLASLt (`cublas_file`), and in
// the folder of a Python wheel, nvidia/cudnn/lib, beside cuBLASLt's wheel or the system's packages.
std::vector<std::string> candidates(const std::string& cublas_file);

// The first that opens, of version 9.10 or newer: a mask of -inf is safe since.
Library open_library(const std::vector<std::string>& files);

}  // namespace tessera::kernels::cuda::cudnn
