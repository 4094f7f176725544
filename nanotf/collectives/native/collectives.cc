#include "collectives.h"

#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "reduce.h"

namespace nanotf {
namespace {

// Several tensors treated as one stream of bytes.
class Stream {
 public:
  Stream(const NanotfFragment* fragments, int64_t count) : fragments_(fragments) {
    starts_.reserve(count);
    for (int64_t i = 0; i < count; ++i) {
      starts_.push_back(bytes_);
      bytes_ += fragments[i].bytes;
    }
  }
  uint64_t bytes() const { return bytes_; }

  // Calls visit(fragment, offset in fragment, offset from begin, bytes) for each piece of
  // [begin, end).
  template <typename Visit>
  void ForEach(uint64_t begin, uint64_t end, Visit visit) const {
    if (begin >= end) return;
    size_t i = std::upper_bound(starts_.begin(), starts_.end(), begin) - starts_.begin() - 1;
    for (uint64_t at = begin; at < end; ++i) {
      const uint64_t inside = at - starts_[i];
      const uint64_t bytes = std::min(fragments_[i].bytes - inside, end - at);
      if (bytes > 0) visit(fragments_[i], inside, at - begin, bytes);
      at += bytes;
    }
  }

 private:
  const NanotfFragment* fragments_;
  std::vector<uint64_t> starts_;
  uint64_t bytes_ = 0;
};

NanotfOffer OfferOf(NanotfKind kind, uint64_t bytes = 0, NanotfType type = kNanotfFloat32,
                    NanotfReduction reduction = kNanotfSum) {
  return {0, static_cast<uint32_t>(kind), static_cast<uint32_t>(type),
          static_cast<uint32_t>(reduction), bytes};
}

uint64_t Rounds(uint64_t bytes, uint64_t chunk) {
  return std::max<uint64_t>(1, (bytes + chunk - 1) / chunk);
}

struct Chunk {
  uint64_t begin;
  uint64_t end;
  uint64_t bytes() const { return end - begin; }
};

Chunk ChunkOf(uint64_t round, uint64_t chunk, uint64_t bytes) {
  return {std::min(round * chunk, bytes), std::min((round + 1) * chunk, bytes)};
}

// Runs steps 2 to 6 of the protocol. `total` is called after the first meeting, when the sizes of
// all ranks are known, and returns the number of rounds. Until then, `own` is the number of rounds
// that this rank can produce.
template <typename Produce, typename Total, typename Consume>
void RunRounds(Call& call, uint64_t own, Produce produce, Total total, Consume consume) {
  uint64_t rounds = own;
  uint64_t produced = 0;
  auto produce_until = [&](uint64_t wanted) {
    while (produced < std::min(wanted, rounds)) {
      produce(produced);
      call.PostProduced(++produced);
    }
  };
  for (uint64_t round = 0; round < rounds; ++round) {
    produce_until(round == 0 ? 1 : round + 2);
    if (round == 0) {
      produce_until(2);
      call.Meet();
      rounds = total();
    } else {
      call.AwaitProduced(round + 1);
    }
    consume(round);
  }
}

void CopyIn(const Call& call, const Stream& stream, int rank, uint64_t round, const Chunk& chunk) {
  char* buffer = call.input(rank, round);
  stream.ForEach(chunk.begin, chunk.end,
                 [&](const NanotfFragment& f, uint64_t inside, uint64_t at, uint64_t n) {
                   memcpy(buffer + at, static_cast<const char*>(f.in) + inside, n);
                 });
}

// While caches feed one chunk's reduction, main memory can already deliver the input of the chunk
// after next: 94 MB take 8.5 ms with prefetching and 14 ms without (two ranks, best of many).
constexpr uint64_t kStride = 4096;  // bytes reduced between prefetches

void Prefetch(const Stream& stream, uint64_t begin, uint64_t end) {
  stream.ForEach(begin, end, [](const NanotfFragment& f, uint64_t inside, uint64_t, uint64_t n) {
    const char* from = static_cast<const char*>(f.in) + inside;
    for (uint64_t at = 0; at < n; at += kLine) __builtin_prefetch(from + at, 0, 2);
  });
}

// Every rank reduces everything, with one wait per chunk.
void ReduceSymmetric(Group& group, Call& call, const Stream& stream, NanotfType type,
                     NanotfReduction reduction) {
  const uint64_t size_of_chunk = group.config().chunk_bytes;
  const uint64_t rounds = Rounds(stream.bytes(), size_of_chunk);
  const int size = group.size();
  std::vector<const void*> inputs(size);
  const ReduceFunction reduce = BestReduce().function;
  RunRounds(
      call, rounds,
      [&](uint64_t round) {
        CopyIn(call, stream, group.rank(), round, ChunkOf(round, size_of_chunk, stream.bytes()));
      },
      [&] { return rounds; },
      [&](uint64_t round) {
        const Chunk chunk = ChunkOf(round, size_of_chunk, stream.bytes());
        const Chunk later = ChunkOf(round + 2, size_of_chunk, stream.bytes());
        for (uint64_t begin = 0; begin < chunk.bytes(); begin += kStride) {
          const uint64_t end = std::min(begin + kStride, chunk.bytes());
          stream.ForEach(chunk.begin + begin, chunk.begin + end,
                         [&](const NanotfFragment& f, uint64_t inside, uint64_t at, uint64_t n) {
                           for (int rank = 0; rank < size; ++rank) {
                             inputs[rank] = call.input(rank, round) + begin + at;
                           }
                           reduce(type, reduction, inputs.data(), size,
                                  static_cast<char*>(f.out) + inside, n);
                         });
          Prefetch(stream, later.begin + begin, std::min(later.begin + end, later.end));
        }
      });
}

// Each rank reduces an N-th of each chunk, then all copy the results: steps 5a and 5b.
void ReduceTwoStep(Group& group, Call& call, const Stream& stream, NanotfType type,
                   NanotfReduction reduction) {
  const uint64_t size_of_chunk = group.config().chunk_bytes;
  const uint64_t rounds = Rounds(stream.bytes(), size_of_chunk);
  const int size = group.size();
  std::vector<const void*> inputs(size);
  const ReduceFunction reduce = BestReduce().function;
  auto part_bytes = [&](const Chunk& chunk) {
    return RoundUp((chunk.bytes() + size - 1) / size, kLine);
  };
  auto reduce_own_part = [&](uint64_t round) {
    const Chunk chunk = ChunkOf(round, size_of_chunk, stream.bytes());
    const Chunk part = ChunkOf(group.rank(), part_bytes(chunk), chunk.bytes());
    for (int rank = 0; rank < size; ++rank) inputs[rank] = call.input(rank, round) + part.begin;
    reduce(type, reduction, inputs.data(), size, call.result(group.rank(), round), part.bytes());
    call.PostReduced(round + 1);
  };
  auto copy_results = [&](uint64_t round) {
    call.AwaitReduced(round + 1);
    const Chunk chunk = ChunkOf(round, size_of_chunk, stream.bytes());
    // Beginning with the own part, so that the ranks do not all read from the same one.
    for (int i = 0; i < size; ++i) {
      const int owner = (group.rank() + i) % size;
      const Chunk part = ChunkOf(owner, part_bytes(chunk), chunk.bytes());
      const char* result = call.result(owner, round);
      stream.ForEach(chunk.begin + part.begin, chunk.begin + part.end,
                     [&](const NanotfFragment& f, uint64_t inside, uint64_t at, uint64_t n) {
                       memcpy(static_cast<char*>(f.out) + inside, result + at, n);
                     });
    }
  };
  RunRounds(
      call, rounds,
      [&](uint64_t round) {
        CopyIn(call, stream, group.rank(), round, ChunkOf(round, size_of_chunk, stream.bytes()));
      },
      [&] { return rounds; },
      [&](uint64_t round) {
        reduce_own_part(round);
        if (round > 0) copy_results(round - 1);
      });
  copy_results(rounds - 1);
}

// A rank's counterparts: rank `peer(k)` does on node k what this rank does on its own node.
class Nodes {
 public:
  explicit Nodes(const Group& group)
      : ranks(group.ranks_of_node()),
        count(group.nodes()),
        index(group.rank() % ranks),
        own(group.rank() / ranks),
        first(group.rank() - index) {}
  int peer(int node) const { return node * ranks + index; }

