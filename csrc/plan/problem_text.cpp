#include "problem_text.h"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <stdexcept>

#include "names.h"
#include "text.h"

namespace flash_ext::plan {
namespace {

template <class Value>
std::string written(Value value) {
  if constexpr (std::is_enum_v<Value>) {
    return name_of(value);
  } else if constexpr (std::is_floating_point_v<Value>) {
    char digits[32];
    std::snprintf(digits, sizeof(digits), "%.17g", value);  // all of a double
    return digits;
  } else {
    return text(value);
  }
}

template <class Value>
Value read(const std::string& field, const std::string& text) {
  if constexpr (std::is_enum_v<Value>) {
    return value_of<Value>(field, text);
  } else if constexpr (std::is_floating_point_v<Value>) {
    return std::strtod(text.c_str(), nullptr);
  } else {
    return static_cast<Value>(std::strtoll(text.c_str(), nullptr, 10));
  }
}

std::map<std::string, std::string> lines_of(const std::string& text) {
  std::map<std::string, std::string> lines;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size()), space = text.find(' ', begin);
    if (space >= end) throw std::invalid_argument("not a problem: " + text.substr(begin, end - begin));
    lines[text.substr(begin, space - begin)] = text.substr(space + 1, end - space - 1);
    begin = end + 1;
  }
  return lines;
}

}  // namespace

std::string text_of(const Problem& problem) {
  std::string lines;
  for_each_field(
      [&](const char* name, auto field, const char*) { lines += text(name, " ", written(problem.*field), "\n"); });
  return lines;
}

Problem problem_of(const std::string& text) {
  std::map<std::string, std::string> lines = lines_of(text);
  Problem problem;
  for_each_field([&](const char* name, auto field, const char*) {
    const auto line = lines.find(name);
    if (line == lines.end()) throw std::invalid_argument(std::string("a problem without ") + name);
    auto& value = problem.*field;
    value = read<std::remove_reference_t<decltype(value)>>(name, line->second);
    lines.erase(line);
  });
  if (!lines.empty()) throw std::invalid_argument("a problem has no " + lines.begin()->first);
  return problem;
}

}  // namespace flash_ext::plan
