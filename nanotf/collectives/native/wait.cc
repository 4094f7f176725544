#include "wait.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#endif

namespace nanotf {

#if defined(__linux__)

// Not the PRIVATE variants: several processes share the word's memory.
void SleepOn(const std::atomic<uint32_t>& word, uint32_t expected, int milliseconds) {
  const timespec timeout = {milliseconds / 1000, (milliseconds % 1000) * 1000000L};
  syscall(SYS_futex, &word, FUTEX_WAIT, expected, &timeout, nullptr, 0);
}

void WakeAll(const std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, 0x7fffffff, nullptr, nullptr, 0);
}

namespace {

// Of the calling thread: Linux has no policies of processes.
bool SetPolicy(int policy) {
  const sched_param none = {};
  return sched_setscheduler(0, policy, &none) == 0;
}

}  // namespace

Preempting::Preempting()
    : is_batch_(sched_getscheduler(0) == SCHED_BATCH && SetPolicy(SCHED_OTHER)) {}

Preempting::~Preempting() {
  if (is_batch_) SetPolicy(SCHED_BATCH);
}

#else

Preempting::Preempting() : is_batch_(false) {}
Preempting::~Preempting() = default;

// Without a public futex across processes (macOS before 14.4): look again soon.
void SleepOn(const std::atomic<uint32_t>& word, uint32_t expected, int) {
  const timespec pause = {0, 50000};
  if (word.load(std::memory_order_acquire) == expected) nanosleep(&pause, nullptr);
}

void WakeAll(const std::atomic<uint32_t>&) {}

#endif

bool IsAlive(uint32_t pid) {
  if (kill(static_cast<pid_t>(pid), 0) != 0 && errno == ESRCH) return false;
#if defined(__linux__)
  char path[32];
  snprintf(path, sizeof(path), "/proc/%u/stat", pid);
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) {  // it has just exited, or /proc hides it: hidepid, a chroot, no descriptor
    return kill(static_cast<pid_t>(pid), 0) == 0 || errno != ESRCH;
  }
  char line[512];
  const ssize_t length = read(fd, line, sizeof(line) - 1);
  close(fd);
  if (length <= 0) return false;
  line[length] = 0;
  // The name in parentheses may contain anything, including a parenthesis.
  const char* name_end = strrchr(line, ')');
  if (name_end != nullptr && name_end[1] == ' ') return name_end[2] != 'Z' && name_end[2] != 'X';
#endif
  return true;
}

}  // namespace nanotf
