// Optimizer steps over a unit's flat array in one launch: blocks take chunks of segments, read
// arrival counts and scalars where they lie, and move four elements at a time.
#include <cmath>

#include "kernels/cuda/chunks.hpp"
#include "kernels/cuda/elements.hpp"
#include "kernels/cuda/kernels.hpp"

namespace tessera::kernels::cuda {

namespace {

// Elements of a chunk: one group of four for each thread. Chunks start at multiples of four of the
// flat array, so the first and the last of a segment may be partly its neighbours'.
constexpr std::int64_t kChunk = 4 * kChunkThreads;

using Four = Pack<float, 4>;

// Step: `Step step(segment)` made of the arguments once for a chunk, then `step.four(i)` and
// `step.one(i)`.
template <class Args, class Step>
struct Segments {
  Args a;
  bool aligned;

  TESSERA_DEVICE void operator()(Thread& t) const {
    const auto chunks = [this](int s) {
      const OptimSegment segment = a.segments[s];
      const bool none =
          a.counts != nullptr && segment.count_index >= 0 && a.counts[segment.count_index] == 0;
      if (none || segment.end <= segment.begin) return std::int64_t{0};
      return (segment.end - segment.begin / 4 * 4 + kChunk - 1) / kChunk;
    };
    for_chunks(t, a.segment_count, chunks, [&](int s, std::int64_t chunk) {
      const OptimSegment segment = a.segments[s];
      const Step step(a, segment);
      const std::int64_t begin = segment.begin / 4 * 4 + chunk * kChunk, end = begin + kChunk;
      for_fours(
          t, begin < segment.begin ? segment.begin : begin, end < segment.end ? end : segment.end,
          aligned, [&](std::int64_t i) { step.four(i); }, [&](std::int64_t i) { step.one(i); });
    });
  }
};

TESSERA_DEVICE float gradient_factor(const OptimScalars& s, const float* clip) {
  return s.grad_scale * (clip == nullptr ? 1.0f : *clip);
}

struct AdamWStep {
  const AdamWArgs& a;
  float beta1, beta2, rest1, rest2, eps, factor, rate, root, decay;

  TESSERA_DEVICE AdamWStep(const AdamWArgs& args, const OptimSegment& segment) : a(args) {
    const OptimScalars s = *a.scalars;
    beta1 = s.beta1;
    beta2 = s.beta2;
    rest1 = 1 - s.beta1;
    rest2 = 1 - s.beta2;
    eps = s.eps;
    factor = gradient_factor(s, a.clip);
    rate = s.lr / s.bias_correction1;
    root = 1 / std::sqrt(s.bias_correction2);
    decay = 1 - s.lr * segment.weight_decay;
  }
  TESSERA_DEVICE void update(float gradient, float& p, float& m, float& v) const {
    const float g = gradient * factor;
    m = std::fma(beta1, m, rest1 * g);
    v = std::fma(beta2, v, rest2 * g * g);
    p = p * decay - rate * m / std::fma(std::sqrt(v), root, eps);
  }
  TESSERA_DEVICE void four(std::int64_t i) const {
    const Four g = load<4>(a.gradient + i);
    Four p = load<4>(a.parameter + i), m = load<4>(a.m + i), v = load<4>(a.v + i);
    for (int j = 0; j < 4; ++j) update(g.at[j], p.at[j], m.at[j], v.at[j]);
    store(a.m + i, m);
    store(a.v + i, v);
    store(a.parameter + i, p);
  }
  TESSERA_DEVICE void one(std::int64_t i) const {
    update(a.gradient[i], a.parameter[i], a.m[i], a.v[i]);
  }
};

struct SgdStep {
  const SgdArgs& a;
  float factor, rate, momentum, decay;

