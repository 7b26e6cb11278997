// A Python module by nanobind: it trains a sharded model from batches of NumPy, which it reads
// where they lie. Ranks are threads of the Python process.
//
//   python     for x, y in batches: ─┐ x, y of the next step         losses, weights
//   rank 0     lock Python, take ────┘ │ barrier │ its rows │ step │ barrier │ ...
//   rank 1     ─────────────────────── │ barrier │ its rows │ step │ barrier │ ...
//
// README.md, "A Python module", has the two commands that build and run it.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <tessera/tessera.hpp>

namespace nb = nanobind;
namespace ts = tessera;

namespace {

using Array = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// What one rank reads of an array, the same number of rows on each rank: the memory of NumPy. It is
// read until the step has ended, and the array lives as long.
ts::Tensor rows_of(const Array& array, const ts::World& world) {
  struct Lent {
    ts::dlpack::DLManagedTensor managed{};
    std::int64_t shape[2];
  };
  const auto rows = static_cast<std::int64_t>(array.shape(0)) / world.size(),
             columns = static_cast<std::int64_t>(array.shape(1));
  auto lent = std::make_unique<Lent>();
  lent->shape[0] = rows;
  lent->shape[1] = columns;
  const float* const first = array.data() + world.rank() * rows * columns;
  lent->managed.dl_tensor = {.data = const_cast<float*>(first),  // read, never written
                             .device = {1, 0},
                             .ndim = 2,
                             .dtype = {2, 32, 1},
                             .shape = lent->shape,
                             .strides = nullptr,
                             .byte_offset = 0};
  lent->managed.manager_ctx = lent.get();
  lent->managed.deleter = [](ts::dlpack::DLManagedTensor* self) {
    delete static_cast<Lent*>(self->manager_ctx);
  };
  const ts::Tensor view = ts::from_dlpack(
      ts::dlpack::Owned<ts::dlpack::DLManagedTensor>(&lent.release()->managed), world.device());
  TESSERA_EXPECT(view.data() == reinterpret_cast<const std::byte*>(first), "a batch was copied");
  return view;
}

// Trains y = x W^T, W [out, in], by SGD on the mean square of the error. `batches` gives pairs of
// f32 arrays [rows, in] and [rows, out]. Returns the losses, and W as it ends.
std::pair<std::vector<double>, std::vector<float>> fit(const nb::object& batches,
                                                       const Array& start, double lr, int ranks) {
  std::vector<double> losses;
  std::vector<float> weights(start.size());
  std::optional<std::pair<Array, Array>> batch;  // of this step; none: the end
  const nb::object next = nb::iter(batches);
  const auto take = [&] {
    const nb::gil_scoped_acquire lock;
    batch.reset();
    PyObject* const item = PyIter_Next(next.ptr());
    if (!item && PyErr_Occurred()) throw nb::python_error();
    if (!item) return;
    const nb::object pair = nb::steal(item);
    batch.emplace(nb::cast<Array>(pair[0]), nb::cast<Array>(pair[1]));
    const std::size_t rows = batch->first.shape(0);
    TESSERA_EXPECT(rows == batch->second.shape(0) && rows % static_cast<std::size_t>(ranks) == 0,
                   "fit: x has ", rows, " rows and y ", batch->second.shape(0),
                   "; give as many, which ", ranks, " ranks divide");
  };
  const nb::gil_scoped_release unlocked;  // ranks lock it where they need Python
  ts::run_local(ranks, {}, [&](ts::World& world) {
    ts::nn::Linear model(static_cast<std::int64_t>(start.shape(1)),
                         static_cast<std::int64_t>(start.shape(0)), {.bias = false});
    ts::fully_shard(model, {.mesh = ts::DeviceMesh::flat(world)});
    model.materialize(world.device());
    model.load(ts::StateDict{
        {"weight", ts::Tensor::from(std::span<const float>(start.data(), start.size()),
                                    model.weight.shape(), world.device())}});
    ts::optim::SGD optimizer(model.parameters(), {.lr = lr});
    while (true) {
      if (world.rank() == 0) take();
      world.barrier();
      if (!batch) break;
      const ts::Tensor x = rows_of(batch->first, world), y = rows_of(batch->second, world);
      const ts::Tensor loss = ts::mse_loss(model(x), y);
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
      const double mean = world.sum(loss.item()) / world.size();
      if (world.rank() == 0) losses.push_back(mean);
      world.device().synchronize();  // nobody reads the arrays any more
      world.barrier();
    }
    ts::for_each_full_parameter(model, [&](const std::string&, const ts::Tensor& whole) {
      const std::vector<float> values = whole.to_vector<float>();
      if (world.rank() == 0) weights = values;
    });
  });
  return {losses, weights};
}

}  // namespace

NB_MODULE(trainer, module) {
  module.def("fit", [](const nb::object& batches, const Array& start, double lr, int ranks) {
    auto [losses, weights] = fit(batches, start, lr, ranks);
    return nb::make_tuple(losses, weights);
  });
}
