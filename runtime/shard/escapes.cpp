// Full parameters that somebody still holds outside of their unit's calls, as it closes.
#include "runtime/shard/gathered_parameters.hpp"

namespace tessera::shard {

std::string GatheredParameters::escape() const {
  for (std::size_t i = 0; i < full_.size(); ++i) {
    const std::shared_ptr<Storage>& window = full_[i].storage();
    const long views = window.use_count() - 2 - window->saved;  // without `full_` and its parameter
    if (views > 0 || full_[i].handles() > 1)
      return concat("unit '", shards_.name, "' closes while parameter '",
                    shards_.parameters[i]->name, "' is still referenced outside its call",
                    *window->last_op ? concat(" (last used by '", window->last_op, "')") : "",
                    "; copy what leaves the module, keep using it inside, and let a custom "
                    "operation hold it in an autograd::Saved");
  }
  return {};
}

}  // namespace tessera::shard
