#include "runtime/checkpoint/json_tree.hpp"

#include "runtime/base/json_reader.hpp"
#include "tessera/base/error.hpp"

namespace tessera::checkpoint {
namespace {

class Builder final : public json::Reader {
 public:
  JsonTree root{};

  void begin_object() override { open({JsonTree::Members()}); }
  void end_object() override { open_.pop_back(); }
  void begin_array() override { open({JsonTree::Elements()}); }
  void end_array() override { open_.pop_back(); }
  void key(std::string name) override {
    next_ = &std::get<JsonTree::Members>(open_.back()->value)[std::move(name)];
  }
  void string(std::string text) override { put({std::move(text)}); }
  void count(std::int64_t value) override { put({value}); }
  void negative(std::int64_t value) override { put({value}); }
  void number(double value) override { put({value}); }
  void boolean(bool value) override { put({value}); }
  void other() override { refuse("has a value that is none"); }

 private:
  JsonTree& put(JsonTree tree) {
    JsonTree* place = open_.empty() ? &root : next_;
    if (!open_.empty())
      if (auto* const list = std::get_if<JsonTree::Elements>(&open_.back()->value))
        place = &list->emplace_back();
    *place = std::move(tree);
    return *place;
  }
  void open(JsonTree tree) { open_.push_back(&put(std::move(tree))); }

  std::vector<JsonTree*> open_;  // an array grows at its end alone, where none of it is open
  JsonTree* next_ = nullptr;     // the value of the key that came last
};

template <class T>
const T& as(const JsonTree& tree, const std::string& what, const char* kind) {
  const T* const value = std::get_if<T>(&tree.value);
  if (!value) throw DataError(concat(what, " has another value where ", kind, " is expected"));
  return *value;
}

}  // namespace

JsonTree JsonTree::parse(std::string_view json, const std::string& what) {
  Builder builder;
  json::read(json, concat(what, " is a text"), builder);
  return std::move(builder.root);
}

const JsonTree::Members& JsonTree::members(const std::string& what) const {
  return as<Members>(*this, what, "an object");
}
const JsonTree::Elements& JsonTree::elements(const std::string& what) const {
  return as<Elements>(*this, what, "an array");
}
const std::string& JsonTree::text(const std::string& what) const {
  return as<std::string>(*this, what, "a text");
}
std::int64_t JsonTree::integer(const std::string& what) const {
  return as<std::int64_t>(*this, what, "an integer");
}
const JsonTree& JsonTree::member(std::string_view name, const std::string& what) const {
  const Members& all = members(what);
  const auto found = all.find(name);
  if (found == all.end()) throw DataError(concat(what, " lacks \"", name, '"'));
  return found->second;
}
std::vector<std::int64_t> JsonTree::sizes(const std::string& what) const {
  std::vector<std::int64_t> sizes;
  for (const JsonTree& element : elements(what)) {
    sizes.push_back(element.integer(what));
    if (sizes.back() < 0) throw DataError(concat(what, " has a size or offset below 0"));
  }
  return sizes;
}

}  // namespace tessera::checkpoint
