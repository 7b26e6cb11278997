// How many kernels an operation starts is what it declares (Cost::kernels), from which plans count
// those of a step: on the emulated GPU, whose kernels are a GPU's, counted one by one.
#include <map>

#include "tessera/device/device_context.hpp"
#include "tests/cuda/support.hpp"
#include "tests/promises/support.hpp"
#include "tests/support/catch.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

// Bodies of a GPU's operations run on the host as they are launched, so what was counted between
// two launches belongs to the first.
class Starts final : public Observer {
 public:
  explicit Starts(const Device& device) : device_(device) { device.context().add_observer(*this); }
  ~Starts() override { device_.context().remove_observer(*this); }
  Starts(const Starts&) = delete;
  Starts& operator=(const Starts&) = delete;

  void launched(StreamId stream, Tick, const Op& op) override {
    settle();
    const bool is_collective = op.cost.wire_bytes > 0;  // starts what its wire needs
    name_ = stream == StreamId::compute && !is_collective ? op.name : "";
    declared_ = op.cost.kernels;
  }
  // Operations that have started another number than they have declared, and what all have.
  std::vector<std::string> wrong;
  std::map<std::string, std::int64_t> most;
  void settle() {
    const std::int64_t now = counted(), started = now - before_;
    before_ = now;
    if (name_.empty()) return;
    most[name_] = std::max(most[name_], started);
    if (started != declared_)
      wrong.push_back(concat(name_, " starts ", started, ", declared are ", declared_));
  }

 private:
  static std::int64_t counted() {
    Counts now{};
    emulator(TESSERA_EMULATED_MODULE).counts(&now);
    return now.kernels + now.copies + now.fills;
  }

  const Device device_;
  std::string name_;
  std::int64_t declared_ = 0, before_ = counted();
};

}  // namespace

TEST_CASE("an operation starts as many kernels on a GPU as it declares") {
  World world = World::emulated(
      1, 3,
      {.device = {.kind = DeviceKind::cuda, .module = TESSERA_EMULATED_MODULE}, .threads = 1});
  const Device& device = world.device();
  Starts starts(device);
  {
    Trainee trainee(world, {.micro_batches = 2, .slice_bytes = 64}, 1);
    for (int k = 0; k < 2; ++k) trainee.step(k);
  }
  const auto normal = [&](const Shape& shape, DType dtype = f32) {
    return raw::cast(Tensor::normal(shape, 0, 1, 3, f32, device), dtype).require_grad();
  };
  for (const DType dtype : {f32, bf16})
    for (const std::int64_t rows : {3, 700}) {  // one piece of a sum, and several
      const Tensor x = normal({rows, 8}, dtype), w = normal({8}, dtype), b = normal({8}, dtype);
      Tensor y = layer_norm(x, w, b, 1e-5);
      y = linear(linear_gelu(y, normal({16, 8}, dtype), normal({16}, dtype)),
                 normal({8, 16}, dtype), b);
      y = y + embedding(normal({600, 8}, dtype), raw::cast(Tensor::arange(rows, i64, device), i32));
      y = index_add(y, 0, Tensor::arange(rows, i64, device), softmax(x, 1));
      sum(dropout(y, 0.5, 7, 0)).backward();
      raw::sumsq_into(Tensor::zeros({}, f32, device), normal({100 * rows}), raw::Accumulate::no);
      raw::reduce(raw::Reduction::max, x, 0);
      raw::sum_rows_into(Tensor::zeros({1536}, f32, device), normal({rows, 1536}, dtype), 1,
                         raw::Accumulate::no);  // wide enough for one launch
    }
  device.synchronize();
  starts.settle();
  for (const std::string& line : starts.wrong) {
    INFO(line);
    CHECK(false);
  }
  // Those that start several have been met doing so.
  for (const auto& [name, kernels] : std::map<std::string, std::int64_t>{{"order_by_id", 4},
                                                                         {"embedding_backward", 3},
                                                                         {"index_add", 2},
                                                                         {"attention_backward", 2},
                                                                         {"norm_backward", 2},
                                                                         {"sum", 2},
                                                                         {"sumsq", 2}}) {
    INFO(name);
    CHECK(starts.most[name] == kernels);
  }
  CHECK(starts.most.size() > 30);
}
