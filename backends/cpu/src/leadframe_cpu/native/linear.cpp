// y[M, N] = x[M, K] * w[N, K]^T + bias, for weights in panels.
//
// Rows are cut into tiles of at most MAX_ROWS, whose products with one panel stay in registers.
// The inputs of a tile are packed [k][rows], so that a tile reads one stream of them. Every output
// is one chain of fused multiply-adds over k in order, whatever the tile: a row's result does not
// depend on the other rows.
#include <algorithm>
#include <functional>
#include <vector>

#include "formats.h"
#include "pool.h"

namespace lf {
namespace {

struct Args {  // eight bytes a field; see native_ops.py
  const void* x;
  void* y;
  const char* weight;
  const float* bias;
  int64_t format, m, n, k;
  int64_t is_bf16;  // of x and y
};

constexpr int64_t MAX_K_BLOCK = 768;  // inputs that a panel keeps in the first cache levels

struct Rows {  // how M rows divide into tiles
  int64_t m, tiles;
  explicit Rows(int64_t m) : m(m), tiles((m + MAX_ROWS - 1) / MAX_ROWS) {}
  int64_t start(int64_t tile) const { return m / tiles * tile + (tile < m % tiles ? tile : m % tiles); }
};

// c[R][PANEL] = (c or 0) + a[k][R] * panel[k][PANEL] for k in [begin, end); a row of c is `stride`
// apart. With every input, LINES cache lines of `ahead` are asked for.
template <class F, int R, int LINES>
void tile(const float* a, const char* panel, int64_t begin, int64_t end, float* c, int64_t stride,
          const char* ahead) {
  vf acc[R][PANEL_VECTORS];
  LF_UNROLL
  for (int r = 0; r < R; r++)
    LF_UNROLL
    for (int v = 0; v < PANEL_VECTORS; v++)
      acc[r][v] = begin ? load(c + r * stride + v * W) : vf{};
  F::template each<1>(panel, 0, begin, end, [&](int64_t k, const Lanes<1>& w) LF_INLINE_LAMBDA {
    LF_UNROLL
    for (int line = 0; line < LINES; line++)
      __builtin_prefetch(ahead + (k * LINES + line) * 64, 0, 2);
    LF_UNROLL
    for (int r = 0; r < R; r++) {
      vf x = splat(a[k * R + r]);
      LF_UNROLL
      for (int v = 0; v < PANEL_VECTORS; v++) acc[r][v] = fma(x, w[v], acc[r][v]);
    }
  });
  LF_UNROLL
  for (int r = 0; r < R; r++)
    LF_UNROLL
    for (int v = 0; v < PANEL_VECTORS; v++) store(c + r * stride + v * W, acc[r][v]);
}

// One row times P panels: as many sums at a time as it takes to hide their latency. c is [P][PANEL].
template <class F, int P>
void row_tile(const float* a, const char* panel, int64_t stride, int64_t k, float* c) {
  vf acc[P * PANEL_VECTORS] = {};
  F::template each<P>(panel, stride, 0, k, [&](int64_t i, const Lanes<P>& w) LF_INLINE_LAMBDA {
    vf x = splat(a[i]);
    LF_UNROLL
    for (int v = 0; v < P * PANEL_VECTORS; v++) acc[v] = fma(x, w[v], acc[v]);
  });
  LF_UNROLL
  for (int v = 0; v < P * PANEL_VECTORS; v++) store(c + v * W, acc[v]);
}

typedef void (*Tile)(const float*, const char*, int64_t, int64_t, float*, int64_t, const char*);

constexpr int PANEL_LINES = PANEL * 4 / 64;  // cache lines an input of a plain panel
constexpr int64_t AHEAD_BYTES = 4096;        // how far before its use a stream is asked for

// Rows up to which weights that are not plain floats are decoded in registers, again for each tile.
constexpr int MAX_DECODED_ROWS = 4;

template <class F, int LINES, int R = F::IS_FLOAT ? MAX_ROWS : MAX_DECODED_ROWS>
Tile tile_of(int64_t rows) {
  if constexpr (R > 1)
    if (rows < R) return tile_of<F, LINES, R - 1>(rows);
  return tile<F, R, LINES>;
}

template <class F>
void decode(const char* panel, int64_t begin, int64_t end, float* out) {
  F::template each<1>(panel, 0, begin, end, [&](int64_t k, const Lanes<1>& w) LF_INLINE_LAMBDA {
    LF_UNROLL
    for (int v = 0; v < PANEL_VECTORS; v++) store(out + (k - begin) * PANEL + v * W, w[v]);
  });
}

// packed[k][count] = x[count][k] for one tile of rows.
template <class T>
void pack_tile(const T* x, int64_t k, int64_t count, float* packed) {
  int64_t i = 0;
  // whole vectors are stored: what is too much is overwritten by the next input, so the last few
  // inputs are left to the loop below
  for (; i + 2 * W <= k && count <= W; i += W) {
    vf square[W] = {};
    for (int64_t r = 0; r < count; r++) square[r] = load(x + r * k + i);
    transpose(square);
    for (int64_t j = 0; j < W; j++) store(packed + (i + j) * count, square[j]);
  }
  for (; i < k; i++)
    for (int64_t r = 0; r < count; r++) packed[i * count + r] = to_float(x[r * k + i]);
}

template <class T>
void pack_rows(const T* x, int64_t k, const Rows& rows, float* packed) {
  parallel_ranges(rows.tiles, 1 + 65536 / (k * MAX_ROWS), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      int64_t first = rows.start(t);
      pack_tile(x + first * k, k, rows.start(t + 1) - first, packed + first * k);
    }
  });
}

