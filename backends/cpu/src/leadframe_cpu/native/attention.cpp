// Paged attention over a cache made for it.
//
// A block of a KV head holds its keys transposed, [head_dim][block], so that one vector load brings
// one dimension of W keys, then its values, [block][head_dim padded to GROUP]. A block is a whole
// number of GROUPs. Work is divided by sequence, KV head and tile of queries; the query heads that
// share a KV head share its loads. Softmax is online over fixed chunks of keys, counted from the
// start of the sequence: a query's result does not depend on the others. Slots past a sequence's
// end are never multiplied: their scores are replaced, their values not read.
#include <algorithm>
#include <vector>

#include "formats.h"
#include "pool.h"

namespace lf {
namespace {

constexpr int GROUP = 16;            // keys scored at a time; a whole number of vectors
constexpr int GV = GROUP / W;        // vectors a group
constexpr int CHUNK = 64;            // keys between two corrections of the running softmax
constexpr int GROUPS = CHUNK / GROUP;
constexpr float NEGATIVE = -INFINITY;

int64_t round_up(int64_t n) { return (n + GROUP - 1) / GROUP * GROUP; }

struct Layout {
  int64_t values, head_size, block_size;
  Layout(int64_t kv_heads, int64_t block, int64_t dim)
      : values(round_up(dim)), head_size(block * (dim + values)), block_size(kv_heads * head_size) {}
};

struct AppendArgs {
  void* kv;
  const void *k, *v;  // [tokens, kv_heads, dim]
  const int32_t* slots;
  int64_t tokens, kv_heads, block, dim, kv_is_bf16, is_bf16;
};

template <class C, class T>
void append(const AppendArgs& args) {
  Layout layout(args.kv_heads, args.block, args.dim);
  parallel_ranges(args.tokens, 1 + 4096 / (args.kv_heads * args.dim), [&](int64_t b, int64_t e) {
    for (int64_t t = b; t < e; t++) {
      int64_t block = args.slots[t] / args.block, offset = args.slots[t] % args.block;
      for (int64_t h = 0; h < args.kv_heads; h++) {
        C* head = (C*)args.kv + block * layout.block_size + h * layout.head_size;
        const T* k = (const T*)args.k + (t * args.kv_heads + h) * args.dim;
        const T* v = (const T*)args.v + (t * args.kv_heads + h) * args.dim;
        C* values = head + args.dim * args.block + offset * layout.values;
        for (int64_t d = 0; d < args.dim; d++) {
          head[d * args.block + offset] = from_float<C>(to_float(k[d]));
          values[d] = from_float<C>(to_float(v[d]));
        }
      }
    }
  });
}

struct Args {
  const void *q, *kv;
  void* out;
  const int32_t *query_start, *seq_lens, *block_table;
  int64_t tokens, num_seqs, num_decodes, table_width, heads, kv_heads, block, dim, window;
  int64_t is_bf16, kv_is_bf16;
  double scale, softcap;  // window 0 and softcap 0 are off
};

struct Item {  // queries that are computed together
  int32_t row, kv_head, first_token, num_tokens, first_head, num_heads;
};

// acc[R][N vectors] += a[R][count] * b[count][N vectors]. Meanwhile the same part of `ahead`, if
// not null, is asked for: the next block may be anywhere, and no hardware foresees where.
template <int R, int N, class C>
LF_INLINE void accumulate(const float* a, int64_t a_stride, int64_t a_step, const C* b,
                          int64_t b_stride, int64_t count, const C* ahead, vf (&acc)[R][N]) {
  for (int64_t i = 0; i < count; i++) {
    if (ahead)
      for (int at = 0; at < N * W; at += 64 / (int)sizeof(C))
        __builtin_prefetch(ahead + i * b_stride + at, 0, 2);
    vf w[N];
    LF_UNROLL
    for (int n = 0; n < N; n++) w[n] = load(b + i * b_stride + n * W);
    LF_UNROLL
    for (int r = 0; r < R; r++) {
      vf x = splat(a[r * a_stride + i * a_step]);
      LF_UNROLL
      for (int n = 0; n < N; n++) acc[r][n] = fma(x, w[n], acc[r][n]);
    }
  }
}

template <class C>
class Attention {
 public:
  explicit Attention(const Args& args)
      : args_(args), layout_(args.kv_heads, args.block, args.dim),
        group_size_(args.heads / args.kv_heads), size_(args.is_bf16 ? 2 : 4) {
    for (int64_t row = 0; row < args.num_seqs; row++) add_items((int32_t)row);
  }

