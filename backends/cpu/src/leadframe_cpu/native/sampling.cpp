// From logits to tokens. One row is one item of work; sums are in double, as in the oracle.
#include <algorithm>
#include <cfloat>
#include <vector>

#include "pool.h"
#include "simd.h"

namespace lf {
namespace {

struct RowArgs {
  const void* logits;  // [rows, vocab]
  void* out;           // int32 or bool [rows]
  int64_t rows, vocab, is_bf16;
};

// Calls visit(i, x) for vectors of a row, the last one padded with `padding`.
template <class T, class Visit>
void each_vector(const T* row, int64_t vocab, float padding, const Visit& visit) {
  int64_t i = 0;
  for (; i + W <= vocab; i += W) visit(i, load(row + i));
  if (i == vocab) return;
  vf rest = splat(padding);
  for (int64_t j = i; j < vocab; j++) rest[j - i] = to_float(row[j]);
  visit(i, rest);
}

template <class T>
float row_max(const T* row, int64_t vocab) {
  vf best = splat(-INFINITY);
  each_vector(row, vocab, -INFINITY, [&](int64_t, vf x) { best = max(x, best); });
  return max_of(best);
}

template <class T>
int32_t row_argmax(const T* row, int64_t vocab) {
  float best = row_max(row, vocab);
  int64_t i = 0;
  for (; i + W <= vocab; i += W) {
    vi equal = load(row + i) == splat(best);
    int any = 0;
    for (int j = 0; j < W; j++) any |= equal[j];
    if (any) break;
  }
  for (; i < vocab; i++)
    if (to_float(row[i]) == best) return (int32_t)i;
  return 0;  // a row of NaN: the caller fails it by its own means
}

template <class T>
bool row_finite(const T* row, int64_t vocab) {
  vi bad{};
  each_vector(row, vocab, 0.0f, [&](int64_t, vf x) {
    vf magnitude = (vf)((vi)x & 0x7fffffff);
    bad |= ~(magnitude <= splat(FLT_MAX));
  });
  for (int j = 0; j < W; j++)
    if (bad[j]) return false;
  return true;
}

template <class T, class Out, class Reduce>
void each_row(const RowArgs& args, const Reduce& reduce) {
  parallel_ranges(args.rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++)
      ((Out*)args.out)[r] = reduce((const T*)args.logits + r * args.vocab, args.vocab);
  });
}

struct SampleArgs {
  const void* logits;
  const float *temperature, *uniform, *min_p, *top_p;  // top_p and top_k may be null: off
  const int32_t* top_k;
  int32_t* tokens;
  bool* covered;
  int64_t rows, vocab, candidates, is_bf16;
};

// The `count` largest entries of a row, largest first.
std::vector<float> largest(const float* row, int64_t vocab, int64_t count) {
  std::vector<float> found(row, row + vocab);
  // sorting needs an order, and a NaN has none
  std::replace_if(found.begin(), found.end(), [](float x) { return x != x; }, -INFINITY);
  if (count < vocab) {
    // most of a vocabulary is far below the candidates: drop it before selecting from the rest
    constexpr int BINS = 1024;
    const float top = row_max(row, vocab);
    auto bin = [top](float x) { return (int)std::min(BINS - 1.0f, (top - x) * (BINS / 64.0f)); };
    int64_t sizes[BINS] = {}, kept = 0, seen = 0;
    int last = -1;
    for (float x : found) sizes[bin(x)]++;
    while (seen < count) seen += sizes[++last];
    for (float x : found)
      if (bin(x) <= last) found[kept++] = x;
    found.resize(kept);
    std::nth_element(found.begin(), found.begin() + (count - 1), found.end(), std::greater<>());
    found.resize(count);
  }
  std::sort(found.begin(), found.end(), std::greater<>());
  return found;
}