template <class T>
void finish(const float* c, int64_t rows, T* y, const Args& args, int64_t first_row, int64_t panel) {
  int64_t n0 = panel * PANEL, width = args.n - n0 < PANEL ? args.n - n0 : PANEL;
  for (int64_t r = 0; r < rows; r++) {
    T* out = y + (first_row + r) * args.n + n0;
    const float* in = c + r * PANEL;
    if (width == PANEL) {
      LF_UNROLL
      for (int v = 0; v < PANEL_VECTORS; v++) {
        vf value = load(in + v * W);
        if (args.bias) value = value + load(args.bias + n0 + v * W);
        store(out + v * W, value);
      }
    } else {
      for (int64_t i = 0; i < width; i++)
        out[i] = from_float<T>(args.bias ? in[i] + args.bias[n0 + i] : in[i]);
    }
  }
}

template <class F, class T>
struct Product {
  const Args& args;
  const Rows rows;
  const float* a;
  int64_t panels, panel_bytes, block_tiles, k_block;

  Product(const Args& args, const float* a)
      : args(args), rows(args.m), a(a), panels((args.n + PANEL - 1) / PANEL),
        panel_bytes(F::panel_bytes(args.k)), block_tiles(rows.tiles) {
    // row tiles that share a panel: more where it must be decoded first
    constexpr int64_t MOST = F::IS_FLOAT ? 12 : 24;
    while (block_tiles > MOST || (block_tiles > 1 && items() < 3 * threads()))
      block_tiles = (block_tiles + 1) / 2;
    int64_t blocks = (args.k + MAX_K_BLOCK - 1) / MAX_K_BLOCK;
    k_block = ((args.k + blocks - 1) / blocks + 31) / 32 * 32;
  }

  int64_t items() const { return (rows.tiles + block_tiles - 1) / block_tiles * panels; }

  // One panel times one block of row tiles.
  void operator()(int64_t item) const {
    int64_t index = item % panels, first = item / panels * block_tiles;
    int64_t last = std::min(first + block_tiles, rows.tiles);
    const char* panel = args.weight + index * panel_bytes;
    int64_t row0 = rows.start(first), count = rows.start(last) - row0;
    // sums go where they belong at once, unless something is still to be done to them
    bool is_direct = sizeof(T) == 4 && !args.bias && (index + 1) * PANEL <= args.n;
    float* decoded = scratch(WORK, k_block * PANEL + (is_direct ? 0 : count * PANEL));
    float* c = is_direct ? (float*)args.y + row0 * args.n + index * PANEL : decoded + k_block * PANEL;
    int64_t stride = is_direct ? args.n : PANEL;
    if (last - first == 1 && (F::IS_FLOAT || count <= MAX_DECODED_ROWS))
      tile_of<F, F::IS_FLOAT ? PANEL_LINES : 0>(count)(a + row0 * args.k, panel, 0, args.k, c,
                                                       stride, panel + AHEAD_BYTES);
    else
      many_tiles(panel, first, last, c, stride, decoded);
    if (!is_direct) finish(c, count, (T*)args.y, args, row0, index);
  }

