// Waiting for another process: spin, then sleep in the kernel.

#ifndef NANOTF_COLLECTIVES_NATIVE_WAIT_H_
#define NANOTF_COLLECTIVES_NATIVE_WAIT_H_

#include <atomic>
#include <chrono>
#include <cstdint>

namespace nanotf {

using Clock = std::chrono::steady_clock;

// Tells the core that this is a spin, so that a sibling hyper-thread gets its resources.
inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Sleeps until `word`, in memory shared between processes, is woken, at most `milliseconds`.
// Returns at once if `word` is not `expected`.
void SleepOn(const std::atomic<uint32_t>& word, uint32_t expected, int milliseconds);

// Wakes all sleepers on `word`.
void WakeAll(const std::atomic<uint32_t>& word);

// Returns true if a process runs. A zombie does not: its parent may reap it late.
bool IsAlive(uint32_t pid);

// Lets this thread preempt others when it wakes, as threads of the policy SCHED_BATCH do not. The
// other ranks wait for a thread that wakes in a collective. See `finish_slices` in
// machine/time_slices.py.
class Preempting {
 public:
  Preempting();
  ~Preempting();
  Preempting(const Preempting&) = delete;
  Preempting& operator=(const Preempting&) = delete;

 private:
  const bool is_batch_;
};

// Spins until `ready()`; returns false after `seconds` without success.
template <typename Ready>
bool SpinUntil(Ready ready, double seconds) {
  if (ready()) return true;
  if (seconds <= 0) return false;
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                      std::chrono::duration<double>(seconds));
  do {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return true;
      Pause();
    }
  } while (Clock::now() < end);
  return ready();
}

}  // namespace nanotf

#endif  // NANOTF_COLLECTIVES_NATIVE_WAIT_H_
