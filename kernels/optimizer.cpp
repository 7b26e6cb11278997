#include "kernels/optimizer.hpp"

#include <cmath>
#include <cstring>

#include "kernels/host/cpu.hpp"
#include "kernels/host/ranges.hpp"
#include "kernels/host/rows.hpp"
#include "tessera/kernels/update_formulas.hpp"

namespace tessera::kernels::cpu {

using namespace host;

namespace {

using V = Vec<float>;

template <class Tag>
void update_as(const UpdateArgs& a, Exec& exec) {
  const UpdateScalars s = *a.scalars;
  const V factor(s.grad_scale * (a.clip == nullptr ? 1.0f : *a.clip));
  const bool keeps = a.moments[0] != nullptr;
  for_segments(exec, a.segments, a.segment_count, a.counts,
               [&](const FlatSegment& segment, std::int64_t begin, std::int64_t end) {
                 const Update<Tag::op, V> update(s, segment);
                 float* const values = a.values + begin;
                 const float* const gradient = a.gradient + begin + segment.gradient_shift;
                 const std::int64_t moment = begin + segment.moment_shift;
                 for_lanes<float>(end - begin, [&](std::int64_t i, auto io) {
                   V moments[Tag::moments];
                   for (int k = 0; keeps && k < Tag::moments; ++k)
                     moments[k] = io.load(a.moments[k] + moment + i);
                   const V g = io.load(gradient + i) * factor;
                   const V p = update(io.load(values + i), g, keeps ? moments : nullptr);
                   for (int k = 0; keeps && k < Tag::moments; ++k)
                     io.store(a.moments[k] + moment + i, moments[k]);
                   io.store(values + i, p);
                 });
               });
}

}  // namespace

void update(const UpdateArgs& a, Exec& exec) {
  visit_update(a.op, [&](auto tag) { update_as<decltype(tag)>(a, exec); });
}

void clip(const ClipArgs& a, Exec&) {
  const double sum = a.dtype == DType::f64
                         ? *static_cast<const double*>(a.sumsq)
                         : static_cast<double>(*static_cast<const float*>(a.sumsq));
  const double norm = std::sqrt(sum), ratio = a.max_norm / (norm + 1e-6);
  if (a.norm != nullptr) *a.norm = static_cast<float>(norm);
  if (a.coefficient != nullptr) *a.coefficient = static_cast<float>(ratio > 1 ? 1 : ratio);
}

void scale_flat(const ScaleFlatArgs& a, Exec& exec) {
  if (*a.factor == 1) return;
  const V factor(*a.factor);
  for_ranges(exec, a.count, kGrain, [&](std::int64_t begin, std::int64_t end) {
    map(a.data + begin, end - begin, [factor](V x) { return x * factor; }, a.data + begin);
  });
}

void put_scalars(const PutScalarsArgs& a, Exec&) {
  std::memcpy(a.out, a.values, static_cast<std::size_t>(a.count) * sizeof a.values[0]);
}

}  // namespace tessera::kernels::cpu
