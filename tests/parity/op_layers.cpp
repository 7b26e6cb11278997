// Products with weights, layers' functions, losses, casts, and what makes tensors.
#include "tests/parity/op_arguments.hpp"

namespace op_samples {
namespace {

// The last argument of a call, an object of options; those that are left out have our defaults.
struct Options {
  const Call& call;
  const Json& of = call.args.back();

  bool has(const char* name) const { return of.contains(name) && !of.at(name).is_null(); }
  Tensor tensor(const char* name) const { return has(name) ? call.of(of.at(name)) : Tensor(); }
  template <class T>
  T value(const char* name, T otherwise) const {
    return has(name) ? of.at(name).get<T>() : otherwise;
  }
  LossReduction reduction() const {
    static const std::map<std::string, LossReduction> names = {
        {"none", LossReduction::none},
        {"mean", LossReduction::mean},
        {"sum", LossReduction::sum},
        {"batchmean", LossReduction::batchmean}};
    return names.at(value<std::string>("reduction", "mean"));
  }
  ClassLossOptions of_classes() const {
    return {.weight = tensor("weight"),
            .ignore_index = value<std::int64_t>("ignore_index", -100),
            .reduction = reduction(),
            .label_smoothing = value("label_smoothing", 0.0)};
  }
  BinaryCrossEntropyOptions of_two() const {
    return {
        .weight = tensor("weight"), .pos_weight = tensor("pos_weight"), .reduction = reduction()};
  }
};

Tensor or_none(const Call& c, std::size_t i) { return c.has(i) ? c.t(i) : Tensor(); }
DType dtype(const Call& c, std::size_t i) { return dtype_of_name(c.args.at(i)); }

// Ours normalizes over the last dimension, PyTorch over the last `dims`.
struct Rows {
  const Call& call;
  int dims;
  Tensor x = flatten(call.t(0), -dims);

  Tensor weight(std::size_t i) const { return call.has(i) ? flatten(call.t(i)) : Tensor(); }
  Tensor back(const Tensor& y) const { return reshape(y, call.t(0).shape()); }
};

// Of elements and a dimension, in the dtype that the third argument may name.
Ours of_slices(Tensor (*f)(const Tensor&, int, Caller)) {
  return one([f](const Call& c) {
    return f(c.has(2) ? cast(c.t(0), dtype(c, 2)) : c.t(0), c.dim(1), Caller::current());
  });
}

// Of [H, L, E], too, where ours takes [B, H, L, E] alone.
Tensor attention(const Call& c) {
  const Options o{c};
  ScaledDotProductOptions options{
      .mask = o.tensor("mask"), .bias = o.tensor("bias"), .is_causal = o.value("is_causal", false)};
  if (o.has("scale")) options.scale = o.value("scale", 0.0);
  if (c.t(0).ndim() == 4) return scaled_dot_product_attention(c.t(0), c.t(1), c.t(2), options);
  return squeeze(scaled_dot_product_attention(unsqueeze(c.t(0), 0), unsqueeze(c.t(1), 0),
                                              unsqueeze(c.t(2), 0), options),
                 0);
}

}  // namespace

const std::map<std::string, Ours>& layers() {
  static const std::map<std::string, Ours> table = {
      {"linear", one([](const Call& c) { return linear(c.t(0), c.t(1), or_none(c, 2)); })},
      {"softmax", of_slices(softmax)},
      {"log_softmax", of_slices(log_softmax)},
      {"scaled_dot_product_attention", one(attention)},
      {"embedding", one([](const Call& c) { return embedding(c.t(0), c.t(1)); })},
      {"rms_norm", one([](const Call& c) {
         const Rows rows{c, c.dim(3)};
         return rows.back(rms_norm(rows.x, rows.weight(1), c.number(2)));
       })},
      {"layer_norm", one([](const Call& c) {
         const Rows rows{c, c.dim(4)};
         return rows.back(layer_norm(rows.x, rows.weight(1), rows.weight(2), c.number(3)));
       })},
      {"dropout", one([](const Call& c) { return dropout(c.t(0), c.number(1), 1, 0); })},
      {"cross_entropy", one([](const Call& c) {
         const Options o{c};
         return o.of.empty() && c.t(0).ndim() == 2 ? cross_entropy(c.t(0), c.t(1))
                                                   : cross_entropy(c.t(0), c.t(1), o.of_classes());
       })},
      {"nll_loss",
       one([](const Call& c) { return nll_loss(c.t(0), c.t(1), Options{c}.of_classes()); })},
      {"linear_cross_entropy", one([](const Call& c) {
         return linear_cross_entropy(c.t(0), c.t(1), or_none(c, 2), c.t(3), c.whole(4));
       })},
      {"mse_loss",
       one([](const Call& c) { return mse_loss(c.t(0), c.t(1), {Options{c}.reduction()}); })},
      {"l1_loss",
       one([](const Call& c) { return l1_loss(c.t(0), c.t(1), {Options{c}.reduction()}); })},
      {"huber_loss", one([](const Call& c) {
         const Options o{c};
         return huber_loss(c.t(0), c.t(1), {o.value("delta", 1.0), o.reduction()});
       })},
      {"smooth_l1_loss", one([](const Call& c) {
         const Options o{c};
         return smooth_l1_loss(c.t(0), c.t(1), {o.value("beta", 1.0), o.reduction()});
       })},
      {"binary_cross_entropy", one([](const Call& c) {
         return binary_cross_entropy(c.t(0), c.t(1), Options{c}.of_two());
       })},
      {"binary_cross_entropy_with_logits", one([](const Call& c) {
         return binary_cross_entropy_with_logits(c.t(0), c.t(1), Options{c}.of_two());
       })},
      {"kl_div", one([](const Call& c) {
         const Options o{c};
         return kl_div(c.t(0), c.t(1), {o.reduction(), o.value("log_target", false)});
       })},
      {"cast", one([](const Call& c) { return cast(c.t(0), dtype(c, 1)); })},
      {"full", one([](const Call& c) {
         return Tensor::full(c.shape(0), c.number(1), dtype(c, 2), c.device);
       })},
      {"zeros",
       one([](const Call& c) { return Tensor::zeros(c.shape(0), dtype(c, 2), c.device); })},
      {"ones", one([](const Call& c) { return Tensor::ones(c.shape(0), dtype(c, 2), c.device); })},
      {"arange", one([](const Call& c) {
         return arange(c.number(0), c.number(1), c.number(2), dtype(c, 3), c.device);
       })},
      {"linspace", one([](const Call& c) {
         return linspace(c.number(0), c.number(1), c.whole(2), dtype(c, 3), c.device);
       })},
      {"eye", one([](const Call& c) {
         return c.has(1) ? eye(c.whole(0), c.whole(1), dtype(c, 2), c.device)
                         : eye(c.whole(0), dtype(c, 2), c.device);
       })},
  };
  return table;
}

}  // namespace op_samples
