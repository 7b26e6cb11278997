// What the CUDA kernels refuse before anything is queued.
#include <string>

#include "tests/kernels/case.hpp"
#include "tests/support/catch.hpp"

extern "C" const tessera::Driver* tessera_driver(std::uint32_t version);

using namespace kernel_test;

TEST_CASE("a shape that a kernel refuses is one line with a remedy, and nothing is queued",
          "[cuda]") {
  const Driver* driver = tessera_driver(kDriverVersion);
  REQUIRE(driver);
  const Kernels& k = kernels_of(driver);
  Target target{};
  target.driver = driver;  // without a stream what is queued would run at once, on null
  const std::int64_t many = (std::int64_t{1} << 31) + 1;
  const auto refusal = [&](auto call) {
    Exec exec = target.exec();
    call(exec);
    return std::string(exec.error ? exec.error : "");
  };
  const auto softmax = [&](Exec& e) {
    SoftmaxArgs args{};
    args.rows = 1, args.cols = many, args.dtype = f32;
    k.softmax(args, e);
  };
  const auto norm = [&](Exec& e) {
    RmsNormArgs args{};
    args.rows = 1, args.cols = many, args.dtype = f32;
    k.rms_norm(args, e);
  };
  for (const std::string& line : {refusal(softmax), refusal(norm)})
    CHECK_THAT(line, Catch::Contains("rows of more than 2^31") && Catch::Contains("use shorter"));
  const std::string peers = refusal([&](Exec& e) {
    PeersArgs args{};
    args.count = 1, args.n_inputs = 449, args.dtype = f32;
    k.reduce_peers(args, e);
  });
  CHECK_THAT(peers, Catch::Contains("more than 448 peers") && Catch::Contains("use fewer ranks"));
}
