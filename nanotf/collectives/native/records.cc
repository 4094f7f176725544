#include "records.h"

#include <string.h>

#include <array>

#if defined(NANOTF_X86_VARIANTS)
#include <cpuid.h>
#include <nmmintrin.h>
#endif

namespace {

constexpr uint32_t kMagic = 0xced7230a;
constexpr uint64_t kPartHeader = 8;       // magic, flag and length
constexpr uint64_t kTFRecordHeader = 12;  // length, its checksum
constexpr uint64_t kTFRecordFooter = 4;   // the data's checksum
enum Flag : uint32_t { kWhole = 0, kStart = 1, kMiddle = 2, kEnd = 3 };

template <typename T>
T Load(const uint8_t* at) {
  T value;
  memcpy(&value, at, sizeof value);  // records are little-endian, as are all supported machines
  return value;
}

using Tables = std::array<std::array<uint32_t, 256>, 8>;

// Slicing by 8: table k advances a byte by k more zero bytes.
Tables MakeTables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? 0x82f63b78u : 0);
    tables[0][byte] = crc;
  }
  for (int k = 1; k < 8; ++k) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 0xff];
    }
  }
  return tables;
}

uint32_t PortableCrc(const uint8_t* data, uint64_t bytes) {
  static const Tables tables = MakeTables();
  uint32_t crc = ~0u;
  for (; bytes >= 8; data += 8, bytes -= 8) {
    const uint64_t word = Load<uint64_t>(data) ^ crc;
    crc = 0;
    for (int k = 0; k < 8; ++k) crc ^= tables[7 - k][(word >> (8 * k)) & 0xff];
  }
  for (; bytes; ++data, --bytes) crc = (crc >> 8) ^ tables[0][(crc ^ *data) & 0xff];
  return ~crc;
}

#if defined(NANOTF_X86_VARIANTS)
bool HasCrcInstruction() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_SSE4_2);
}

// Newer versions of clang, and so of zig, have the instruction as a feature of its own.
#if defined(__clang__)
#define NANOTF_CRC_TARGET __attribute__((target("sse4.2,crc32")))
#else
#define NANOTF_CRC_TARGET __attribute__((target("sse4.2")))
#endif

NANOTF_CRC_TARGET uint32_t InstructionCrc(const uint8_t* data, uint64_t bytes) {
  uint64_t crc = ~0u;
  for (; bytes >= 8; data += 8, bytes -= 8) crc = _mm_crc32_u64(crc, Load<uint64_t>(data));
  auto rest = static_cast<uint32_t>(crc);
  for (; bytes; ++data, --bytes) rest = _mm_crc32_u8(rest, *data);
  return ~rest;
}
#endif

uint32_t Crc(const uint8_t* data, uint64_t bytes) {
#if defined(NANOTF_X86_VARIANTS)
  static const bool has_instruction = HasCrcInstruction();
  if (has_instruction) return InstructionCrc(data, bytes);
#endif
  return PortableCrc(data, bytes);
}

uint32_t Masked(uint32_t crc) { return ((crc >> 15) | (crc << 17)) + 0xa282ead8u; }

// What a format's function says of the record that begins at an offset.
struct Found {
  enum Kind { kRecord, kSkip, kIncomplete, kFault } kind;
  uint64_t next = 0;            // kRecord, kSkip: where the next record begins
  uint64_t begin = 0, end = 0;  // kRecord: the payload
  NanotfRecordFault fault = kNanotfNoFault;
  uint64_t at = 0;  // kFault
};

Found Fault(NanotfRecordFault fault, uint64_t at) {
  Found found{Found::kFault};
  found.fault = fault;
  found.at = at;
  return found;
}

Found Record(uint64_t begin, uint64_t end, uint64_t next) {
  return {Found::kRecord, next, begin, end};
}

uint32_t PartLength(const uint8_t* part) { return Load<uint32_t>(part + 4) & 0x1fffffff; }

uint64_t Padded(uint64_t length) { return (length + 3) & ~uint64_t{3}; }

