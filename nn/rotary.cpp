#include "tessera/nn/rotary.hpp"

namespace tessera::nn {

Rotary::Rotary(std::int64_t positions, std::int64_t head_dim, double theta)
    : positions_(positions), head_dim_(head_dim), theta_(theta) {
  TESSERA_EXPECT(positions > 0 && head_dim > 0 && head_dim % 2 == 0 && theta > 0,
                 "Rotary: ", positions, " positions, heads of ", head_dim, ", theta ", theta,
                 "; expected at least one position, an even head width and a positive theta");
}

Tensor Rotary::operator()(const Tensor& x, Caller at) {
  const CallSite site(at);
  return rope(x, tables_for(x));
}

Tensor Rotary::operator()(Tensor x, std::int64_t heads, Caller at) {
  const CallSite site(at);
  const RopeTables& tables = tables_for(x);
  return rope(std::move(x), tables, heads);
}

const RopeTables& Rotary::tables_for(const Tensor& x) {
  TESSERA_EXPECT(x.ndim() == 4 && x.size(1) <= positions_, "Rotary: x is ", x.shape(),
                 ", expected [B, T, H, D] with T at most ", positions_,
                 "; raise the model's max_seq_len");
  const Device& device = x.device();
  if (!tables_ || tables_->cos.device() != device || made_after_ != device.recoveries()) {
    tables_.reset();
    tables_ = RopeTables::make(positions_, head_dim_, theta_, device);
    made_after_ = device.recoveries();
  }
  return *tables_;
}

}  // namespace tessera::nn