// exp(x - best) where x reaches the floor, 0 elsewhere; returns the sum.
double weigh(const float* x, int64_t count, float best, float floor, float* weights) {
  constexpr int64_t BLOCK = 64 * W;
  double total = 0;
  for (int64_t start = 0; start < count; start += BLOCK) {
    int64_t size = std::min(BLOCK, count - start);
    vf lanes{};
    each_vector(x + start, size, -INFINITY, [&](int64_t i, vf value) {
      vf weight = (value >= splat(floor)) ? exp(value - best) : vf{};
      lanes = lanes + weight;
      if (i + W <= size) return store(weights + start + i, weight);
      for (int64_t j = i; j < size; j++) weights[start + j] = weight[j - i];
    });
    total += sum(lanes);
  }
  return total;
}

struct Thresholds {
  float floor;
  bool covered;
};

// Raises the floor for top_k and top_p; says whether the candidates decided both.
Thresholds raise_floor(const float* row, int64_t vocab, int64_t num, float best, float floor,
                       int32_t top_k, float top_p, float* weights) {
  std::vector<float> candidates = largest(row, vocab, num);
  float last = candidates[num - 1];
  bool covered = top_k <= num || top_k >= vocab || last < floor;
  if (top_k > 0 && top_k <= num) floor = std::max(floor, candidates[top_k - 1]);
  if (top_p >= 1) return {floor, covered};
  double wanted = top_p * weigh(row, vocab, best, floor, weights), mass = 0;
  weigh(candidates.data(), num, best, floor, weights);
  int64_t first = 0;
  while (first < num && (mass += weights[first]) < wanted) first++;
  if (first < num) return {std::max(floor, candidates[first]), covered};
  return {floor, covered && (num == vocab || last < floor)};
}

// The first token whose running mass exceeds `target`, or the last that has any.
int32_t draw(const float* weights, int64_t vocab, double target) {
  double mass = 0;
  int64_t last = 0;
  for (int64_t i = 0; i < vocab; i++) {
    mass += weights[i];
    if (mass > target) return (int32_t)i;
    if (weights[i] > 0) last = i;
  }
  return (int32_t)last;
}

template <class T>
void sample_row(const SampleArgs& args, int64_t r) {
  const T* logits = (const T*)args.logits + r * args.vocab;
  float temperature = args.temperature[r];
  args.covered[r] = true;
  if (!(temperature > 0)) {
    args.tokens[r] = row_argmax(logits, args.vocab);
    return;
  }
  float* scaled = scratch(WORK, 2 * args.vocab);
  float* weights = scaled + args.vocab;
  for (int64_t i = 0; i < args.vocab; i++) scaled[i] = to_float(logits[i]) / temperature;
  float best = row_max(scaled, args.vocab);
  float floor = args.min_p[r] > 0 ? best + std::log(args.min_p[r]) : -INFINITY;
  int32_t top_k = args.top_k ? args.top_k[r] : 0;
  float top_p = args.top_p ? args.top_p[r] : 1.0f;
  if (top_k > 0 || top_p < 1) {
    Thresholds raised = raise_floor(scaled, args.vocab, args.candidates, best, floor, top_k, top_p,
                                    weights);
    floor = raised.floor;
    args.covered[r] = raised.covered;
  }
  double total = weigh(scaled, args.vocab, best, floor, weights);
  args.tokens[r] = draw(weights, args.vocab, args.uniform[r] * total);
}

template <class T>
void sample(const SampleArgs& args) {
  parallel(args.rows, [&](int64_t r) { sample_row<T>(args, r); });
}

struct LogprobArgs {
  const void* logits;
  const int32_t* targets;
  float* logprobs;
  int32_t *ranks, *top_ids;  // top_ids and top_logprobs: [rows, k], null when k is 0
  float* top_logprobs;
  int64_t rows, vocab, k, is_bf16;
};

