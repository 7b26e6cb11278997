// A module as a tree; what several blocks have alike stands once.
//
//   Gpt2: 28 parameters, 1,398 elements, 5,592 bytes, of them 2,824 here
//   └─ transformer      Module
//      ├─ wte           Embedding
//      │  └─ weight     f32 [7, 6]         168 bytes, rows 0 to 3 here: 96 bytes
//      └─ h             ModuleList<Gpt2Block>
//         └─ 0 to 11    Gpt2Block, Unit, 12 alike
#include <cxxabi.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <ostream>
#include <set>
#include <typeinfo>

#include "tessera/detail/base/text.hpp"
#include "tessera/nn/module.hpp"

namespace tessera::nn {
namespace {

std::string number(std::int64_t n) { return with_commas(std::to_string(n)); }

// "ModuleList<LlamaBlock>": without namespaces.
std::string name_of(const std::type_info& type) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> full(
      abi::__cxa_demangle(type.name(), nullptr, nullptr, &status), &std::free);
  const std::string_view text = full ? full.get() : type.name();
  std::string out;
  std::size_t word = 0;  // where the current one begins in `out`
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text.substr(i, 2) == "::") {
      out.resize(word);
      ++i;
      continue;
    }
    out += text[i];
    if (text[i] == '<' || text[i] == ',') word = out.size();
  }
  return out;
}

// Columns of a terminal: code points.
std::size_t width_of(const std::string& text) {
  return static_cast<std::size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}
std::string padded(std::string text, std::size_t width) {
  return text.append(width - std::min(width, width_of(text)), ' ');
}

struct Node {
  std::string name, what, where{};  // `where` of parameters and buffers
  std::vector<Node> below{};
  bool is_like(const Node& other) const {
    return what == other.what && where == other.where &&
           std::ranges::equal(below, other.below, [](const Node& a, const Node& b) {
             return a.name == b.name && a.is_like(b);
           });
  }
};

// Parts that follow each other and are alike become one.
std::vector<Node> folded(std::vector<Node> nodes) {
  std::vector<Node> out;
  for (std::size_t end = 0; end < nodes.size();) {
    const std::size_t begin = end++;
    while (end < nodes.size() && !nodes[begin].below.empty() && nodes[begin].is_like(nodes[end]))
      ++end;
    out.push_back(std::move(nodes[begin]));
    if (end - begin == 1) continue;
    out.back().name += " to " + nodes[end - 1].name;
    out.back().what += concat(", ", end - begin, " alike");
  }
  return out;
}

struct Row {
  std::string name, what, where;
};
void list(const std::vector<Node>& nodes, const std::string& indent, std::vector<Row>& rows) {
  for (const Node& node : nodes) {
    const bool is_last = &node == &nodes.back();
    rows.push_back({indent + (is_last ? "└─ " : "├─ ") + node.name, node.what, node.where});
    list(node.below, indent + (is_last ? "   " : "│  "), rows);
  }
}

std::int64_t own_numel(const Parameter& p) {
  return p.spec().owned().size() * p.spec().row_numel();
}

}  // namespace

class ModulePrinter {
 public:
  explicit ModulePrinter(const Module& root) {
    for (const auto& [name, p] : root.named_parameters()) first_[p.id()] = name;
    for (const auto& [name, b] : root.named_buffers()) first_[b.id()] = name;
  }

  Node node(const Module& module, const std::string& name, const std::string& path) {
    Node out{name, name_of(typeid(module))};
    if (!shown_.insert(&module).second) {
      out.what += ", shown above";
      return out;
    }
    if (const ModuleHook* const hook = module.hook_.get())
      out.what += ", " + name_of(typeid(*hook));
    const auto full = [&](const std::string& part) {
      return path.empty() ? part : path + '.' + part;
    };
    for (const auto& [part, p] : module.parameters_)
      out.below.push_back({part, concat("f32 ", p.shape()), describe(p, full(part))});
    for (const auto& [part, b, persistent] : module.buffers_)
      out.below.push_back(
          {part, concat(b.dtype(), ' ', b.shape()), describe(b, full(part), persistent)});
    std::vector<Node> modules;
    for (const auto& [part, child] : module.modules_)
      modules.push_back(node(*child, part, full(part)));
    for (Node& child : folded(std::move(modules))) out.below.push_back(std::move(child));
    return out;
  }

 private:
  std::string describe(const Parameter& p, const std::string& path) const {
    if (first_.at(p.id()) != path) return "is " + first_.at(p.id());
    std::string out = number(4 * p.shape().numel()) + " bytes";
    const RowRange rows = p.spec().owned();
    if (p.spec().world > 1 && rows.size() == 0)
      out += ", no row here";
    else if (p.spec().world > 1)
      out += concat(rows.size() == 1 ? ", row " : ", rows ", rows.begin,
                    rows.size() == 1 ? "" : concat(" to ", rows.end - 1),
                    p.spec().dim > 0 ? concat(" of dimension ", p.spec().dim) : "",
                    " here: ", number(4 * own_numel(p)), " bytes");
    if (p.unit() && p.is_streamed()) out += ", streamed";
    if (!p.trainable()) out += ", frozen";
    return out;
  }
  std::string describe(const Buffer& b, const std::string& path, Persistent persistent) const {
    if (first_.at(b.id()) != path) return "is " + first_.at(b.id());
    const auto size = static_cast<std::int64_t>(size_bytes(b.dtype()));
    return concat(number(size * b.shape().numel()), " bytes, buffer",
                  persistent == Persistent::no ? ", not saved" : "");
  }

  std::map<const void*, std::string> first_;  // name of each parameter and buffer
  std::set<const Module*> shown_;
};

std::string Module::to_string() const {
  const Node root = ModulePrinter(*this).node(*this, "", "");
  std::int64_t own = 0, without_memory = 0;
  bool is_sharded = false;
  const std::vector<Parameter> all = parameters();
  for (const Parameter& p : all) {
    own += own_numel(p);
    without_memory += p.device().is_meta();
    is_sharded = is_sharded || p.spec().world > 1;
  }
  std::string out = concat(root.what, ": ", all.size(), " parameters, ", number(numel()),
                           " elements, ", number(4 * numel()), " bytes");
  if (is_sharded) out += concat(", of them ", number(4 * own), " here");
  if (without_memory > 0 && without_memory == std::ssize(all))
    out += ", on meta";
  else if (without_memory > 0)
    out += concat(", ", without_memory, " of them on meta");
  std::vector<Row> rows;
  list(root.below, "", rows);
  std::size_t names = 0, kinds = 0;
  for (const Row& row : rows) {
    names = std::max(names, width_of(row.name));
    if (!row.where.empty()) kinds = std::max(kinds, width_of(row.what));
  }
  for (const Row& row : rows) {
    out += '\n' + padded(row.name, names) + "  ";
    out += row.where.empty() ? row.what : padded(row.what, kinds) + "  " + row.where;
  }
  return out + '\n';
}

std::ostream& operator<<(std::ostream& out, const Module& module) {
  return out << module.to_string();
}

}  // namespace tessera::nn
