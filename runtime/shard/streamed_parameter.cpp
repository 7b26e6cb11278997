#include "runtime/shard/streamed_parameter.hpp"

#include <algorithm>
#include <numeric>

#include "runtime/shard/unit.hpp"

namespace tessera::shard {
namespace {

// Nobody gains by more, and planning slots takes time that grows with their square.
constexpr std::int64_t kMostSlices = 256;

}  // namespace

bool backward_reads_slices(const ParameterState& parameter) {
  return std::ranges::any_of(parameter.streaming, [](const auto& streaming) {
    return streaming.module->reads_parameters_in_backward();
  });
}

std::shared_ptr<StreamedParameter> slices_of(const ParameterState& parameter) {
  return std::static_pointer_cast<StreamedParameter>(parameter.slices);
}

StreamedParameter::StreamedParameter(const Unit& unit,
                                     const std::shared_ptr<ParameterState>& parameter,
                                     std::int64_t bytes) {
  const ShardSpec& spec = parameter->spec;
  const std::int64_t chunk = spec.chunk_rows(), row = spec.row_numel(),
                     row_bytes = checked_mul(
                         checked_mul(row, spec.world),
                         static_cast<std::int64_t>(size_bytes(parameter->compute_dtype)));
  // Of even sizes, and where they can, they begin where entries of flat arrays may.
  const std::int64_t aligned = kFlatAlign / std::gcd(row, kFlatAlign);
  const auto rounded = [aligned](std::int64_t rows, std::int64_t to) {
    return rows > aligned ? to : rows;
  };
  std::int64_t most = std::max({bytes / std::max<std::int64_t>(row_bytes, 1),
                                ceil_div(chunk, kMostSlices), std::int64_t{1}});
  most = rounded(most, most / aligned * aligned);
  std::int64_t at_once = spec.world == 1 ? chunk : ceil_div(chunk, ceil_div(chunk, most));
  at_once = rounded(at_once, round_up(at_once, aligned));
  const bool is_read = backward_reads_slices(*parameter);
  for (std::int64_t begin = 0; begin < chunk; begin += at_once) {
    const SliceRows rows{spec.rows(), chunk, begin, std::min(at_once, chunk - begin)};
    auto state = std::make_shared<ParameterState>();
    state->name = parameter->name;
    state->shape = spec.shape.with(0, rows.count());
    state->trainable = parameter->trainable;
    state->spec = {state->shape, spec.world, spec.rank, rows.rows};
    state->group = parameter->group;
    state->entry = parameter->entry;
    state->first_row = begin;
    state->dtype = parameter->dtype;
    state->compute_dtype = parameter->compute_dtype;
    state->transform = parameter->transform;
    slices_.push_back({rows, state, std::make_shared<Unit>(unit, state, is_read)});
  }
}

// --- its calls ---

Tensor StreamedParameter::open(int slice, bool is_read) {
  at(slice).unit->begin_call(is_read);
  try {
    return value_of(at(slice).state);
  } catch (...) {
    abandon(slice);
    throw;
  }
}

void StreamedParameter::close(int slice) { at(slice).unit->end_call(); }
void StreamedParameter::abandon(int slice) noexcept { at(slice).unit->abandon_call(); }
void StreamedParameter::drop_unreduced() noexcept {
  for (const Slice& slice : slices_) slice.unit->drop_kept();
}

}  // namespace tessera::shard
