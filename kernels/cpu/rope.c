// Rotary positions: pairs (i, i + D/2) of every query and key head turn by their position's angle, in place.
#include "kernels/cpu/cpu.h"

void cpu_rope(Backend *backend, const Rope *a) {
  AttentionShape s = a->shape;
  int64_t half = s.head_dim / 2, heads = s.num_heads + s.num_key_value_heads;
  float sign = a->inverse ? -1.0f : 1.0f;
  const int32_t *positions = a->positions.data;
  EACH_PARALLEL (n, s.batch * s.seq_len) {
    const float *cosine = cpu_row(a->cos_sin, positions ? positions[n] : n % s.seq_len),
                *sine = cosine + half;
    for (int64_t h = 0; h < heads; h++) {
      float *low = cpu_row(a->qkv, n) + h * s.head_dim, *high = low + half;
      EACH_SIMD (i, half) {
        float x = low[i], y = high[i], turn = sign * sine[i];
        low[i] = x * cosine[i] - y * turn;
        high[i] = y * cosine[i] + x * turn;
      }
    }
  }
}
