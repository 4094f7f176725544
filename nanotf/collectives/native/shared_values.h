// Tensors that all ranks of a host share: the values of variables, which are equal on all ranks.

#ifndef NANOTF_COLLECTIVES_NATIVE_SHARED_VALUES_H_
#define NANOTF_COLLECTIVES_NATIVE_SHARED_VALUES_H_

#include <array>
#include <atomic>
#include <memory>
#include <vector>

#include "shm.h"

namespace nanotf {

// Memory for two sets of values. Every rank maps it; each writes its part of a set. While the
// ranks' variables hold one set, the other is free for the next values. TensorFlow never writes to
// such a tensor: its memory does not count as owned, so an update in place copies first.
class SharedValues {
 public:
  static constexpr int kSets = 2;

  // Makes the file and allocates its memory; returns its descriptor, or -1.
  static int MakeFile(const NanotfFragment* fragments, int64_t count);
  // Opens the file with descriptor `fd` of process `pid`; returns a descriptor here, or -1.
  static int OpenFile(uint32_t pid, int fd);
  // Maps the file; nullptr if it cannot be. The caller keeps `fd`.
  static std::shared_ptr<SharedValues> Map(int fd, const NanotfFragment* fragments, int64_t count);

  ~SharedValues();
  SharedValues(const SharedValues&) = delete;
  SharedValues& operator=(const SharedValues&) = delete;

  // Returns true if the sets have tensors of these sizes.
  bool Fits(const NanotfFragment* fragments, int64_t count) const;
  // A bit for each set that nothing in this process holds.
  uint64_t Free() const;
  // Returns where tensor `index` of a set lies.
  char* At(int set, int64_t index) const;

  // This rank's rows of a table that have changed since a set was written, if these are all.
  struct Behind {
    bool are_known = false;
    std::vector<int64_t> rows;
  };
  // Of the one call of the place that runs.
  std::array<Behind, kSets> behind;
  int last = 0;  // the set that was written last

 private:
  friend class Hold;
  SharedValues(char* base, std::vector<uint64_t> offsets, std::vector<uint64_t> bytes);

  char* const base_;
  const std::vector<uint64_t> offsets_;  // of the tensors in a set, and the set's size
  const std::vector<uint64_t> bytes_;    // of the tensors
  std::array<std::atomic<int64_t>, kSets> holds_{};
};

// Keeps one set of values, and the memory, from being written or unmapped.
class Hold {
 public:
  Hold(std::shared_ptr<SharedValues> values, int set) : values_(std::move(values)), set_(set) {
    values_->holds_[set_].fetch_add(1, std::memory_order_relaxed);
  }
  // Reads of the set come before the release that a writer sees.
  ~Hold() { values_->holds_[set_].fetch_sub(1, std::memory_order_release); }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;

 private:
  const std::shared_ptr<SharedValues> values_;
  const int set_;
};

}  // namespace nanotf

#endif  // NANOTF_COLLECTIVES_NATIVE_SHARED_VALUES_H_