template <class T>
void top_entries(const T* row, int64_t vocab, int64_t k, float norm, int32_t* ids, float* logprobs) {
  typedef std::pair<float, int32_t> Entry;  // the k best so far, the worst of them first
  std::vector<Entry> heap;
  auto better = [](const Entry& a, const Entry& b) { return a.first > b.first; };
  for (int64_t i = 0; i < vocab; i++) {
    float x = to_float(row[i]);
    if (x != x) x = -INFINITY;
    if ((int64_t)heap.size() == k && !(x > heap.front().first)) continue;
    if ((int64_t)heap.size() == k) {
      std::pop_heap(heap.begin(), heap.end(), better);
      heap.pop_back();
    }
    heap.push_back({x, (int32_t)i});
    std::push_heap(heap.begin(), heap.end(), better);
  }
  std::sort(heap.begin(), heap.end(), [](const Entry& a, const Entry& b) {
    return a.first != b.first ? a.first > b.first : a.second < b.second;
  });
  for (int64_t i = 0; i < k; i++) {
    ids[i] = heap[i].second;
    logprobs[i] = heap[i].first - norm;
  }
}

template <class T>
void logprob_row(const LogprobArgs& args, int64_t r) {
  const T* row = (const T*)args.logits + r * args.vocab;
  float best = row_max(row, args.vocab);
  double total = 0;
  each_vector(row, args.vocab, -INFINITY, [&](int64_t, vf x) { total += sum(exp(x - best)); });
  float norm = best + (float)std::log(total);
  int64_t target = std::clamp<int64_t>(args.targets[r], 0, args.vocab - 1);
  float chosen = to_float(row[target]);
  vi above{};
  each_vector(row, args.vocab, -INFINITY, [&](int64_t, vf x) { above += x > splat(chosen); });
  int32_t rank = 1;
  for (int j = 0; j < W; j++) rank -= above[j];  // a true lane is -1
  args.logprobs[r] = chosen - norm;
  args.ranks[r] = rank;
  if (args.k)
    top_entries(row, args.vocab, args.k, norm, args.top_ids + r * args.k,
                args.top_logprobs + r * args.k);
}

struct EditArgs {
  float* logits;
  const int32_t *ids, *keep_only;
  const float *scale, *add;
  int64_t rows, vocab, edits;
};

void edit_row(const EditArgs& args, int64_t r) {
  float* row = args.logits + r * args.vocab;
  std::vector<float> edited(args.edits);
  auto column = [&](int64_t a) {
    return std::clamp<int64_t>(args.ids[r * args.edits + a], 0, args.vocab - 1);
  };
  for (int64_t a = 0; a < args.edits; a++) {
    float x = row[column(a)], scale = args.scale[r * args.edits + a];
    edited[a] = (x > 0 ? x / scale : x * scale) + args.add[r * args.edits + a];
  }
  if (args.keep_only[r] == 1) std::fill_n(row, args.vocab, -INFINITY);
  for (int64_t a = 0; a < args.edits; a++) row[column(a)] = edited[a];
}

}  // namespace
}  // namespace lf

extern "C" {

void lf_argmax(const lf::RowArgs* args) {
  if (args->is_bf16)
    lf::each_row<lf::bf16, int32_t>(*args, lf::row_argmax<lf::bf16>);
  else
    lf::each_row<float, int32_t>(*args, lf::row_argmax<float>);
}

void lf_finite_rows(const lf::RowArgs* args) {
  if (args->is_bf16)
    lf::each_row<lf::bf16, bool>(*args, lf::row_finite<lf::bf16>);
  else
    lf::each_row<float, bool>(*args, lf::row_finite<float>);
}

void lf_sample(const lf::SampleArgs* args) {
  args->is_bf16 ? lf::sample<lf::bf16>(*args) : lf::sample<float>(*args);
}

void lf_topk_logprobs(const lf::LogprobArgs* args) {
  lf::parallel(args->rows, [&](int64_t r) {
    args->is_bf16 ? lf::logprob_row<lf::bf16>(*args, r) : lf::logprob_row<float>(*args, r);
  });
}

void lf_edit_logits(const lf::EditArgs* args) {
  lf::parallel(args->rows, [&](int64_t r) { lf::edit_row(*args, r); });
}
}