  TESSERA_DEVICE SgdStep(const SgdArgs& args, const OptimSegment& segment)
      : a(args), decay(segment.weight_decay) {
    const OptimScalars s = *a.scalars;
    factor = gradient_factor(s, a.clip);
    rate = s.lr;
    momentum = s.momentum;
  }
  // A null buffer is a buffer of zeros that is not kept.
  TESSERA_DEVICE void update(float gradient, float& p, float& buffer) const {
    buffer = std::fma(momentum, buffer, std::fma(decay, p, rounded_product(gradient, factor)));
    p = p - rounded_product(rate, buffer);
  }
  TESSERA_DEVICE void four(std::int64_t i) const {
    const Four g = load<4>(a.gradient + i);
    Four p = load<4>(a.parameter + i), buffer{};
    if (a.buffer != nullptr) buffer = load<4>(a.buffer + i);
    for (int j = 0; j < 4; ++j) update(g.at[j], p.at[j], buffer.at[j]);
    if (a.buffer != nullptr) store(a.buffer + i, buffer);
    store(a.parameter + i, p);
  }
  TESSERA_DEVICE void one(std::int64_t i) const {
    float buffer = a.buffer != nullptr ? a.buffer[i] : 0;
    update(a.gradient[i], a.parameter[i], buffer);
    if (a.buffer != nullptr) a.buffer[i] = buffer;
  }
};

struct Clip {
  ClipArgs a;

  TESSERA_DEVICE void operator()(Thread& t) const {
    if (t.index() != 0) return;
    const double sum = a.dtype == DType::f64
                           ? *static_cast<const double*>(a.sumsq)
                           : static_cast<double>(*static_cast<const float*>(a.sumsq));
    const double norm = std::sqrt(sum), ratio = a.max_norm / (norm + 1e-6);
    if (a.norm != nullptr) *a.norm = static_cast<float>(norm);
    if (a.coefficient != nullptr) *a.coefficient = static_cast<float>(ratio > 1 ? 1 : ratio);
  }
};

struct ScaleFlat {
  float* data;
  const float* factor;
  std::int64_t count;
  bool aligned;

  struct Item {
    Four x;
  };
  TESSERA_DEVICE int elements(std::int64_t pack) const {
    return count - 4 * pack < 4 ? static_cast<int>(count - 4 * pack) : 4;
  }
  TESSERA_DEVICE Item load(std::int64_t pack) const {
    if (*factor == 1) return {};
    const float* from = data + 4 * pack;
    return {aligned ? load_most<4>(from, elements(pack)) : load_few<4>(from, elements(pack))};
  }
  TESSERA_DEVICE void finish(std::int64_t pack, const Item& item) const {
    const float by = *factor;
    if (by == 1) return;
    Four y = item.x;
    for (float& x : y.at) x *= by;
    aligned ? store_most(data + 4 * pack, y, elements(pack))
            : store_few(data + 4 * pack, y, elements(pack));
  }
};

struct PutScalars {
  PutScalarsArgs a;

  TESSERA_DEVICE void operator()(Thread& t) const {
    if (t.index() == 0) *a.out = a.values;
  }
};

}  // namespace

void adamw(const AdamWArgs& a, Exec& exec) {
  launch<kChunkThreads>(
      exec, chunk_grid(a.segment_count), kChunkShared,
      Segments<AdamWArgs, AdamWStep>{a, are_aligned(a.parameter, a.m, a.v, a.gradient)});
}

void sgd(const SgdArgs& a, Exec& exec) {
  // A null buffer is aligned.
  launch<kChunkThreads>(
      exec, chunk_grid(a.segment_count), kChunkShared,
      Segments<SgdArgs, SgdStep>{a, are_aligned(a.parameter, a.buffer, a.gradient)});
}

void clip(const ClipArgs& a, Exec& exec) { launch<kWarp>(exec, Grid{1}, 0, Clip{a}); }

void scale_flat(const ScaleFlatArgs& a, Exec& exec) {
  launch_packs<4>(exec, blocks_for(a.count, 4),
                  ScaleFlat{a.data, a.factor, a.count, are_aligned(a.data)});
}

void put_scalars(const PutScalarsArgs& a, Exec& exec) {
  launch<kWarp>(exec, Grid{1}, 0, PutScalars{a});
}

}  // namespace tessera::kernels::cuda