  void run() {
    clear_padding();
    int64_t count = (int64_t)items_.size();
    parallel(count, [this, count](int64_t i) {
      const Item& item = items_[i];
      dispatch<MAX_ROWS>(item, items_[i + 1 < count ? i + 1 : i], item.num_tokens * item.num_heads);
    });
  }

 private:
  void add_items(int32_t row) {
    bool is_decode = row < args_.num_decodes;
    int64_t first = is_decode ? row : args_.query_start[row];
    int64_t last = is_decode ? row + 1 : args_.query_start[row + 1];
    if (args_.seq_lens[row] <= 0) return;
    int64_t heads = std::min<int64_t>(group_size_, MAX_ROWS);
    int64_t tokens = std::max<int64_t>(1, MAX_ROWS / group_size_);
    for (int64_t t = first; t < last; t += tokens)
      for (int64_t kv_head = 0; kv_head < args_.kv_heads; kv_head++)
        for (int64_t h = 0; h < group_size_; h += heads)
          items_.push_back({row, (int32_t)kv_head, (int32_t)t,
                            (int32_t)std::min(tokens, last - t),
                            (int32_t)(kv_head * group_size_ + h),
                            (int32_t)std::min(heads, group_size_ - h)});
  }

  // Tokens of no row, and rows of length 0: zeros.
  void clear_padding() {
    std::vector<bool> is_live(args_.tokens);
    for (const Item& item : items_)
      for (int t = 0; t < item.num_tokens; t++) is_live[item.first_token + t] = true;
    int64_t width = args_.heads * args_.dim;
    for (int64_t t = 0; t < args_.tokens; t++)
      if (!is_live[t]) std::memset((char*)args_.out + t * width * size_, 0, width * size_);
  }

  // Fewer sizes of tiles than rows there can be: each costs compile time.
  static constexpr int smaller(int rows) { return rows > 8 ? 8 : (rows > 4 ? rows - 2 : rows - 1); }

  template <int R>
  void dispatch(const Item& item, const Item& next, int rows) {
    if constexpr (R > 1)
      if (rows <= smaller(R)) return dispatch<smaller(R)>(item, next, rows);
    attend<R>(item, next, rows);
  }

  // Rows are (token, head) pairs, head last.
  struct Sight {  // the keys [first, end) that a row sees
    int64_t first, end;
  };

  // Of R rows, `rows` are live; the others are zeros that see nothing. `next` is what this thread
  // will probably do after this.
  template <int R>
  void attend(const Item& item, const Item& next, int rows) {
    int64_t dim = args_.dim, width = layout_.values;
    float* queries = scratch(WORK, R * (dim + CHUNK + width));
    float* scores = queries + R * dim;
    float* out = scores + R * CHUNK;
    std::fill_n(queries, R * dim, 0.0f);
    Sight sight[R] = {};
    int64_t first = INT64_MAX, end = 0;
    for (int r = 0; r < rows; r++) {
      sight[r] = see(item, item.first_token + r / item.num_heads);
      first = std::min(first, sight[r].first);
      end = std::max(end, sight[r].end);
      int64_t at = query_at(item, r);
      args_.is_bf16 ? read_query((const bf16*)args_.q + at, R, queries + r)
                    : read_query((const float*)args_.q + at, R, queries + r);
    }
    std::fill_n(out, R * width, 0.0f);
    float best[R];
    vf total[R];
    for (int r = 0; r < R; r++) best[r] = NEGATIVE, total[r] = vf{};
    const C *heads[GROUPS], *ahead[GROUPS];
    int64_t begin = first / CHUNK * CHUNK;
    find_groups(item, begin, end, ahead);
    for (int64_t start = begin; start < end; start += CHUNK) {
      int64_t live = std::min<int64_t>(GROUPS, (end - start + GROUP - 1) / GROUP);
      std::copy_n(ahead, GROUPS, heads);
      start + CHUNK < end ? find_groups(item, start + CHUNK, end, ahead) : find_first(next, ahead);
      score<R>(queries, heads, ahead, live, scores);
      for (int r = 0; r < R; r++)
        soften(scores + r * CHUNK, start, live, sight[r], best[r], total[r], out + r * width);
      int64_t skip = std::max<int64_t>(0, first - start);
      weigh<R>(scores, heads, ahead, start, skip, std::min(end, start + CHUNK) - start, out);
    }
    for (int r = 0; r < rows; r++) finish(item, r, sum(total[r]), out + r * width);
  }

