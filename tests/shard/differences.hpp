// What the units of ranks may differ in, and what a model says of it: ranks that are threads and
// ranks that are processes hear the same.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tests/shard/support.hpp"
#include "tests/support/launches.hpp"

namespace tessera::testing {

struct Difference {
  std::string says;
  std::function<void(ShardOptions&, Stack&)> made;  // of unit layers.1, on one rank
};

inline std::vector<Difference> differences() {
  using Options = ShardOptions&;
  return {
      {"unit 'layers.1' differs between ranks in prefetch_depth; here: ",
       [](Options o, Stack&) { o.prefetch_depth = 3; }},
      {"unit 'layers.1' differs between ranks in precision.reduce; here: ",
       [](Options o, Stack&) { o.precision = {.param = bf16, .reduce = bf16}; }},
      {"unit 'layers.1' differs between ranks in reshard_after_forward; here: ",
       [](Options o, Stack&) { o.reshard_after_forward = Reshard::never; }},
      {"unit 'layers.1' differs between ranks in precision.param; here: ",
       [](Options o, Stack&) { o.precision = {.param = f16, .reduce = f32}; }},
      {"unit 'layers.1' differs between ranks in precision.output; here: ",
       [](Options o, Stack&) { o.precision.output = f32; }},
      {"unit 'layers.1' differs between ranks in precision.cast_forward_inputs; here: ",
       [](Options o, Stack&) { o.precision.cast_forward_inputs = false; }},
      {"unit 'layers.1' differs between ranks in forwards_ahead; here: ",
       [](Options o, Stack&) { o.forwards_ahead = 5; }},
      {"unit 'layers.1' differs between ranks in slice_bytes; here: ",
       [](Options o, Stack&) { o.slice_bytes = 5; }},
      {"unit 'layers.1' differs between ranks in slices_wait; here: ",
       [](Options o, Stack&) { o.slices_wait = true; }},
      {"unit 'layers.1' differs between ranks in piece_bytes; here: ",
       [](Options o, Stack&) { o.piece_bytes = 5; }},
      {"unit 'layers.1' differs between ranks in packed_bytes; here: ",
       [](Options o, Stack&) { o.packed_bytes = 5; }},
      {"unit 'layers.1' differs between ranks in reductions_in_flight; here: ",
       [](Options o, Stack&) { o.reductions_in_flight = 3; }},
      {"unit 'layers.1' differs between ranks in parameters; here: ",
       [](Options, Stack& model) { model.layers[1].weight.set_block_rows(2); }},
      {"unit 'layers.1' differs between ranks in parameters; here: ",
       [](Options, Stack& model) { model.layers[1].bias.set_dtype(bf16); }},
      {"unit 'layers.0' differs between ranks in parameters; here: ",
       [](Options, Stack& model) { model.layers[0].bias.freeze(); }},
  };
}

// What the first call of a model says whose units are `difference` on rank `odd` alone; also where
// it submits anything but the maxima by which ranks compare, before it says so.
inline std::string heard_of(const Difference& difference, const World& world,
                            const DeviceMesh& mesh, int odd) {
  Stack model({5, 4, 3});
  model.layers[1].bias.freeze();
  ShardOptions options{.mesh = mesh, .precision = {.param = bf16}};
  fully_shard(model.layers[0], options);
  if (world.rank() == odd) difference.made(options, model);
  fully_shard(model.layers[1], options);
  fully_shard(model, {.mesh = mesh});
  nn::init(model, {3}, world.device());
  const Tensor rows = Tensor::zeros({1, 5}, f32, world.device());
  const Launches launches(world.device());
  std::string heard = thrown_by([&] { model(rows); });
  for (const auto& [name, count] : launches.counts())
    if (!name.starts_with("compare units"))
      heard = concat("submits '", name, "' before it says: ", heard);
  return heard;
}

}  // namespace tessera::testing
