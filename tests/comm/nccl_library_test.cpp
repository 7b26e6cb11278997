// NCCL's own library behind the module, on a machine without a GPU: which one is found, what it
// says, and how it is refused. Each case has a process of its own, which has one NCCL.
#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <iostream>

#include "runtime/comm/nccl/nccl_library.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/forked.hpp"

using namespace tessera;
using Catch::Matchers::Contains;

namespace {

// What a process says that has opened NCCL.
std::string in_a_process(const NcclOptions& options,
                         const std::function<std::string(const kernels::NcclDriver&,
                                                         const kernels::NcclLibrary&)>& body) {
  return tessera::testing::run_forked(1,
                                      [&](int) {
                                        kernels::NcclLibrary library{};
                                        return body(comm::open_nccl(options, library), library);
                                      })[0]
      .said;
}

const NcclOptions kReal{.module = TESSERA_NCCL_MODULE, .library = {}};

bool has_nccl() {
  const std::string said = in_a_process(kReal, [](const auto&, const auto&) { return "found"; });
  if (said != "found") std::cout << "  skipped: " << said << '\n';
  return said == "found";
}

}  // namespace

TEST_CASE("nccl: the library that this machine has is found, and says its version", "[comm]") {
  if (!has_nccl()) return;
  const std::string said = in_a_process(kReal, [](const auto&, const auto& library) {
    return concat(library.file, ' ', comm::nccl_version(library.version));
  });
  CHECK_THAT(said, Contains("libnccl.so") && Contains(" 2."));
}

TEST_CASE("nccl: without a driver an id is made or refused in a line, and no rank can join",
          "[comm]") {
  if (!has_nccl()) return;
  const std::string said = in_a_process(kReal, [](const auto& nccl, const auto&) -> std::string {
    kernels::NcclId id{}, other{};
    if (const char* const error = nccl.make_id(&id)) return error;
    if (const char* const error = nccl.make_id(&other)) return error;
    if (std::memcmp(&id, &other, sizeof id) == 0) return "two ids are one";
    void* comm = nullptr;
    const char* error = nccl.join(&id, 1, 0, &comm);
    for (bool is_busy = true; !error && is_busy;) error = nccl.poll(comm, &is_busy);
    return error ? error : "joined";
  });
  INFO(said);
  CHECK(said.starts_with("nccl"));
  CHECK_THAT(said, Contains("error") || Contains("CUDA"));
  CHECK(std::ranges::count(said, '\n') == 0);
}

TEST_CASE("nccl: a module or library that is absent or another is refused in one line", "[comm]") {
  const auto said_of = [](const NcclOptions& options) {
    return in_a_process(options, [](const auto&, const auto&) { return "taken"; });
  };
  const std::string no_module = said_of({.module = "/nowhere/libtessera-nccl.so"}),
                    other_module = said_of({.module = "libm.so.6"}),
                    no_library = said_of({.module = TESSERA_NCCL_MODULE, .library = "/nowhere"}),
                    other_library =
                        said_of({.module = TESSERA_NCCL_MODULE, .library = "libm.so.6"});
  CHECK_THAT(no_module, Contains("/nowhere/libtessera-nccl.so") && Contains("--ranks"));
  CHECK_THAT(other_module, Contains("no libtessera-nccl.so of this version"));
  CHECK_THAT(no_library, Contains("/nowhere") && Contains("TESSERA_NCCL"));
  CHECK_THAT(other_library, Contains("libm.so.6 has no function nccl"));
  for (const std::string& line : {no_module, other_module, no_library, other_library}) {
    INFO(line);
    CHECK(line.starts_with("threw: "));
    CHECK(std::ranges::count(line, '\n') == 0);
  }
}
