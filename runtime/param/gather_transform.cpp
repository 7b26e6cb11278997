#include "tessera/param/gather_transform.hpp"

#include "runtime/tensor/launch.hpp"

namespace tessera {
namespace {

class GatherInE4m3 final : public GatherTransform {
 public:
  const char* name() const noexcept override { return "e4m3 by row"; }
  std::vector<Part> parts(const ShardSpec& spec) const override {
    TESSERA_EXPECT(spec.shape.ndim() >= 2, "gather_in_e4m3: a row of ", spec.shape,
                   " is one element, whose scale takes more bytes than the element; use it on "
                   "parameters of two dimensions or more");
    return {{e4m3, spec.chunk_numel()}, {f32, spec.chunk_rows()}};
  }
  void encode(std::span<const Tensor> parts, const Tensor& chunk) const override {
    const Tensor &codes = parts[0], &scales = parts[1];
    const std::int64_t rows = chunk.size(0);
    const Device& device = chunk.device();
    detail::launch_body(
        "encode_e4m3", device,
        kernels::Call<kernels::EncodeE4m3Args>{
            detail::table(device).encode_e4m3,
            {reinterpret_cast<Float8E4M3*>(codes.data()), reinterpret_cast<float*>(scales.data()),
             reinterpret_cast<const float*>(chunk.data()), rows, chunk.numel() / rows}},
        {detail::reads(chunk), detail::writes(codes), detail::writes(scales)});
  }
  void decode(const Tensor& full, std::span<const Tensor> parts) const override {
    const Tensor &codes = parts[0], &scales = parts[1];
    const std::int64_t rows = full.size(0);
    const Device& device = full.device();
    detail::launch_body("decode_e4m3", device,
                        kernels::Call<kernels::DecodeE4m3Args>{
                            detail::table(device).decode_e4m3,
                            {full.data(), reinterpret_cast<const Float8E4M3*>(codes.data()),
                             reinterpret_cast<const float*>(scales.data()), rows,
                             full.numel() / rows, full.dtype()}},
                        {detail::reads(codes), detail::reads(scales), detail::writes(full)});
  }
};

}  // namespace

std::shared_ptr<const GatherTransform> gather_in_e4m3() {
  return std::make_shared<const GatherInE4m3>();
}

}  // namespace tessera