  void many_tiles(const char* panel, int64_t first, int64_t last, float* c, int64_t stride,
                  float* decoded) const {
    int64_t row0 = rows.start(first);
    for (int64_t k0 = 0; k0 < args.k; k0 += k_block) {
      int64_t k1 = std::min(k0 + k_block, args.k);
      const char* values = panel;
      if (!F::IS_FLOAT) {
        decode<F>(panel, k0, k1, decoded);
        values = (const char*)(decoded - k0 * PANEL);
      }
      for (int64_t t = first; t < last; t++) {
        int64_t row = rows.start(t), count = rows.start(t + 1) - row;
        // while this panel is used again and again, the next one comes: a part with every tile
        bool fetches = F::IS_FLOAT && t - first < PANEL_LINES;
        const char* ahead =
            panel + panel_bytes + (k0 * PANEL_LINES + (t - first) * (k1 - k0) - k0) * 64;
        Tile product = fetches ? tile_of<Plain<float>, 1>(count) : tile_of<Plain<float>, 0>(count);
        product(a + row * args.k, values, k0, k1, c + (row - row0) * stride, stride, ahead);
      }
    }
  }
};

// A single row. Its sums are few: several panels at a time hide the latency of memory, and of the
// additions. Small integers keep the processor busy with one.
template <class F, class T>
struct RowProduct {
  static constexpr int64_t AT_ONCE = F::BLOCK == 1 ? 3 : 1;
  const Args& args;
  const float* a;
  int64_t panels, panel_bytes;

  RowProduct(const Args& args, const float* a)
      : args(args), a(a), panels((args.n + PANEL - 1) / PANEL), panel_bytes(F::panel_bytes(args.k)) {}

  int64_t items() const { return (panels + AT_ONCE - 1) / AT_ONCE; }

  void operator()(int64_t item) const {
    float c[AT_ONCE * PANEL];
    int64_t first = item * AT_ONCE, count = std::min(AT_ONCE, panels - first);
    const char* panel = args.weight + first * panel_bytes;
    if (count == AT_ONCE)
      row_tile<F, AT_ONCE>(a, panel, panel_bytes, args.k, c);
    else
      for (int64_t i = 0; i < count; i++)
        row_tile<F, 1>(a, panel + i * panel_bytes, 0, args.k, c + i * PANEL);
    for (int64_t i = 0; i < count; i++) finish(c + i * PANEL, 1, (T*)args.y, args, 0, first + i);
  }
};

struct Part {  // the items of one product among those of several
  int64_t begin, end;
  std::function<void(int64_t)> run;
};

template <class T>
Part make_part(const Args& args, const float* a, int64_t begin) {
  return with_format(args.format, [&](auto format) {
    typedef decltype(format) F;
    if (args.m == 1) {
      RowProduct<F, T> product(args, a);
      return Part{begin, begin + product.items(), product};
    }
    Product<F, T> product(args, a);
    return Part{begin, begin + product.items(), product};
  });
}

// Several products of the same x.
template <class T>
void linear(const Args* products, int64_t count) {
  const Args& first = products[0];
  const float* a = (const float*)first.x;
  if (first.m > 1 || sizeof(T) != sizeof(float)) {
    float* packed = scratch(INPUT, first.m * first.k);
    pack_rows((const T*)first.x, first.k, Rows(first.m), packed);
    a = packed;
  }
  std::vector<Part> parts;
  for (int64_t i = 0; i < count; i++)
    parts.push_back(make_part<T>(products[i], a, i ? parts.back().end : 0));
  parallel(parts.back().end, [&](int64_t item) {
    size_t p = 0;
    while (item >= parts[p].end) p++;
    parts[p].run(item - parts[p].begin);
  });
}

void linear(const Args* products, int64_t count) {
  if (products->m == 0) return;
  products->is_bf16 ? linear<bf16>(products, count) : linear<float>(products, count);
}

struct GroupArgs {
  const Args* products;  // of one x: the same m, k and type
  int64_t count;
};

}  // namespace
}  // namespace lf

extern "C" {
void lf_linear(const lf::Args* args) { lf::linear(args, 1); }
void lf_linear_group(const lf::GroupArgs* args) { lf::linear(args->products, args->count); }
}