  template <class T>
  void read_query(const T* q, int64_t stride, float* out) const {
    for (int64_t d = 0; d < args_.dim; d++) out[d * stride] = to_float(q[d]) * (float)args_.scale;
  }

  int64_t query_at(const Item& item, int r) const {
    int64_t token = item.first_token + r / item.num_heads;
    return (token * args_.heads + item.first_head + r % item.num_heads) * args_.dim;
  }

  Sight see(const Item& item, int64_t token) const {
    int64_t length = args_.seq_lens[item.row], end = length;
    if (item.row >= args_.num_decodes)
      end = length - args_.query_start[item.row + 1] + token + 1;
    return {args_.window > 0 ? std::max<int64_t>(0, end - args_.window) : 0, end};
  }

  // Points at the KV head's part of the block of each group of keys in [start, end), up to a chunk.
  void find_groups(const Item& item, int64_t start, int64_t end, const C** heads) const {
    const int32_t* table = args_.block_table + item.row * args_.table_width;
    for (int64_t g = 0; g < GROUPS; g++) {
      int64_t key = start + g * GROUP;
      heads[g] = nullptr;
      if (key < end)
        heads[g] = (const C*)args_.kv + table[key / args_.block] * layout_.block_size +
                   item.kv_head * layout_.head_size + key % args_.block;
    }
  }

  void find_first(const Item& item, const C** heads) const {
    Sight sight = see(item, item.first_token);
    find_groups(item, sight.first / CHUNK * CHUNK, sight.end, heads);
  }

  template <int R>
  void score(const float* queries, const C* const* heads, const C* const* ahead, int64_t live,
             float* scores) const {
    for (int64_t g = 0; g < live; g++) {
      vf acc[R][GV] = {};
      accumulate<R, GV>(queries, 1, R, heads[g], args_.block, args_.dim, ahead[g], acc);
      LF_UNROLL
      for (int r = 0; r < R; r++)
        LF_UNROLL
        for (int n = 0; n < GV; n++) store(scores + r * CHUNK + g * GROUP + n * W, acc[r][n]);
    }
  }

  // Scores become weights; the running sum and output are corrected for a new maximum.
  void soften(float* scores, int64_t start, int64_t live, Sight sight, float& best, vf& total,
              float* out) const {
    vi lane;
    for (int i = 0; i < W; i++) lane[i] = i;
    vf top = splat(NEGATIVE);
    for (int64_t i = 0; i < live * GROUP; i += W) {
      vi key = lane + (int32_t)(start + i);
      vf s = load(scores + i);
      if (args_.softcap > 0) s = (float)args_.softcap * tanh(s / (float)args_.softcap);
      vi seen = (key < splat_int((int32_t)sight.end)) & (key >= splat_int((int32_t)sight.first));
      s = seen ? s : splat(NEGATIVE);
      store(scores + i, s);
      top = (s > top) | (s != s) ? s : top;  // a NaN must not vanish
    }
    float high = max_of(top);
    if (high == NEGATIVE) {
      std::fill_n(scores, live * GROUP, 0.0f);
      return;
    }
    if (high > best || high != high) {
      float correction = best == NEGATIVE ? 0.0f : exp(splat(best - high))[0];
      total = total * correction;
      for (int64_t d = 0; d < layout_.values; d += W)
        store(out + d, load(out + d) * correction);
      best = high;
    }
    for (int64_t i = 0; i < live * GROUP; i += W) {
      vf s = load(scores + i);
      vf weight = exp(s - best);
      store(scores + i, weight);
      total = total + weight;
    }
  }