  const int ranks;  // per node
  const int count;
  const int index;  // of this rank within its node
  const int own;    // this rank's node
  const int first;  // first rank of this node
};

// Each rank reduces a part of the input of its node's ranks, then the results of all nodes for that
// part. Then all copy from the ranks of their node: steps 5a to 5c for several nodes.
void ReduceByNodes(Group& group, Call& call, const Stream& stream, NanotfType type,
                   NanotfReduction reduction) {
  const uint64_t size_of_chunk = group.config().chunk_bytes;
  const uint64_t rounds = Rounds(stream.bytes(), size_of_chunk);
  const Nodes nodes(group);
  std::vector<const void*> inputs(std::max(nodes.ranks, nodes.count));
  const ReduceFunction reduce = BestReduce().function;
  auto chunk_of = [&](uint64_t round) { return ChunkOf(round, size_of_chunk, stream.bytes()); };
  auto part_of = [&](int part, const Chunk& chunk) {
    return ChunkOf(part, RoundUp((chunk.bytes() + nodes.ranks - 1) / nodes.ranks, kLine),
                   chunk.bytes());
  };
  auto reduce_of_node = [&](uint64_t round) {
    const Chunk part = part_of(nodes.index, chunk_of(round));
    for (int i = 0; i < nodes.ranks; ++i) {
      inputs[i] = call.input(nodes.first + i, round) + part.begin;
    }
    reduce(type, reduction, inputs.data(), nodes.ranks, call.result(group.rank(), round),
           part.bytes());
    call.PostReduced(round + 1);
  };
  auto combine = [&](uint64_t round) {
    const Chunk part = part_of(nodes.index, chunk_of(round));
    for (int node = 0; node < nodes.count; ++node) {
      const int peer = nodes.peer(node);
      call.AwaitReducedBy(peer, round + 1);
      inputs[node] = call.result(peer, round);
    }
    reduce(type, reduction, inputs.data(), nodes.count, call.total(group.rank(), round),
           part.bytes());
    call.PostCombined(round + 1);
  };
  auto copy_totals = [&](uint64_t round) {
    const Chunk chunk = chunk_of(round);
    // Beginning with the own part, so that the ranks do not all read from the same one.
    for (int i = 0; i < nodes.ranks; ++i) {
      const int index = (nodes.index + i) % nodes.ranks;
      const Chunk part = part_of(index, chunk);
      call.AwaitCombinedBy(nodes.first + index, round + 1);
      const char* total = call.total(nodes.first + index, round);
      stream.ForEach(chunk.begin + part.begin, chunk.begin + part.end,
                     [&](const NanotfFragment& f, uint64_t inside, uint64_t at, uint64_t n) {
                       memcpy(static_cast<char*>(f.out) + inside, total + at, n);
                     });
    }
  };
  RunRounds(
      call, rounds,
      [&](uint64_t round) { CopyIn(call, stream, group.rank(), round, chunk_of(round)); },
      [&] { return rounds; },
      [&](uint64_t round) {
        reduce_of_node(round);
        if (round > 0) combine(round - 1);
        if (round > 1) copy_totals(round - 2);
      });
  combine(rounds - 1);
  if (rounds > 1) copy_totals(rounds - 2);
  copy_totals(rounds - 1);
}

uint64_t ElementBytes(NanotfType type) {
  switch (type) {
    case kNanotfFloat64:
    case kNanotfInt64:
      return 8;
    case kNanotfFloat16:
    case kNanotfBfloat16:
      return 2;
    default:
      return 4;
  }
}

// Returns true if each node reduces its own input first. 16-bit floats are rounded only once.
bool GoesByNodes(const Group& group, NanotfType type) {
  return group.nodes() > 1 && ElementBytes(type) > 2;
}

// Returns the bytes of a rank's part, out of `total` bytes in elements of `element` bytes.
Chunk PartOf(int rank, int size, uint64_t total, uint64_t element) {
  const uint64_t elements = total / element;
  return ChunkOf(rank, (elements + size - 1) / size * element, total);
}

void CheckPart(const Chunk& part, uint64_t given) {
  if (part.bytes() == given) return;
  throw MakeFailure(kNanotfMisused, -1,
                    "a rank's part must be of its size. Received: " + std::to_string(given) +
                        " bytes instead of " + std::to_string(part.bytes()));
}

// The ranks' parts of a vector, and the piece of each part that one round moves.
struct Parts {
  // Returns the piece of a rank's part for a round: the j-th piece in round j.
  Chunk piece_of(int rank, uint64_t round) const {
    const Chunk whole = part(rank);
    const Chunk found = ChunkOf(round, piece, whole.bytes());
    return {whole.begin + found.begin, whole.begin + found.end};
  }
  Chunk part(int rank) const { return PartOf(rank, size, bytes, element); }
  uint64_t rounds() const { return Rounds(part(0).bytes(), piece); }

