#include "kernels/cuda/cudnn_library.hpp"

#include <dlfcn.h>
#include <glob.h>

#include <filesystem>

namespace tessera::kernels::cuda::cudnn {
namespace {

constexpr const char* kName = "libcudnn.so.9";
constexpr const char* kInWheel = "nvidia/cudnn/lib";

template <class F>
bool find(void* handle, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(handle, name));
  return function != nullptr;
}

bool fill(Library& l, void* handle) {
  return find(handle, "cudnnGetVersion", l.get_version) &&
         find(handle, "cudnnGetErrorString", l.error_string) &&
         find(handle, "cudnnGetLastErrorString", l.last_error) &&
         find(handle, "cudnnCreate", l.create) && find(handle, "cudnnSetStream", l.set_stream) &&
         find(handle, "cudnnBackendCreateDescriptor", l.make) &&
         find(handle, "cudnnBackendDestroyDescriptor", l.end) &&
         find(handle, "cudnnBackendSetAttribute", l.set) &&
         find(handle, "cudnnBackendGetAttribute", l.get) &&
         find(handle, "cudnnBackendFinalize", l.finalize) &&
         find(handle, "cudnnBackendExecute", l.execute);
}

std::string file_of(const void* function, const std::string& otherwise) {
  Dl_info info{};
  return dladdr(function, &info) != 0 && info.dli_fname ? info.dli_fname : otherwise;
}

}  // namespace

std::vector<std::string> candidates(const std::string& cublas_file) {
  std::vector<std::string> files = {kName};
  std::error_code ignored;
  const std::filesystem::path cublas = std::filesystem::canonical(cublas_file, ignored);
  if (!cublas.empty()) {
    const std::filesystem::path folder = cublas.parent_path();
    files.push_back((folder / kName).string());
    // site-packages/nvidia/<cublas or cu13>/lib
    const std::filesystem::path packages = folder.parent_path().parent_path().parent_path();
    files.push_back((packages / kInWheel / kName).string());
  }
  for (const char* pattern :
       {"/usr/local/lib/python3*/*-packages/", "/usr/lib/python3*/*-packages/"}) {
    glob_t found{};
    if (glob((std::string(pattern) + kInWheel + "/" + kName).c_str(), 0, nullptr, &found) == 0)
      files.insert(files.end(), found.gl_pathv, found.gl_pathv + found.gl_pathc);
    globfree(&found);
  }
  return files;
}

Library open_library(const std::vector<std::string>& files) {
  Library library;
  for (const std::string& file : files) {
    void* const handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    const char* const refused = handle ? nullptr : dlerror();
    if (handle && fill(library, handle) && (library.version = library.get_version()) >= 91000) {
      library.file = file_of(reinterpret_cast<const void*>(library.execute), file);
      library.reason.clear();
      return library;
    }
    const std::string why = refused ? refused : file + " is not cuDNN 9.10 or newer";
    library.reason += (library.reason.empty() ? "" : "; ") + why;
    if (handle) dlclose(handle);
  }
  return library;
}

}  // namespace tessera::kernels::cuda::cudnn