// Moves the payloads of the parts in [first, last) together. Returns the end of the whole.
uint64_t Join(uint8_t* data, uint64_t first, uint64_t last) {
  uint64_t end = first + kPartHeader;
  for (uint64_t part = first; part < last;) {
    const uint64_t length = PartLength(data + part);
    const uint64_t next = part + kPartHeader + Padded(length);
    memmove(data + end, data + part + kPartHeader, length);
    end += length;
    part = next;
  }
  return end;
}

Found NextRecordIO(uint8_t* data, uint64_t first, uint64_t bytes) {
  bool inside = false;
  for (uint64_t part = first;;) {
    if (bytes - part < kPartHeader) return {Found::kIncomplete};
    if (Load<uint32_t>(data + part) != kMagic) return Fault(kNanotfBadMagic, part);
    const uint32_t flag = Load<uint32_t>(data + part + 4) >> 29;
    const bool fits = inside ? flag == kMiddle || flag == kEnd : flag == kWhole || flag == kStart;
    if (!fits) return Fault(kNanotfBadPart, part);
    const uint64_t length = PartLength(data + part);
    const uint64_t size = kPartHeader + Padded(length);
    if (bytes - part < size) return {Found::kIncomplete};
    if (flag == kWhole) return Record(part + kPartHeader, part + kPartHeader + length, part + size);
    part += size;
    if (flag == kEnd) return Record(first + kPartHeader, Join(data, first, part), part);
    inside = true;
  }
}

Found NextTFRecord(uint8_t* data, uint64_t first, uint64_t bytes, uint64_t limit) {
  const uint64_t rest = bytes - first;
  if (rest < kTFRecordHeader) return {Found::kIncomplete};
  const uint8_t* header = data + first;
  if (Masked(Crc(header, 8)) != Load<uint32_t>(header + 8)) return Fault(kNanotfBadLength, first);
  const uint64_t length = Load<uint64_t>(header);
  constexpr uint64_t kAround = kTFRecordHeader + kTFRecordFooter;
  if (length > ~uint64_t{0} - kAround) return {Found::kIncomplete};
  if (rest < length + kAround) return {Found::kIncomplete};
  const uint64_t begin = first + kTFRecordHeader, end = begin + length;
  if (Masked(Crc(data + begin, length)) == Load<uint32_t>(data + end)) {
    return Record(begin, end, end + kTFRecordFooter);
  }
  if (!limit) return Fault(kNanotfBadChecksum, first);
  return {Found::kSkip, end + kTFRecordFooter};
}

Found NextLine(uint8_t* data, uint64_t first, uint64_t bytes, uint64_t* searched) {
  const uint64_t from = first + *searched;
  const void* newline = memchr(data + from, '\n', bytes - from);
  if (!newline) {
    *searched = bytes - first;
    return {Found::kIncomplete};
  }
  *searched = 0;
  const uint64_t end = static_cast<const uint8_t*>(newline) - data;
  return Record(first, end, end + 1);
}

}  // namespace

void nanotf_scan_records(int format, uint8_t* data, uint64_t bytes, uint64_t* spans,
                         uint64_t capacity, NanotfScan* scan) {
  scan->records = scan->skipped = scan->consumed = scan->fault_at = 0;
  scan->fault = kNanotfNoFault;
  while (scan->records < capacity) {
    const uint64_t at = scan->consumed;
    const Found found = format == kNanotfRecordIO ? NextRecordIO(data, at, bytes)
                        : format == kNanotfTFRecord
                            ? NextTFRecord(data, at, bytes, scan->limit - scan->skipped)
                            : NextLine(data, at, bytes, &scan->searched);
    switch (found.kind) {
      case Found::kIncomplete:
        return;
      case Found::kFault:
        scan->fault = found.fault;
        scan->fault_at = found.at;
        return;
      case Found::kSkip:
        ++scan->skipped;
        break;
      case Found::kRecord:
        spans[2 * scan->records] = found.begin;
        spans[2 * scan->records + 1] = found.end;
        ++scan->records;
        break;
    }
    scan->consumed = found.next;
  }
}

uint32_t nanotf_crc32c(const uint8_t* data, uint64_t bytes, int portable) {
  return portable ? PortableCrc(data, bytes) : Crc(data, bytes);
}
