// Ops between the products: norms, rotation, activations, row copies. Sums are in float32.
#include "pool.h"
#include "simd.h"

namespace lf {
namespace {

constexpr int64_t GRAIN = 4096;  // elements below which another thread costs more than it brings

int64_t row_grain(int64_t width) { return 1 + GRAIN / (width ? width : 1); }

struct NormArgs {
  const void *x, *residual, *weight;  // residual may be null
  void *out, *total;                  // total = x + residual, where there is one
  int64_t rows, width, is_bf16;
  double eps, offset;
};

template <class T>
float sum_squares(const T* x, int64_t width) {
  vf lanes{};
  int64_t i = 0;
  for (; i + W <= width; i += W) {
    vf value = load(x + i);
    lanes = fma(value, value, lanes);
  }
  float total = sum(lanes);
  for (; i < width; i++) total += to_float(x[i]) * to_float(x[i]);
  return total;
}

template <class T>
void add_row(const T* a, const T* b, T* out, int64_t width) {
  int64_t i = 0;
  for (; i + W <= width; i += W) store(out + i, load(a + i) + load(b + i));
  for (; i < width; i++) out[i] = from_float<T>(to_float(a[i]) + to_float(b[i]));
}

template <class T>
void norm_row(const T* x, const T* weight, T* out, int64_t width, float eps, float offset) {
  float scale = 1.0f / std::sqrt(sum_squares(x, width) / (float)width + eps);
  int64_t i = 0;
  for (; i + W <= width; i += W) store(out + i, load(x + i) * scale * (load(weight + i) + offset));
  for (; i < width; i++)
    out[i] = from_float<T>(to_float(x[i]) * scale * (to_float(weight[i]) + offset));
}

template <class T>
void rms_norm(const NormArgs& args) {
  int64_t width = args.width;
  parallel_ranges(args.rows, row_grain(width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const T* x = (const T*)args.x + row * width;
      if (args.residual) {
        T* total = (T*)args.total + row * width;
        add_row(x, (const T*)args.residual + row * width, total, width);
        x = total;
      }
      norm_row(x, (const T*)args.weight, (T*)args.out + row * width, width, (float)args.eps,
               (float)args.offset);
    }
  });
}

struct RopeTableArgs {
  const int32_t* positions;
  const float* inv_freq;
  float *cos, *sin;
  int64_t tokens, half;
  double scaling;
};

void rope_table(const RopeTableArgs& args) {
  parallel_ranges(args.tokens, 1 + 512 / args.half, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * args.half; i < end * args.half; i++) {
      float angle = (float)args.positions[i / args.half] * args.inv_freq[i % args.half];
      args.cos[i] = std::cos(angle) * (float)args.scaling;
      args.sin[i] = std::sin(angle) * (float)args.scaling;
    }
  });
}

struct RopeArgs {
  const void* x;
  const float *cos, *sin;
  void* out;
  int64_t tokens, heads, dim, half, is_bf16;
};

template <class T>
void rope_head(const T* x, const float* cos, const float* sin, T* out, int64_t dim, int64_t half) {
  int64_t i = 0;
  for (; i + W <= half; i += W) {
    vf low = load(x + i), high = load(x + half + i), c = load(cos + i), s = load(sin + i);
    store(out + i, low * c - high * s);
    store(out + half + i, high * c + low * s);
  }
  for (; i < half; i++) {
    float low = to_float(x[i]), high = to_float(x[half + i]);
    out[i] = from_float<T>(low * cos[i] - high * sin[i]);
    out[half + i] = from_float<T>(high * cos[i] + low * sin[i]);
  }
  for (i = 2 * half; i < dim; i++) out[i] = x[i];
}

template <class T>
void rope(const RopeArgs& args) {
  int64_t width = args.heads * args.dim;
  parallel_ranges(args.tokens, row_grain(width), [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; token++)
      for (int64_t head = 0; head < args.heads; head++) {
        int64_t at = token * width + head * args.dim;
        rope_head((const T*)args.x + at, args.cos + token * args.half, args.sin + token * args.half,
                  (T*)args.out + at, args.dim, args.half);
      }
  });
}

struct GateArgs {
  const void *gate, *up;  // up may be null: then `scale` is the cap of softcap
  void* out;
  int64_t count, kind, is_bf16;
  double cap;
};

enum GateKind { SILU = 0, GELU = 1, SOFTCAP = 2, ADD = 3 };

template <int KIND>
vf gated(vf x, vf up, float cap) {
  if constexpr (KIND == SILU) return x / (1.0f + exp(-x)) * up;
  if constexpr (KIND == GELU) {
    vf inner = 0.7978845608f * fma(x * x * x, splat(0.044715f), x);
    return 0.5f * x * (1.0f + tanh(inner)) * up;
  }
  if constexpr (KIND == SOFTCAP) return cap * tanh(x / cap);
  return x + up;
}

template <class T, int KIND>
void gate_range(const GateArgs& args, int64_t begin, int64_t end) {
  const T *gate = (const T*)args.gate, *up = (const T*)args.up;
  T* out = (T*)args.out;
  float cap = (float)args.cap;
  int64_t i = begin;
  for (; i + W <= end; i += W)
    store(out + i, gated<KIND>(load(gate + i), up ? load(up + i) : vf{}, cap));
  if (i == end) return;
  T x[W] = {}, y[W] = {};  // the rest, padded to a vector
  for (int64_t j = i; j < end; j++) x[j - i] = gate[j];
  for (int64_t j = i; up && j < end; j++) y[j - i] = up[j];
  store(x, gated<KIND>(load(x), load(y), cap));
  for (int64_t j = i; j < end; j++) out[j] = x[j - i];
}

template <class T>
void gate(const GateArgs& args) {
  parallel_ranges((args.count + W - 1) / W, GRAIN / W, [&](int64_t begin, int64_t end) {
    int64_t first = begin * W, last = end * W < args.count ? end * W : args.count;
    switch (args.kind) {
      case SILU: return gate_range<T, SILU>(args, first, last);
      case GELU: return gate_range<T, GELU>(args, first, last);
      case SOFTCAP: return gate_range<T, SOFTCAP>(args, first, last);
      default: return gate_range<T, ADD>(args, first, last);
    }
  });
}

struct TakeArgs {
  const char* x;
  const int32_t* rows;
  char* out;
  int64_t count, row_bytes, last_row;  // indices are clamped to [0, last_row]
};

void take_rows(const TakeArgs& args) {
  parallel_ranges(args.count, row_grain(args.row_bytes / 4), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      int64_t row = args.rows[i];
      row = row < 0 ? 0 : (row > args.last_row ? args.last_row : row);
      std::memcpy(args.out + i * args.row_bytes, args.x + row * args.row_bytes, args.row_bytes);
    }
  });
}

}  // namespace
}  // namespace lf

extern "C" {

void lf_rms_norm(const lf::NormArgs* args) {
  args->is_bf16 ? lf::rms_norm<lf::bf16>(*args) : lf::rms_norm<float>(*args);
}
void lf_rope_table(const lf::RopeTableArgs* args) { lf::rope_table(*args); }
void lf_rope(const lf::RopeArgs* args) {
  args->is_bf16 ? lf::rope<lf::bf16>(*args) : lf::rope<float>(*args);
}
void lf_gate(const lf::GateArgs* args) {
  args->is_bf16 ? lf::gate<lf::bf16>(*args) : lf::gate<float>(*args);
}
void lf_take_rows(const lf::TakeArgs* args) { lf::take_rows(*args); }
}
