// Twenty bugs that students make, each run as it is and mended. What has to name it does, or this
// program fails; mended, nothing has anything to say.
#include "tests/tour/bugs/bugs.hpp"

#include <array>
#include <iomanip>
#include <iostream>

#include "tests/tour/check.hpp"

namespace tessera::tour {

bool Run::is_mended(std::source_location at) {
  const std::string_view path = at.file_name();
  const std::lock_guard lock(mutex_);
  line_to_mend = concat(path.substr(path.rfind('/') + 1), ':', at.line());
  return version_ == Version::mended;
}

void Run::on_ranks(const std::function<void(World&)>& body) {
  // Each operation runs where it is launched, so that no bug needs luck to show.
  const auto checker = RaceChecker::make();
  const WorldOptions options{
      .executor = ExecutorKind::inlined, .race_checker = checker, .timeout_seconds = 20};
  try {
    run_local(2, options, [&](World& world) {
      body(world);
      world.device().synchronize();
    });
  } catch (const Error& thrown) {
    error = thrown.what();
  }
  for (const Race& found : checker->races())
    if (race.empty() || found.kind == RaceKind::conflict) race = found.to_string();
}

void Run::by_hand(const std::function<void(Weight&)>& body) {
  on_ranks([&](World& world) {
    Weight weight(world);
    body(weight);
    world.device().synchronize();
    world.barrier();  // peers, too, are done with it
  });
}

void Run::expect(bool condition, const std::string& message) {
  const std::lock_guard lock(mutex_);
  if (!condition && test.empty()) test = message;
}

Weight::Weight(const World& of)
    : world(of),
      compute(of.device().compute()),
      gathers(of.device().gather()),
      reduces(of.device().reduce()),
      memory_(of.allocate_symmetric(48)) {
  const Device device = of.device();
  rows = Tensor::wrap(Storage::borrowed(device, memory_->data(), 16, rows_use_), {2, 2}, f32);
  unreduced = Tensor::wrap(Storage::borrowed(device, memory_->data() + 16, 32, unreduced_use_),
                           {4, 2}, f32);
  full = Tensor::empty({4, 2}, f32, device);
  gradient = Tensor::empty({2, 2}, f32, device);
}

void Weight::gather() {
  const Access touched[] = {rows.access(AccessMode::read), full.access(AccessMode::write)};
  world.gather().submit({.send = rows.data(),
                         .recv = full.data(),
                         .count = rows.numel(),
                         .kind = CollectiveKind::all_gather},
                        "gather", touched);
}

void Weight::reduce() {
  const Access touched[] = {unreduced.access(AccessMode::read), gradient.access(AccessMode::write)};
  world.reduce().submit({.send = unreduced.data(),
                         .recv = gradient.data(),
                         .count = gradient.numel(),
                         .kind = CollectiveKind::reduce_scatter},
                        "reduce", touched);
}

OneWeight::OneWeight(const World& world, const MixedPrecision& precision)
    : layer(1, 1, {.bias = false}), world_(world) {
  register_module("layer", layer);
  const ShardOptions options{.mesh = DeviceMesh::flat(world), .precision = precision};
  fully_shard(layer, options);
  fully_shard(*this, options);
  materialize(world.device());
  layer.weight.edit([](const Tensor& rows) { raw::fill(rows, 1); });
}

// The one row lies on rank 0.
static double over_ranks(const World& world, const Tensor& mine) {
  const bool is_there = mine.defined() && mine.numel() > 0;
  return world.sum(is_there ? mine.to_vector<float>().front() : 0);
}
double OneWeight::weight() const { return over_ranks(world_, layer.weight.shard()); }
double OneWeight::gradient() const { return over_ranks(world_, layer.weight.grad()); }

Tensor column(const World& world, const std::vector<float>& values) {
  return Tensor::from(values, {static_cast<std::int64_t>(values.size()), 1}, world.device());
}

namespace {

enum class By { race_checker, error, test };
constexpr const char* kNames[] = {"race checker", "error", "test"};

struct Bug {
  const char* what;
  void (*program)(Run&);
  By by;
  const char* says;  // a part of what it is named with
};

constexpr std::array kBugs = {
    Bug{"a gather is used before it has arrived", gather_too_early, By::race_checker,
        "make compute wait for gather"},
    Bug{"a slot is filled again before its last use", slot_filled_too_early, By::error,
        "make it wait"},
    Bug{"a gather begins before the update has ended", gather_before_the_update, By::race_checker,
        "make gather wait for compute"},
    Bug{"a reduction begins before backward has written", reduction_too_early, By::race_checker,
        "make reduce wait for compute"},
    Bug{"an update reads a sum that is not there yet", update_before_the_sum, By::race_checker,
        "make compute wait for reduce"},
    Bug{"backward overwrites what peers still read", gradient_overwritten, By::race_checker,
        "make compute wait for reduce"},
    Bug{"the host reads a copy that is still queued", host_reads_too_early, By::race_checker,
        "the host"},
    Bug{"the gradient is not divided by the ranks", gradient_not_divided, By::test, "is 3"},
    Bug{"gradients are cast before they are summed", cast_before_the_sum, By::test, "is 128"},
    Bug{"the loss is a mean of the ranks' means", mean_of_means, By::test, "is 3"},
    Bug{"all ranks have the same batch", same_batch_everywhere, By::test, "the same batch"},
    Bug{"each rank clips by the norm of its own shard", norm_of_a_shard, By::test, "the norm is"},
    Bug{"gradients are never cleared", gradients_never_cleared, By::test, "the weight is"},
    Bug{"micro-batches' losses are not divided", micro_batches_not_divided, By::test, "is 6"},
    Bug{"a full parameter is kept over the call", parameter_kept, By::error, "layer"},
    Bug{"a parameter is used outside of its module's call", parameter_outside, By::error, "closed"},
    Bug{"a rank that has no gradient leaves the reduction out", reduction_left_out, By::error,
        "reduce"},
    Bug{"one rank loads behind the first update", loaded_too_late, By::test, "the rows are"},
    Bug{"a rank leaves a backward out", backward_left_out, By::error, "skip_backward"},
    Bug{"rank 0 alone asks for what all ranks have to give", collective_of_rank_0, By::error,
        "rank 1"},
};

const std::string& evidence(const Run& run, By by) {
  return by == By::race_checker ? run.race : by == By::error ? run.error : run.test;
}

void run_all() {
  std::size_t number = 0, named_ones = 0;
  for (const Bug& bug : kBugs) {
    Run broken(Run::Version::broken), mended(Run::Version::mended);
    bug.program(broken);
    bug.program(mended);
    const std::string& named = evidence(broken, bug.by);
    std::cout << std::setw(2) << ++number << ". " << bug.what << '\n'
              << "    " << kNames[static_cast<int>(bug.by)] << ": " << named << '\n'
              << "    mend " << broken.line_to_mend << '\n';
    const bool is_named = named.find(bug.says) != std::string::npos;
    const std::string left = mended.error + mended.race + mended.test;
    if (!is_named) std::cout << "    not named by: " << bug.says << ' ' << broken.error << '\n';
    if (!left.empty()) std::cout << "    mended, and yet: " << left << '\n';
    named_ones += is_named && left.empty() && !broken.line_to_mend.empty();
  }
  std::cout << named_ones << " of " << kBugs.size() << " are named, and silent once mended.\n";
  CHECK(named_ones == kBugs.size());
}

}  // namespace
}  // namespace tessera::tour

int main() { tessera::tour::run_all(); }
