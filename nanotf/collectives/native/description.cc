#include "description.h"

#include <algorithm>
#include <vector>

namespace nanotf {
namespace {

constexpr int64_t kShown = 4;  // tensors in a summary

// Appends the tensor whose shape begins at `shape`; returns where the next shape begins.
const int64_t* AppendTensor(const char* type, const int64_t* shape, std::string& text) {
  const int64_t* const end = shape + 1 + shape[0];
  text += type;
  text += '[';
  for (const int64_t* dim = shape + 1; dim < end; ++dim) {
    if (dim > shape + 1) text += ", ";
    text += *dim < 0 ? "*" : std::to_string(*dim);
  }
  text += ']';
  return end;
}

std::vector<std::string> Lines(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

// Describes a call. Line `at` is the first that differs; it may be past the last.
std::string Side(const std::vector<std::string>& lines, size_t at) {
  const size_t tensors = lines.size() - 1;
  if (tensors == 0) return lines[0];
  if (tensors == 1) return lines[0] + " of " + lines[1];
  std::string text = lines[0] + " of " + std::to_string(tensors) + " tensors";
  if (at <= tensors) text += ", tensor " + std::to_string(at) + ": " + lines[at];
  return text;
}

}  // namespace

uint64_t Signature(const NanotfCall& call) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char* text : {call.name, call.type}) {
    do {  // FNV-1a; including the terminating 0, which separates the two
      hash = (hash ^ static_cast<unsigned char>(*text)) * 0x100000001b3;
    } while (*text++ != 0);
  }
  const int64_t* word = call.shapes;
  for (int64_t i = 0; i < call.count; ++i) {
    for (const int64_t* end = word + 1 + *word; word < end; ++word) {
      hash = (hash ^ static_cast<uint64_t>(*word)) * 0x9e3779b97f4a7c15;
      hash ^= hash >> 29;
    }
  }
  return hash;
}

std::string Summary(const NanotfCall& call) {
  std::string text = call.name;
  const int64_t* shape = call.shapes;
  for (int64_t i = 0; i < std::min(call.count, kShown); ++i) {
    text += i == 0 ? " of " : ", ";
    shape = AppendTensor(call.type, shape, text);
  }
  if (call.count > kShown) text += ", ... (" + std::to_string(call.count) + " tensors)";
  return text;
}

std::string Details(const NanotfCall& call) {
  std::string text = call.name;
  const int64_t* shape = call.shapes;
  for (int64_t i = 0; i < call.count; ++i) {
    text += '\n';
    shape = AppendTensor(call.type, shape, text);
  }
  return text;
}

std::string Difference(const std::string& first, int rank, const std::string& other) {
  const std::vector<std::string> a = Lines(first);
  const std::vector<std::string> b = Lines(other);
  const size_t both = std::min(a.size(), b.size());
  size_t at = 1;
  while (at < both && a[at] == b[at]) ++at;
  return "rank 0: " + Side(a, at) + "; rank " + std::to_string(rank) + ": " + Side(b, at);
}

}  // namespace nanotf
