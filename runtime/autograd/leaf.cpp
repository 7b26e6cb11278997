// Ordinary tensors that have gradients.
#include "runtime/autograd/gradient_sink.hpp"
#include "tessera/autograd/node.hpp"

namespace tessera {
namespace {

// The gradient of an ordinary leaf tensor.
class TensorLeaf final : public autograd::Leaf {
 public:
  explicit TensorLeaf(const Tensor& t)
      : shape_(t.shape()), dtype_(t.dtype()), device_(t.device()) {}

  autograd::GradientSink sink() override {
    const bool first = !gradient_.defined();
    if (first) gradient_ = Tensor::empty(shape_, dtype_, device_);
    return {gradient_, 1, !first};
  }
  const Shape& gradient_shape() const override { return shape_; }
  Tensor gradient() const override { return gradient_; }
  void clear() override { gradient_ = {}; }

 private:
  Shape shape_;
  DType dtype_;
  Device device_;
  Tensor gradient_;
};

}  // namespace

Tensor& Tensor::require_grad(Caller at) {
  const CallSite site("require_grad", at);
  TESSERA_EXPECT(is_floating(dtype()) && !is_storage_only(dtype()), "require_grad: the tensor is ",
                 dtype(), "; only floating tensors of 16 bits and more have gradients");
  TESSERA_EXPECT(!history().node, "require_grad: the tensor has a history; detach it first");
  if (!history()) history().leaf = std::make_shared<TensorLeaf>(*this);
  return *this;
}

bool Tensor::requires_grad() const { return defined() && history(); }

Tensor Tensor::grad() const {
  static_cast<void>(impl());  // an error where there is none
  return history().leaf ? history().leaf->gradient() : Tensor();
}

void Tensor::zero_grad() {
  static_cast<void>(impl());
  if (history().leaf) history().leaf->clear();
}

Tensor Tensor::detach() const { return view(shape(), strides(), 0); }

}  // namespace tessera
