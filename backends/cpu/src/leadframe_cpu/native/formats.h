// How weights are stored: panels of PANEL outputs, so that one vector load brings the weights of
// W outputs for one input. Every format is lossless: it decodes to exactly the float32 weights
// that its source has.
//
// A format F offers
//   F::panel_bytes(k)                      bytes of a panel with k inputs
//   F::each<P>(panel, begin, end, visit)   calls visit(i, w) for inputs [begin, end)
// where w holds the vectors of P panels, of which `panel` is the first and the others follow at
// `stride` bytes. begin and end are multiples of F::BLOCK.
#pragma once
#include "simd.h"

namespace lf {

template <int P>
using Lanes = vf[P * PANEL_VECTORS];

#define LF_INLINE inline __attribute__((always_inline))
#define LF_INLINE_LAMBDA __attribute__((always_inline))
#define LF_UNROLL _Pragma("GCC unroll 16")

// Plain elements: float, bf16 or f16, [k][PANEL].
template <class T>
struct Plain {
  static constexpr int BLOCK = 1;
  static constexpr bool IS_FLOAT = sizeof(T) == 4;
  static int64_t panel_bytes(int64_t k) { return k * PANEL * (int64_t)sizeof(T); }

  template <int P, class Visit>
  static LF_INLINE void each(const char* panel, int64_t stride, int64_t begin, int64_t end,
                             const Visit& visit) {
    for (int64_t k = begin; k < end; k++) {
      Lanes<P> w;
      LF_UNROLL
      for (int v = 0; v < P * PANEL_VECTORS; v++)
        w[v] = load((const T*)(panel + v / PANEL_VECTORS * stride) + k * PANEL +
                    v % PANEL_VECTORS * W);
      visit(k, w);
    }
  }
};

// Integers with a scale and perhaps an offset for every `B` inputs of an output: w = q * s + o.
// S is the type of scale and offset. A block is scale [PANEL], offset [PANEL], then the integers.
template <class S, bool HAS_OFFSET, int B>
struct BlockHeader {
  static constexpr int64_t BYTES = (HAS_OFFSET ? 2 : 1) * PANEL * (int64_t)sizeof(S);

  template <int P>
  static LF_INLINE void read(const char* block, int64_t stride, Lanes<P>& scale, Lanes<P>& offset) {
    LF_UNROLL
    for (int v = 0; v < P * PANEL_VECTORS; v++) {
      const S* p = (const S*)(block + v / PANEL_VECTORS * stride) + v % PANEL_VECTORS * W;
      scale[v] = load(p);
      offset[v] = HAS_OFFSET ? load(p + PANEL) : vf{};
    }
  }

  static LF_INLINE vf weight(vf q, vf scale, vf offset) {
    return HAS_OFFSET ? fma(q, scale, offset) : q * scale;
  }
};

// 8-bit integers, [B][PANEL].
template <class S, bool HAS_OFFSET, int B>
struct Int8 {
  typedef BlockHeader<S, HAS_OFFSET, B> Header;
  static constexpr int BLOCK = B;
  static constexpr bool IS_FLOAT = false;
  static constexpr int64_t BLOCK_BYTES = Header::BYTES + B * PANEL;
  static int64_t panel_bytes(int64_t k) { return k / B * BLOCK_BYTES; }

  template <int P, class Visit>
  static LF_INLINE void each(const char* panel, int64_t stride, int64_t begin, int64_t end,
                             const Visit& visit) {
    for (int64_t start = begin; start < end; start += B) {
      const char* block = panel + start / B * BLOCK_BYTES;
      const int8_t* q = (const int8_t*)(block + Header::BYTES);
      Lanes<P> scale, offset;
      Header::template read<P>(block, stride, scale, offset);
      for (int k = 0; k < B; k++) {
        Lanes<P> w;
        LF_UNROLL
        for (int v = 0; v < P * PANEL_VECTORS; v++) {
          vf value = load(q + v / PANEL_VECTORS * stride + k * PANEL + v % PANEL_VECTORS * W);
          w[v] = Header::weight(value, scale[v], offset[v]);
        }
        visit(start + k, w);
      }
    }
  }
};

// The low four bits of each element as a float.
LF_INLINE vf nibble(vi x) {
#if defined(__AVX512F__)
  const vf table = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return (vf)_mm512_permutexvar_ps((__m512i)x, (__m512)table);  // looks at four bits only
#else
  return __builtin_convertvector(x & 15, vf);
#endif
}

// 4-bit integers 0 to 15: int32 [B / 8][PANEL], eight consecutive inputs in each, lowest first.
template <class S, bool HAS_OFFSET, int B>
struct Int4 {
  typedef BlockHeader<S, HAS_OFFSET, B> Header;
  static constexpr int BLOCK = B;
  static constexpr bool IS_FLOAT = false;
  static constexpr int64_t BLOCK_BYTES = Header::BYTES + B / 8 * PANEL * 4;
  static int64_t panel_bytes(int64_t k) { return k / B * BLOCK_BYTES; }

  template <int P, class Visit>
  static LF_INLINE void each(const char* panel, int64_t stride, int64_t begin, int64_t end,
                             const Visit& visit) {
    for (int64_t start = begin; start < end; start += B) {
      const char* block = panel + start / B * BLOCK_BYTES;
      const char* q = block + Header::BYTES;
      Lanes<P> scale, offset;
      Header::template read<P>(block, stride, scale, offset);
      for (int group = 0; group < B / 8; group++) {
        vi eight[P * PANEL_VECTORS];
        LF_UNROLL
        for (int v = 0; v < P * PANEL_VECTORS; v++)
          eight[v] = load_int(q + v / PANEL_VECTORS * stride +
                              (group * PANEL + v % PANEL_VECTORS * W) * 4);
        LF_UNROLL
        for (int k = 0; k < 8; k++) {
          Lanes<P> w;
          LF_UNROLL
          for (int v = 0; v < P * PANEL_VECTORS; v++)
            w[v] = Header::weight(nibble((vi)((vu)eight[v] >> (4 * k))), scale[v], offset[v]);
          visit(start + group * 8 + k, w);
        }
      }
    }
  }
};

// Numbers that Python passes; see packed.py.
enum FormatId {
  F32 = 0, BF16 = 1, F16 = 2,
  INT8_F16 = 3, INT8_F32 = 4, INT8_F32_B16 = 5,
  INT4_F16 = 6, INT4_F32 = 7,
};

// Calls use(F{}) with the format of an id.
template <class Use>
auto with_format(int64_t id, const Use& use) {
  switch (id) {
    case BF16: return use(Plain<bf16>{});
    case F16: return use(Plain<f16>{});
    case INT8_F16: return use(Int8<f16, false, 32>{});
    case INT8_F32: return use(Int8<float, true, 32>{});
    case INT8_F32_B16: return use(Int8<float, true, 16>{});
    case INT4_F16: return use(Int4<f16, true, 32>{});
    case INT4_F32: return use(Int4<float, true, 32>{});
    default: return use(Plain<float>{});
  }
}

}  // namespace lf
