// Finds the records in a part of a stream: RecordIO, TFRecord, lines of text.
//
// For nanotf/sagemaker/pipes/records.py (ctypes).

#ifndef NANOTF_COLLECTIVES_NATIVE_RECORDS_H_
#define NANOTF_COLLECTIVES_NATIVE_RECORDS_H_

#include <stdint.h>

#include "shm.h"

extern "C" {

// The values are part of the interface with records.py.
enum NanotfRecordFormat { kNanotfRecordIO = 0, kNanotfTFRecord = 1, kNanotfTextLine = 2 };

enum NanotfRecordFault {
  kNanotfNoFault = 0,
  kNanotfBadMagic = 1,     // RecordIO: a part does not begin with the magic number
  kNanotfBadPart = 2,      // RecordIO: a middle or end without a start, or a start within a record
  kNanotfBadLength = 3,    // TFRecord: the length's checksum differs, so the next record is unknown
  kNanotfBadChecksum = 4,  // TFRecord: the data's checksum differs, and no more may be skipped
};

struct NanotfScan {
  uint64_t limit;     // in: how many corrupt TFRecords may still be skipped
  uint64_t searched;  // in and out: TextLine: bytes without a newline; spares a second search
  uint64_t records;   // out: spans written
  uint64_t skipped;   // out: corrupt TFRecords skipped
  uint64_t consumed;  // out: bytes of complete records; the rest is a record's beginning
  uint64_t fault_at;  // out: the offset of the faulty record or part
  uint32_t fault;     // out: NanotfRecordFault
};

// Writes the begin and end of up to `capacity` complete records of `data` to `spans`. The parts of
// a multipart record are moved together, over the headers between them. After a fault, the records
// before it are valid.
NANOTF_EXPORT void nanotf_scan_records(int format, uint8_t* data, uint64_t bytes, uint64_t* spans,
                                       uint64_t capacity, NanotfScan* scan);

// CRC-32C (Castagnoli), unmasked. `portable` 1 does without the processor's instruction.
NANOTF_EXPORT uint32_t nanotf_crc32c(const uint8_t* data, uint64_t bytes, int portable);
}

#endif  // NANOTF_COLLECTIVES_NATIVE_RECORDS_H_