  int size;          // ranks
  uint64_t bytes;    // of the vector
  uint64_t element;  // bytes
  uint64_t piece;    // bytes
};

// Returns the size of a piece, chosen so that a buffer holds one for every rank.
uint64_t PieceForEach(const Group& group) {
  return group.config().chunk_bytes / group.size() / kLine * kLine;
}

constexpr int kNoRank = -1;

// Copies a piece for each rank but `except` to this rank's buffer: that of rank r at r * piece.
void GivePieces(const Group& group, Call& call, const Stream& stream, const Parts& parts,
                uint64_t round, int except) {
  for (int reader = 0; reader < group.size(); ++reader) {
    if (reader == except) continue;
    const Chunk given = parts.piece_of(reader, round);
    char* buffer = call.input(group.rank(), round) + reader * parts.piece;
    stream.ForEach(given.begin, given.end,
                   [&](const NanotfFragment& f, uint64_t inside, uint64_t at, uint64_t n) {
                     memcpy(buffer + at, static_cast<const char*>(f.in) + inside, n);
                   });
  }
}

// In each round every rank reads from all others and reduces equally much.
void ReduceScatterFlat(Group& group, Call& call, const Stream& stream, const Parts& parts,
                       NanotfType type, char* out) {
  const int size = group.size();
  std::vector<const void*> inputs(size);
  const ReduceFunction reduce = BestReduce().function;
  RunRounds(
      call, parts.rounds(),
      [&](uint64_t round) { GivePieces(group, call, stream, parts, round, group.rank()); },
      [&] { return parts.rounds(); },
      [&](uint64_t round) {
        const Chunk own = parts.piece_of(group.rank(), round);
        char* target = out + (own.begin - parts.part(group.rank()).begin);
        stream.ForEach(own.begin, own.end,
                       [&](const NanotfFragment& f, uint64_t inside, uint64_t at, uint64_t n) {
                         for (int rank = 0; rank < size; ++rank) {
                           inputs[rank] =
                               rank == group.rank()
                                   ? static_cast<const char*>(f.in) + inside
                                   : call.input(rank, round) + group.rank() * parts.piece + at;
                         }
                         reduce(type, kNanotfSum, inputs.data(), size, target + at, n);
                       });
      });
}

// Steps 5a and 5b for several nodes: a rank reduces its node's input for its own part and for the
// parts of its peers on other nodes. Then it reduces the results for its own part.
void ReduceScatterByNodes(Group& group, Call& call, const Stream& stream, const Parts& parts,
                          NanotfType type, char* out) {
  const Nodes nodes(group);
  std::vector<const void*> inputs(std::max(nodes.ranks, nodes.count));
  const ReduceFunction reduce = BestReduce().function;
  auto reduce_of_node = [&](uint64_t round) {
    for (int node = 0; node < nodes.count; ++node) {
      const int owner = nodes.peer(node);
      for (int i = 0; i < nodes.ranks; ++i) {
        inputs[i] = call.input(nodes.first + i, round) + owner * parts.piece;
      }
      reduce(type, kNanotfSum, inputs.data(), nodes.ranks,
             call.result(group.rank(), round) + node * parts.piece,
             parts.piece_of(owner, round).bytes());
    }
    call.PostReduced(round + 1);
  };
  auto combine = [&](uint64_t round) {
    for (int node = 0; node < nodes.count; ++node) {
      call.AwaitReducedBy(nodes.peer(node), round + 1);
      inputs[node] = call.result(nodes.peer(node), round) + nodes.own * parts.piece;
    }
    const Chunk own = parts.piece_of(group.rank(), round);
    reduce(type, kNanotfSum, inputs.data(), nodes.count,
           out + (own.begin - parts.part(group.rank()).begin), own.bytes());
  };
  RunRounds(
      call, parts.rounds(),
      [&](uint64_t round) { GivePieces(group, call, stream, parts, round, kNoRank); },
      [&] { return parts.rounds(); },
      [&](uint64_t round) {
        reduce_of_node(round);
        if (round > 0) combine(round - 1);
      });
  combine(parts.rounds() - 1);
}

}  // namespace

void AllReduce(Group& group, const NanotfCall& what, NanotfType type, NanotfReduction reduction,
               const NanotfFragment* fragments, int64_t count) {
  const Stream stream(fragments, count);
  const IeeeArithmetic arithmetic;
  Call call(group, what, OfferOf(kNanotfAllReduce, stream.bytes(), type, reduction));
  // With two ranks both ways read equally much from the peer, and one step halves the waits.
  if (stream.bytes() <= group.config().symmetric_bytes) {
    ReduceSymmetric(group, call, stream, type, reduction);
  } else if (GoesByNodes(group, type)) {
    ReduceByNodes(group, call, stream, type, reduction);
  } else {
    ReduceTwoStep(group, call, stream, type, reduction);
  }
}

void ReduceScatter(Group& group, const NanotfCall& what, NanotfType type,
                   const NanotfFragment* fragments, int64_t count, void* out, uint64_t out_bytes) {
  const Stream stream(fragments, count);
  const IeeeArithmetic arithmetic;
  const Parts parts{group.size(), stream.bytes(), ElementBytes(type), PieceForEach(group)};
  CheckPart(parts.part(group.rank()), out_bytes);
  Call call(group, what, OfferOf(kNanotfOther));
  const bool by_nodes = GoesByNodes(group, type);
  (by_nodes ? ReduceScatterByNodes : ReduceScatterFlat)(group, call, stream, parts, type,
                                                        static_cast<char*>(out));
}

// A piece crosses from node to node once: the owner's peer on this node reads it from there, and
// this node's ranks read it from that peer one round later. With one node there are no relays.
void GatherParts(Group& group, const NanotfCall& what, const void* part, uint64_t part_bytes,
                 uint64_t element_bytes, const NanotfFragment* fragments, int64_t count) {
  const Stream stream(fragments, count);
  const Nodes nodes(group);
  const bool relays = nodes.count > 1;
  const uint64_t piece = relays ? PieceForEach(group) : group.config().chunk_bytes;
  const Parts parts{group.size(), stream.bytes(), element_bytes, piece};
  CheckPart(parts.part(group.rank()), part_bytes);
  Call call(group, what, OfferOf(kNanotfOther));
  auto give = [&](uint64_t round) {
    const Chunk chunk = ChunkOf(round, parts.piece, part_bytes);
    if (chunk.bytes() == 0) return;
    memcpy(call.input(group.rank(), round), static_cast<const char*>(part) + chunk.begin,
           chunk.bytes());
  };
  auto put = [&](int owner, uint64_t round, const char* source) {
    const Chunk chunk = parts.piece_of(owner, round);
    stream.ForEach(chunk.begin, chunk.end,
                   [&](const NanotfFragment& f, uint64_t inside, uint64_t at, uint64_t n) {
                     memcpy(static_cast<char*>(f.out) + inside, source + at, n);
                   });
  };
  auto take_of_node = [&](uint64_t round) {
    for (int i = 0; i < nodes.ranks; ++i) {
      put(nodes.first + i, round, call.input(nodes.first + i, round));
    }
  };
  auto relay = [&](uint64_t round) {
    for (int node = 0; node < nodes.count; ++node) {
      const Chunk chunk = parts.piece_of(nodes.peer(node), round);
      if (node == nodes.own || chunk.bytes() == 0) continue;
      memcpy(call.result(group.rank(), round) + node * parts.piece,
             call.input(nodes.peer(node), round), chunk.bytes());
    }
    call.PostReduced(round + 1);
  };
  auto take_relayed = [&](uint64_t round) {
    for (int i = 0; i < nodes.ranks; ++i) {
      call.AwaitReducedBy(nodes.first + i, round + 1);
      for (int node = 0; node < nodes.count; ++node) {
        if (node == nodes.own) continue;
        put(node * nodes.ranks + i, round,
            call.result(nodes.first + i, round) + node * parts.piece);
      }
    }
  };
  RunRounds(
      call, parts.rounds(), give, [&] { return parts.rounds(); },
      [&](uint64_t round) {
        take_of_node(round);
        if (relays) relay(round);
        if (relays && round > 0) take_relayed(round - 1);
      });
  if (relays) take_relayed(parts.rounds() - 1);
}

namespace {

// Returns what each rank of the group says.
std::vector<uint64_t> Words(Group& group, const NanotfCall& what, uint64_t word) {
  Call call(group, what, OfferOf(kNanotfOther), word);
  call.PostProduced(1);
  call.Meet();
  std::vector<uint64_t> words;
  for (int rank = 0; rank < group.size(); ++rank) words.push_back(call.rows(rank));
  return words;
}

// Lets all ranks map memory for values. If one cannot, it is nullptr on all.
std::shared_ptr<SharedValues> MapValues(Group& group, const NanotfCall& what,
                                        const NanotfFragment* fragments, int64_t count) {
  struct Descriptor {
    int fd;
    ~Descriptor() {
      if (fd >= 0) close(fd);
    }
  } own{group.rank() == 0 ? SharedValues::MakeFile(fragments, count) : -1};
  const uint64_t made = Words(group, what, static_cast<uint64_t>(own.fd + 1))[0];
  if (made == 0) return nullptr;
  if (group.rank() != 0) {
    own.fd = SharedValues::OpenFile(group.header(0).pid, static_cast<int>(made) - 1);
  }
  std::shared_ptr<SharedValues> values = SharedValues::Map(own.fd, fragments, count);
  for (const uint64_t has : Words(group, what, values != nullptr)) {
    if (!has) return nullptr;
  }
  return values;
}

// Returns the memory of a place, made at first; nullptr on all ranks if there is none.
std::shared_ptr<SharedValues> ValuesIn(Group& group, const NanotfCall& what, int64_t place,
                                       const NanotfFragment* fragments, int64_t count) {
  // On several nodes each reads faster from memory of its own.
  if (group.nodes() > 1) return nullptr;
  std::shared_ptr<SharedValues> values;
  if (!group.FindValues(place, &values)) {
    values = MapValues(group, what, fragments, count);
    group.KeepValues(place, values);
  }
  return values && values->Fits(fragments, count) ? values : nullptr;
}

// Waits for all ranks; returns a set of values that none of them holds, -1 if there is none.
int FreeSet(Group& group, Call& call) {
  call.PostProduced(1);
  call.Meet();
  uint64_t free = ~uint64_t{0};
  for (int rank = 0; rank < group.size(); ++rank) free &= call.rows(rank);
  return free == 0 ? -1 : __builtin_ctzll(free);
}

}  // namespace

bool GatherShared(Group& group, const NanotfCall& what, int64_t place, const void* part,
                  uint64_t part_bytes, uint64_t element_bytes, NanotfFragment* fragments,
                  int64_t count, void** holds) {
  const std::shared_ptr<SharedValues> values = ValuesIn(group, what, place, fragments, count);
  if (!values) return false;
  Call call(group, what, OfferOf(kNanotfOther), values->Free());
  const int set = FreeSet(group, call);
  if (set < 0) return false;
  for (SharedValues::Behind& behind : values->behind) behind = {};
  for (int64_t i = 0; i < count; ++i) fragments[i].out = values->At(set, i);
  const Stream stream(fragments, count);
  const Chunk own = PartOf(group.rank(), group.size(), stream.bytes(), element_bytes);
  CheckPart(own, part_bytes);
  stream.ForEach(
      own.begin, own.end, [&](const NanotfFragment& f, uint64_t inside, uint64_t at, uint64_t n) {
        memcpy(static_cast<char*>(f.out) + inside, static_cast<const char*>(part) + at, n);
      });
  call.PostReduced(1);
  call.AwaitReduced(1);
  for (int64_t i = 0; i < count; ++i) holds[i] = new Hold(values, set);
  return true;
}

void AllGather(Group& group, const NanotfCall& what, const void* in, uint64_t rows,
               uint64_t row_bytes, NanotfAllocate allocate, void* context) {
  const uint64_t size_of_chunk = group.config().chunk_bytes;
  const uint64_t bytes = rows * row_bytes;
  const int size = group.size();
  Call call(group, what, OfferOf(kNanotfAllGather, row_bytes), rows);
  std::vector<uint64_t> starts(size);
  char* out = nullptr;
  auto produce = [&](uint64_t round) {
    const Chunk chunk = ChunkOf(round, size_of_chunk, bytes);
    if (chunk.bytes() == 0) return;
    memcpy(call.input(group.rank(), round), static_cast<const char*>(in) + chunk.begin,
           chunk.bytes());
  };
  auto allocate_output = [&] {
    uint64_t total = 0;
    uint64_t longest = 0;
    for (int rank = 0; rank < size; ++rank) {
      starts[rank] = total * row_bytes;
      total += call.rows(rank);
      longest = std::max(longest, call.rows(rank));
    }
    void* output = nullptr;
    if (allocate(context, total, &output) != 0) {
      const Failure failure =
          MakeFailure(kNanotfAborted, group.rank(),
                      "rank " + std::to_string(group.rank()) + " has no memory for the " +
                          std::to_string(total * row_bytes) + " bytes that it gathers");
      group.Abort(failure);
      throw failure;
    }
    out = static_cast<char*>(output);
    if (bytes > 0) memcpy(out + starts[group.rank()], in, bytes);
    return Rounds(longest * row_bytes, size_of_chunk);
  };
  auto consume = [&](uint64_t round) {
    for (int rank = 0; rank < size; ++rank) {
      const Chunk chunk = ChunkOf(round, size_of_chunk, call.rows(rank) * row_bytes);
      if (rank == group.rank() || chunk.bytes() == 0) continue;
      memcpy(out + starts[rank] + chunk.begin, call.input(rank, round), chunk.bytes());
    }
  };
  RunRounds(call, Rounds(bytes, size_of_chunk), produce, allocate_output, consume);
}

namespace {

// Notes rows that a rank has changed. More of them than the rank has are all of them.
void Note(SharedValues::Behind* behind, const NanotfRows& rows, int64_t own) {
  if (!behind->are_known) return;
  behind->are_known = static_cast<int64_t>(behind->rows.size()) + rows.count <= own;
  if (behind->are_known) {
    behind->rows.insert(behind->rows.end(), rows.indices, rows.indices + rows.count);
  } else {
    behind->rows.clear();
  }
}

void CheckRows(const Group& group, const NanotfRows& rows, const Chunk& own) {
  for (int64_t i = 0; i < rows.count; ++i) {
    const uint64_t at = static_cast<uint64_t>(rows.indices[i]) * rows.row_bytes;
    if (rows.indices[i] < 0 || at < own.begin || at >= own.end) {
      throw MakeFailure(kNanotfMisused, group.rank(),
                        "update_rows replaces rows of the rank's own part. Received: row " +
                            std::to_string(rows.indices[i]) + " from rank " +
                            std::to_string(group.rank()));
    }
  }
}

void CopyRows(char* table, const NanotfRows& rows) {
  const char* values = static_cast<const char*>(rows.values);
  for (int64_t i = 0; i < rows.count; ++i) {
    memcpy(table + rows.indices[i] * rows.row_bytes, values + i * rows.row_bytes, rows.row_bytes);
  }
}

}  // namespace

Hold* UpdateShared(Group& group, const NanotfCall& what, int64_t place, const NanotfRows& rows,
                   NanotfFragment* table) {
  const Chunk own = PartOf(group.rank(), group.size(), table->bytes, rows.row_bytes);
  CheckRows(group, rows, own);
  const std::shared_ptr<SharedValues> values = ValuesIn(group, what, place, table, 1);
  if (!values) return nullptr;
  Call call(group, what, OfferOf(kNanotfOther), values->Free());
  const int set = FreeSet(group, call);
  if (set < 0) return nullptr;
  const char* before = static_cast<const char*>(table->in);
  // What is noted is about the values of the last call; the table may have got others since.
  const bool is_last = before == values->At(values->last, 0);
  for (int i = 0; i < SharedValues::kSets; ++i) {
    SharedValues::Behind& behind = values->behind[i];
    if (!is_last) behind = {};
    if (i != set) Note(&behind, rows, own.bytes() / rows.row_bytes);
  }
  SharedValues::Behind& behind = values->behind[set];
  char* out = values->At(set, 0);
  if (behind.are_known) {
    for (const int64_t row : behind.rows) {
      memcpy(out + row * rows.row_bytes, before + row * rows.row_bytes, rows.row_bytes);
    }
  } else {
    memcpy(out + own.begin, before + own.begin, own.bytes());
  }
  CopyRows(out, rows);
  behind.are_known = true;
  behind.rows.clear();
  values->last = set;
  call.PostReduced(1);
  call.AwaitReduced(1);
  table->out = out;
  return new Hold(values, set);
}

void UpdateRows(Group& group, const NanotfCall& what, const NanotfRows& rows,
                const NanotfFragment& table) {
  const Chunk own = PartOf(group.rank(), group.size(), table.bytes, rows.row_bytes);
  CheckRows(group, rows, own);
  char* out = static_cast<char*>(table.out);
  memcpy(out, table.in, table.bytes);
  CopyRows(out, rows);
  GatherParts(group, what, out + own.begin, own.bytes(), rows.row_bytes, &table, 1);
}

void Broadcast(Group& group, const NanotfCall& what, int root, const void* in, void* out,
               uint64_t bytes) {
  if (root < 0 || root >= group.size()) {
    throw MakeFailure(kNanotfMisused, group.rank(),
                      "root must be a rank, 0 to " + std::to_string(group.size() - 1) +
                          ". Received: root=" + std::to_string(root));
  }
  const uint64_t size_of_chunk = group.config().chunk_bytes;
  const uint64_t rounds = Rounds(bytes, size_of_chunk);
  const bool is_root = group.rank() == root;
  Call call(group, what, OfferOf(kNanotfBroadcast, bytes));
  RunRounds(
      call, rounds,
      [&](uint64_t round) {
        const Chunk chunk = ChunkOf(round, size_of_chunk, bytes);
        if (is_root && chunk.bytes() > 0) {
          memcpy(call.input(root, round), static_cast<const char*>(in) + chunk.begin,
                 chunk.bytes());
        }
      },
      [&] { return rounds; },
      [&](uint64_t round) {
        const Chunk chunk = ChunkOf(round, size_of_chunk, bytes);
        if (!is_root && chunk.bytes() > 0) {
          memcpy(static_cast<char*>(out) + chunk.begin, call.input(root, round), chunk.bytes());
        }
      });
  if (is_root && out != nullptr && out != in && bytes > 0) memcpy(out, in, bytes);
}

void Barrier(Group& group, const NanotfCall& what) {
  Call call(group, what, OfferOf(kNanotfBarrier));
  RunRounds(call, 1, [](uint64_t) {}, [] { return uint64_t{1}; }, [](uint64_t) {});
}

}  // namespace nanotf
