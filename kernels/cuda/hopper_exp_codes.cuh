// The epilogue of hopper_exp.cuh for logits of FP8 codes.
//
// Hopper adds products of codes to 14 bits of the largest of them and of the sum so far, and cuts off the
// rest, so a sum loses a share of its size in every instruction. It begins with minus half the target's
// logit: a logit of that size, the kind that counts in a loss, then runs from minus to plus a half and not
// from 0 to 1.
#pragma once

#include "kernels/cuda/hopper_exp.cuh"

template <bool TERMS> struct LogitsExpOfCodes : LogitsExp<TERMS> {
  static constexpr bool CODES = true;

  // A row's factor for sums of products of codes, and half its target's logit.
  struct Row {
    float scale, centre;
    __device__ Row(const Consumer &c, int row) {
      bool inside = row < c.s.m;
      float a = inside && !(TERMS && c.params.bias) ? c.params.anchor[row] : 0;
      scale = inside ? c.params.x_scale[row] * *c.params.weight_scale : 1;
      centre = fabsf(a) < 0x1p10f ? 0.5f * a : 0;
    }
  };

  static DEVICE void begin_sums(Accumulators &acc, const Consumer &c, const WorkTile &work) {
    const ThreadCoord me;
    EACH (h, TILE_M / 64) {
      EACH (i, 2) {
        const Row row(c, work.row + me.row(h) + 8 * i);
        float start = -row.centre / row.scale, zero = 0 * row.scale;
        // If all were copies of one register, the compiler would set accumulators between the wgmmas.
        EACH (j, TILE_N / 4) acc[h][4 * (j / 2) + 2 * i + j % 2] = fmaf((float)j, zero, start);
      }
    }
  }

  // Turns sums of products of codes into logits, in place.
  static DEVICE void decode(float (&z)[TILE_N / 2], const Consumer &c, int first_row) {
    EACH (i, 2) {
      const Row row(c, first_row + 8 * i);
      EACH (j, TILE_N / 4) {
        float &at = z[4 * (j / 2) + 2 * i + j % 2];
        at = fmaf(at, row.scale, row.centre);
      }
    }
  }
};