  // out[R][dim] += weights[R][keys skip to count] * values.
  template <int R>
  void weigh(const float* weights, const C* const* heads, const C* const* ahead, int64_t start,
             int64_t skip, int64_t count, float* out) const {
    constexpr int N = R * 4 <= 24 && W == 16 ? 4 : (R <= 6 || W == 16 ? 2 : 1);
    int64_t d = 0;
    for (; d + N * W <= layout_.values; d += N * W)
      weigh_slice<R, N>(weights, heads, ahead, start, skip, count, d, out);
    for (; d < layout_.values; d += W)
      weigh_slice<R, 1>(weights, heads, ahead, start, skip, count, d, out);
  }

  template <int R, int N>
  void weigh_slice(const float* weights, const C* const* heads, const C* const* ahead,
                   int64_t start, int64_t skip, int64_t count, int64_t d, float* out) const {
    vf acc[R][N];
    LF_UNROLL
    for (int r = 0; r < R; r++)
      LF_UNROLL
      for (int n = 0; n < N; n++) acc[r][n] = load(out + r * layout_.values + d + n * W);
    for (int64_t g = skip / GROUP; g * GROUP < count; g++) {
      int64_t from = std::max(skip, g * GROUP), to = std::min(count, (g + 1) * GROUP);
      int64_t offset = (start + g * GROUP) % args_.block;  // heads[g] points at this key
      int64_t at = args_.dim * args_.block + (from - g * GROUP) * layout_.values + d;
      const C* values = heads[g] + offset * (layout_.values - 1) + at;
      const C* next = ahead[g] && args_.block == GROUP ? ahead[g] + at : nullptr;
      accumulate<R, N>(weights + from, CHUNK, 1, values, layout_.values, to - from, next, acc);
    }
    LF_UNROLL
    for (int r = 0; r < R; r++)
      LF_UNROLL
      for (int n = 0; n < N; n++) store(out + r * layout_.values + d + n * W, acc[r][n]);
  }

  void finish(const Item& item, int r, float total, const float* out) const {
    float scale = total > 0 || total != total ? 1.0f / total : 0.0f;
    int64_t at = query_at(item, r);
    for (int64_t d = 0; d < args_.dim; d++) {
      if (args_.is_bf16)
        ((bf16*)args_.out)[at + d] = from_float<bf16>(out[d] * scale);
      else
        ((float*)args_.out)[at + d] = out[d] * scale;
    }
  }

  const Args& args_;
  Layout layout_;
  int64_t group_size_, size_;  // query heads a KV head; bytes of an element of q
  std::vector<Item> items_;
};

}  // namespace
}  // namespace lf

extern "C" {

int64_t lf_kv_block_elements(int64_t kv_heads, int64_t block, int64_t dim) {
  return lf::Layout(kv_heads, block, dim).block_size;
}

void lf_kv_append(const lf::AppendArgs* args) {
  using lf::bf16;
  if (args->kv_is_bf16)
    args->is_bf16 ? lf::append<bf16, bf16>(*args) : lf::append<bf16, float>(*args);
  else
    args->is_bf16 ? lf::append<float, bf16>(*args) : lf::append<float, float>(*args);
}

void lf_attention(const lf::Args* args) {
  args->kv_is_bf16 ? lf::Attention<lf::bf16>(*args).run() : lf::Attention<float>(*args).run();
}
}
