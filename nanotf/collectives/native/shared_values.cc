#include "shared_values.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <utility>

#include "layout.h"

namespace nanotf {
namespace {

// Returns the offsets of tensors in a set, then the set's size. TensorFlow copies a tensor whose
// memory is not aligned.
std::vector<uint64_t> Offsets(const NanotfFragment* fragments, int64_t count) {
  std::vector<uint64_t> offsets(1, 0);
  for (int64_t i = 0; i < count; ++i) {
    offsets.push_back(offsets.back() + RoundUp(fragments[i].bytes, kLine));
  }
  offsets.back() = RoundUp(offsets.back(), kPage);
  return offsets;
}

}  // namespace

#ifdef __linux__

int SharedValues::MakeFile(const NanotfFragment* fragments, int64_t count) {
  const uint64_t bytes = kSets * Offsets(fragments, count).back();
  const int fd = memfd_create("nanotf", MFD_CLOEXEC);
  // Without memory, a write to a page that is not allocated yet would kill the process.
  if (fd >= 0 && posix_fallocate(fd, 0, static_cast<off_t>(bytes)) != 0) {
    close(fd);
    return -1;
  }
  return fd;
}

int SharedValues::OpenFile(uint32_t pid, int fd) {
  char path[64];
  snprintf(path, sizeof(path), "/proc/%u/fd/%d", pid, fd);
  return open(path, O_RDWR | O_CLOEXEC);
}

#else

int SharedValues::MakeFile(const NanotfFragment*, int64_t) { return -1; }
int SharedValues::OpenFile(uint32_t, int) { return -1; }

#endif

std::shared_ptr<SharedValues> SharedValues::Map(int fd, const NanotfFragment* fragments,
                                                int64_t count) {
  std::vector<uint64_t> offsets = Offsets(fragments, count);
  const uint64_t bytes = kSets * offsets.back();
  struct stat file;
  if (fd < 0 || fstat(fd, &file) != 0 || static_cast<uint64_t>(file.st_size) != bytes) {
    return nullptr;
  }
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) return nullptr;
  std::vector<uint64_t> sizes;
  for (int64_t i = 0; i < count; ++i) sizes.push_back(fragments[i].bytes);
  return std::shared_ptr<SharedValues>(
      new SharedValues(static_cast<char*>(base), std::move(offsets), std::move(sizes)));
}

SharedValues::SharedValues(char* base, std::vector<uint64_t> offsets, std::vector<uint64_t> bytes)
    : base_(base), offsets_(std::move(offsets)), bytes_(std::move(bytes)) {}

SharedValues::~SharedValues() { munmap(base_, kSets * offsets_.back()); }

bool SharedValues::Fits(const NanotfFragment* fragments, int64_t count) const {
  if (static_cast<size_t>(count) != bytes_.size()) return false;
  for (int64_t i = 0; i < count; ++i) {
    if (fragments[i].bytes != bytes_[i]) return false;
  }
  return true;
}

uint64_t SharedValues::Free() const {
  uint64_t free = 0;
  for (int set = 0; set < kSets; ++set) {
    if (holds_[set].load(std::memory_order_acquire) == 0) free |= uint64_t{1} << set;
  }
  return free;
}

char* SharedValues::At(int set, int64_t index) const {
  return base_ + set * offsets_.back() + offsets_[index];
}

}  // namespace nanotf
