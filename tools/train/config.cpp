#include "tools/train/config.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string_view>

#include "tessera/base/error.hpp"
#include "tessera/detail/base/utf8.hpp"
#include "tools/train/schema.hpp"
#include "tools/train/toml_reader.hpp"

namespace tessera::train {
namespace {

// Where a value comes from, for its error messages: "--model.dim=x" or "run.toml:3: model.dim = x".
class Origin {
 public:
  explicit Origin(std::string_view text) : text_(printable(text)) {}

  [[noreturn]] void fail(const std::string& reason) const {
    throw DataError(concat(shortened(text_), ": ", reason));
  }

 private:
  std::string text_;
};

bool is_within(const Range& range, double value) {
  const bool low = range.above_low ? value > range.low : value >= range.low;
  const bool high = range.below_high ? value < range.high : value <= range.high;
  return low && high;
}

void check_range(const Key& key, double value, const Origin& origin) {
  if (!std::isfinite(value)) origin.fail(concat("not a finite number; expected ", key.expected()));
  if (!is_within(key.range, value)) origin.fail(concat("out of range; expected ", key.expected()));
}

// Kernels take such a number in f32, where 1e-46 is 0 and 1e39 infinite.
void check_range_in_f32(const Key& key, double value, const Origin& origin) {
  check_range(key, value, origin);
  const float rounded = static_cast<float>(value);
  if (!std::isfinite(rounded) || !is_within(key.range, rounded))
    origin.fail(concat(rounded, " in f32, which is out of range; expected ", key.expected()));
}

template <class T>
Value parse_number(const Key& key, std::string_view text, const Origin& origin) {
  if (text.starts_with('+') && text.size() > 1 && text[1] != '-') text.remove_prefix(1);
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc::result_out_of_range)
    origin.fail(concat("beyond 64 bits; expected ", key.expected()));
  if (error != std::errc() || end != text.data() + text.size())
    origin.fail(concat("expected ", key.expected()));
  return value;
}

Value choice_of(const Key& key, const std::string& text, const Origin& origin) {
  for (std::size_t i = 0; i < key.choices.size(); ++i) {
    if (key.choices[i] == text) return static_cast<std::int64_t>(i);
  }
  if (key.has_number() && !text.empty() &&
      text.find_first_not_of("0123456789") == std::string::npos) {
    const auto number = std::get<std::int64_t>(parse_number<std::int64_t>(key, text, origin));
    check_range(key, static_cast<double>(number), origin);
    return -number;
  }
  origin.fail(concat("expected ", key.expected(), "; the nearest is ", nearest(text, key.choices)));
}

// The value of a key whose type already fits, with every check that needs no other key.
void assign(Config& config, const Key& key, Value value, const Origin& origin) {
  if (const auto* text = std::get_if<std::string>(&value)) {
    if (key.type == ValueType::choice)
      value = choice_of(key, *text, origin);
    else if (text->empty())
      origin.fail(concat("expected ", key.expected()));
    else if (text->find('\0') != std::string::npos)
      origin.fail("holds a zero byte; leave it out");
  } else if (const auto* integer = std::get_if<std::int64_t>(&value)) {
    check_range(key, static_cast<double>(*integer), origin);
  } else if (const auto* real = std::get_if<double>(&value)) {
    check_range_in_f32(key, *real, origin);
  }
  key.set(config, value);
  config.given.insert(key.full_name());
}

Value parse_text(const Key& key, const std::string& text, const Origin& origin) {
  switch (key.type) {
    case ValueType::boolean:
      if (text != "true" && text != "false") origin.fail("expected true or false");
      return text == "true";
    case ValueType::integer:
      return parse_number<std::int64_t>(key, text, origin);
    case ValueType::real:
      return parse_number<double>(key, text, origin);
    case ValueType::text:
    case ValueType::choice:
      break;
  }
  return text;
}

// A TOML value has a type of its own; only whole numbers for reals are taken across.
Value convert(const Key& key, const Value& value, const Origin& origin) {
  const bool text = key.type == ValueType::text || key.type == ValueType::choice;
  if (text && std::holds_alternative<std::string>(value)) return value;
  if (key.type == ValueType::boolean && std::holds_alternative<bool>(value)) return value;
  const auto* integer = std::get_if<std::int64_t>(&value);
  if (key.has_number() && integer) return concat(*integer);
  if (key.type == ValueType::integer && integer) return value;
  if (key.type == ValueType::real && integer) return static_cast<double>(*integer);
  if (key.type == ValueType::real && std::holds_alternative<double>(value)) return value;
  origin.fail(concat("of the wrong type; expected ", key.expected()));
}

void apply_file(Config& config, const std::string& path) {
  for (const TomlItem& item : read_toml(path)) {
    const std::string last = item.name.empty() ? "\"\"" : item.name;
    const std::string name = item.section.empty() ? last : concat(item.section, ".", last);
    const std::string where = concat(path, ":", item.line, ": ");
    const std::vector<std::string_view> known = sections();
    const auto is_section = [&](const std::string& text) {
      return std::find(known.begin(), known.end(), text) != known.end();
    };
    if (item.is_empty_section) {
      if (is_section(item.section)) continue;
      throw DataError(concat(where, "unknown section [", shortened(item.section),
                             "]; the nearest is [", nearest(item.section, known), "]"));
    }
    if (item.section.empty() && is_section(name))
      throw DataError(concat(where, name, " is a section; write [", name, "] above its keys"));
    if (item.name.find('.') != std::string::npos)
      throw DataError(concat(where, "unknown key \"", shortened(item.name),
                             "\"; write the key without quotes, which make one name of it"));
    const Key* key = find_key(name);
    if (key && key->section.empty()) {
      throw DataError(concat(where, shortened(name), " does not belong in a file; give --", name,
                             " on the command line"));
    }
    if (!key)
      throw DataError(
          concat(where, "unknown key ", shortened(name), "; the nearest is ", nearest_key(name)));
    const Origin origin(concat(where, name, " = ", item.shown));
    const bool is_list = key->argument == "NAMES" && item.names;
    if (is_list && item.names->empty()) continue;
    assign(config, *key, convert(*key, is_list ? Value(*item.names) : item.value, origin), origin);
  }
}

// "--help=all", "--help=flags", "--help=model".
void ask_for_help(Config& config, const std::string& of) {
  std::vector<std::string_view> known = sections();
  known.insert(known.begin(), {"all", "flags"});
  if (std::ranges::find(known, of) == known.end())
    throw DataError(concat("--help=", shortened(of),
                           ": no section is called so; the nearest is --help=", nearest(of, known),
                           " (--help=all lists all)"));
  config.flags.help = true;
  config.flags.help_of = of;
}

// "--name=value" or "--name value"; a boolean may stand alone.
void apply_option(Config& config, const std::vector<std::string>& arguments, std::size_t& at) {
  const std::string& argument = arguments[at];
  const std::size_t equals = argument.find('=');
  const bool attached = equals != std::string::npos;
  const bool is_long = argument.starts_with("--");
  const std::string name =
      is_long ? argument.substr(2, attached ? equals - 2 : std::string::npos) : "";
  const Key* key = is_long ? find_key(name) : nullptr;
  if (!key) {
    const std::size_t first = argument.find_first_not_of('-');
    const std::string bare =
        first == std::string::npos
            ? "help"
            : argument.substr(first, attached ? equals - first : std::string::npos);
    throw DataError(concat(shortened(argument), ": unknown option; the nearest is --",
                           nearest_key(bare), " (--help=all lists all)"));
  }
  std::string text;
  if (attached) {
    text = argument.substr(equals + 1);
    if (name == "help") return ask_for_help(config, text);
  } else if (key->type == ValueType::boolean) {
    const bool follows =
        at + 1 < arguments.size() && (arguments[at + 1] == "true" || arguments[at + 1] == "false");
    text = follows ? arguments[++at] : "true";
  } else if (at + 1 < arguments.size()) {
    text = arguments[++at];
  } else {
    throw DataError(concat(argument, ": lacks its value; expected ", key->expected()));
  }
  const Origin origin(concat("--", name, "=", text));
  assign(config, *key, parse_text(*key, text, origin), origin);
  config.typed.insert(key->full_name());
}

}  // namespace

Config parse_arguments(const std::vector<std::string>& arguments) {
  Config config;
  std::string& file = config.file;
  for (std::size_t at = 0; at < arguments.size(); ++at) {
    const std::string& argument = arguments[at];
    if (argument == "-h") {
      config.flags.help = true;
    } else if (argument.starts_with('-')) {
      apply_option(config, arguments, at);
    } else if (!file.empty() || argument.empty()) {
      throw DataError(
          concat("'", shortened(argument), "': unexpected argument",
                 file.empty() ? std::string() : concat(" after '", shortened(file), "'"),
                 "; one configuration file is taken, and options begin with --"));
    } else {
      file = argument;
      apply_file(config, file);
    }
    if (config.flags.help || config.flags.version) break;
  }
  return config;
}

}  // namespace tessera::train
