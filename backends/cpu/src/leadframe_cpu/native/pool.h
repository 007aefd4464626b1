// The thread pool: work is divided into items, each thread has a range of them and, when that is
// done, takes from the ends of the others' ranges.
//
// Nobody waits for a thread that has not started: when the machine is busy, the caller does all
// the items itself. Idle workers spin briefly and then sleep, so they leave the cores to others.
#pragma once
#include <cstddef>
#include <cstdint>

namespace lf {

typedef void (*ItemFunction)(const void* context, int64_t item);

int threads();
void run_items(int64_t count, ItemFunction function, const void* context);

// Calls body(item) for every item in [0, count).
template <class Body>
void parallel(int64_t count, const Body& body) {
  run_items(
      count,
      [](const void* context, int64_t item) { (*static_cast<const Body*>(context))(item); },
      &body);
}

// Calls body(begin, end) for pieces of [0, count); inline when all of it is less than `grain`.
template <class Body>
void parallel_ranges(int64_t count, int64_t grain, const Body& body) {
  int64_t pieces = count / (grain > 0 ? grain : 1);
  int64_t most = (int64_t)threads() * 4;
  pieces = pieces < 1 ? 1 : (pieces > most ? most : pieces);
  if (pieces == 1) return body((int64_t)0, count);
  parallel(pieces, [&](int64_t i) { body(count * i / pieces, count * (i + 1) / pieces); });
}

// Scratch memory of the calling thread, one buffer a purpose, aligned to 4,096 bytes. The next call
// for the same purpose may move it. INPUT is written by the caller and read by all threads.
enum Purpose { INPUT, WORK, NUM_PURPOSES };
float* scratch(Purpose purpose, size_t num_floats);

}  // namespace lf
