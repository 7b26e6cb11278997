#include "runtime/comm/nccl/nccl_library.hpp"

#include <dlfcn.h>

#include "runtime/device/open_driver.hpp"
#include "tessera/base/error.hpp"

namespace tessera::comm {
namespace {

constexpr const char* kModule = "libtessera-nccl.so";

void* load(const std::string& file, const std::string& looked) {
  if (void* const handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE))
    return handle;
  const char* const why = dlerror();
  throw CommError(concat("World::nccl: the module ", file, " can't be loaded",
                         looked.empty() ? "" : ", and is not in ", looked, " (",
                         why ? why : "no reason given",
                         "); build Tessera where nccl.h is, or run ranks as threads (--ranks N)"));
}

}  // namespace

const kernels::NcclDriver& open_nccl(const NcclOptions& options, kernels::NcclLibrary& library) {
  std::string looked;
  const std::string file =
      options.module.empty() ? find_module(kModule, "kernels/nccl", looked) : options.module;
  void* const handle = load(file, file == kModule ? looked : "");
  const auto entry = reinterpret_cast<kernels::NcclEntry>(dlsym(handle, kernels::kNcclSymbol));
  const kernels::NcclDriver* const nccl = entry ? entry(kernels::kNcclDriverVersion) : nullptr;
  if (!nccl || nccl->version != kernels::kNcclDriverVersion ||
      nccl->driver_bytes != sizeof(kernels::NcclDriver))
    throw CommError(concat("World::nccl: '", file, "' is no ", kModule,
                           " of this version of Tessera; build library and module together"));
  if (const char* const error = nccl->open(options.library.c_str(), &library))
    throw CommError(concat("World::nccl: ", error));
  if (options.gather_policy == GatherPolicy::zero && library.version < kZeroCtasFrom)
    throw CommError(concat("World::nccl: gather_policy is zero, which NCCL can from 2.28 on, and ",
                           library.file, " is ", nccl_version(library.version),
                           "; install a newer one, or leave the policy out"));
  return *nccl;
}

std::string nccl_version(int v) { return concat(v / 10000, '.', v / 100 % 100, '.', v % 100); }

}  // namespace tessera::comm
