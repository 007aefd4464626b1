// Weights from rows to panels, and back.
#include "formats.h"
#include "pool.h"

namespace lf {
namespace {

struct PackArgs {
  const void* source;  // plain: [n, k] elements of the format's type; else int8 [n, k]
  const void* scale;   // [n, k / BLOCK] of the format's type
  const void* offset;  // the same, or null
  char* target;
  int64_t format, n, k;
};

template <class T>
void pack_panel(Plain<T>, const PackArgs& args, int64_t first, int64_t count, char* panel) {
  T* out = (T*)panel;
  const T* in = (const T*)args.source + first * args.k;
  for (int64_t lane = 0; lane < PANEL; lane++)
    for (int64_t k = 0; k < args.k; k++)
      out[k * PANEL + lane] = lane < count ? in[lane * args.k + k] : T{};
}

template <class S, bool HAS_OFFSET, int B>
void pack_header(const PackArgs& args, int64_t first, int64_t count, int64_t block, char* out) {
  S* p = (S*)out;
  int64_t blocks = args.k / B;
  for (int64_t lane = 0; lane < PANEL; lane++) {
    int64_t from = (first + lane) * blocks + block;
    p[lane] = lane < count ? ((const S*)args.scale)[from] : S{};
    if (HAS_OFFSET) p[PANEL + lane] = lane < count ? ((const S*)args.offset)[from] : S{};
  }
}

template <class S, bool HAS_OFFSET, int B>
void pack_panel(Int8<S, HAS_OFFSET, B>, const PackArgs& args, int64_t first, int64_t count,
                char* panel) {
  typedef Int8<S, HAS_OFFSET, B> F;
  for (int64_t block = 0; block < args.k / B; block++, panel += F::BLOCK_BYTES) {
    pack_header<S, HAS_OFFSET, B>(args, first, count, block, panel);
    int8_t* out = (int8_t*)(panel + F::Header::BYTES);
    for (int64_t lane = 0; lane < PANEL; lane++)
      for (int64_t k = 0; k < B; k++)
        out[k * PANEL + lane] =
            lane < count ? ((const int8_t*)args.source)[(first + lane) * args.k + block * B + k] : 0;
  }
}

template <class S, bool HAS_OFFSET, int B>
void pack_panel(Int4<S, HAS_OFFSET, B>, const PackArgs& args, int64_t first, int64_t count,
                char* panel) {
  typedef Int4<S, HAS_OFFSET, B> F;
  for (int64_t block = 0; block < args.k / B; block++, panel += F::BLOCK_BYTES) {
    pack_header<S, HAS_OFFSET, B>(args, first, count, block, panel);
    uint32_t* out = (uint32_t*)(panel + F::Header::BYTES);
    for (int64_t lane = 0; lane < PANEL; lane++) {
      const int8_t* in = (const int8_t*)args.source + (first + lane) * args.k + block * B;
      for (int64_t group = 0; group < B / 8; group++) {
        uint32_t bits = 0;
        for (int k = 0; lane < count && k < 8; k++)
          bits |= (uint32_t)(in[group * 8 + k] & 15) << (4 * k);
        out[group * PANEL + lane] = bits;
      }
    }
  }
}

struct RowArgs {
  const char* weight;
  const int32_t* rows;  // [count]; clamped to [0, n); null for all in order
  void* out;            // [count, k]
  int64_t format, n, k, count, is_bf16;
};

template <class F, class T>
void read_row(const RowArgs& args, int64_t row, T* out) {
  const char* panel = args.weight + row / PANEL * F::panel_bytes(args.k);
  int64_t lane = row % PANEL;
  F::template each<1>(panel, 0, 0, args.k, [&](int64_t k, const Lanes<1>& w) {
    float values[PANEL];
    for (int v = 0; v < PANEL_VECTORS; v++) store(values + v * W, w[v]);
    out[k] = from_float<T>(values[lane]);
  });
}

template <class F, class T>
void read_rows(const RowArgs& args) {
  parallel_ranges(args.count, 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      int64_t row = args.rows ? args.rows[i] : i;
      row = row < 0 ? 0 : (row >= args.n ? args.n - 1 : row);
      read_row<F, T>(args, row, (T*)args.out + i * args.k);
    }
  });
}

}  // namespace
}  // namespace lf

extern "C" {

int64_t lf_packed_bytes(int64_t format, int64_t n, int64_t k) {
  return lf::with_format(format, [&](auto f) {
    return (n + lf::PANEL - 1) / lf::PANEL * decltype(f)::panel_bytes(k);
  });
}

void lf_pack(const lf::PackArgs* args) {
  lf::with_format(args->format, [&](auto f) {
    int64_t panels = (args->n + lf::PANEL - 1) / lf::PANEL;
    int64_t bytes = decltype(f)::panel_bytes(args->k);
    lf::parallel(panels, [&](int64_t i) {
      int64_t first = i * lf::PANEL;
      int64_t count = args->n - first < lf::PANEL ? args->n - first : lf::PANEL;
      lf::pack_panel(f, *args, first, count, args->target + i * bytes);
    });
  });
}

void lf_read_rows(const lf::RowArgs* args) {
  lf::with_format(args->format, [&](auto f) {
    typedef decltype(f) F;
    args->is_bf16 ? lf::read_rows<F, lf::bf16>(*args) : lf::read_rows<F, float>(*args);
  });
}
}
