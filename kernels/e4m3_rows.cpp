#include "kernels/e4m3_rows.hpp"

#include <cmath>

#include "kernels/host/cpu.hpp"
#include "kernels/host/ranges.hpp"
#include "kernels/host/simd.hpp"

namespace tessera::kernels::cpu {

void encode_e4m3(const EncodeE4m3Args& a, Exec& exec) {
  host::for_ranges(exec, a.rows, host::row_grain(8 * a.cols),
                   [&](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t row = begin; row < end; ++row) {
                       const float* const in = a.in + row * a.cols;
                       Float8E4M3* const codes = a.codes + row * a.cols;
                       float most = 0;
                       for (std::int64_t i = 0; i < a.cols; ++i)
                         most = std::abs(in[i]) > most ? std::abs(in[i]) : most;
                       a.scales[row] = float8_scale<Float8E4M3>(most);
                       const float factor = 1 / a.scales[row];
                       for (std::int64_t i = 0; i < a.cols; ++i)
                         codes[i] = Float8E4M3(in[i] * factor);
                     }
                   });
}

void decode_e4m3(const DecodeE4m3Args& a, Exec& exec) {
  host::visit_floating(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    host::for_ranges(exec, a.rows, host::row_grain(4 * a.cols),
                     [&](std::int64_t begin, std::int64_t end) {
                       for (std::int64_t row = begin; row < end; ++row)
                         for (std::int64_t i = row * a.cols; i < (row + 1) * a.cols; ++i)
                           static_cast<T*>(a.out)[i] = T(float{a.codes[i]} * a.scales[row]);
                     });
  });
}

}  // namespace tessera::kernels::cpu
