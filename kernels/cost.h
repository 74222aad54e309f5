// Estimates by an operation's shapes what it computes and moves, and how long a GPU takes for it. The model
// has few constants: rates of GEMMs and of memory, and how attention's rate grows with a sequence. It ranks
// settings (trainer/fit.c). Steps measured on one GPU come out within 4%, one with an offloaded optimizer at
// 12% (BENCHMARKS.md).
#pragma once

#include "kernels/kernels.h"

__BEGIN_DECLS

#define ENTRY(name, Arguments, group) OP_##name,
enum { OPERATIONS(ENTRY, ENTRY) OPERATION_COUNT };
#undef ENTRY

typedef struct {
  // GEMMs' and attention's (forward: its causal half, backward: 2.5 times that), without sampling or
  // documents.
  double flops;
  double of_codes; // the part of flops that multiplies codes
  double bytes;    // read and written; collectives: of the larger tensor
  double epilogue; // a GEMM's bytes without its operands'
  int64_t inner;   // the length of a GEMM's sums
} Amount;

Amount amount_of(int op, const void *arguments); // the operation's struct

// The stream on which an operation runs, if a backend has streams.
StreamKind stream_of(int op, const void *arguments);

// Peak flops per second of dense bf16 GEMMs, by NVIDIA's data sheet for the GPU of this name; NaN: unknown.
double gpu_peak_flops(const char *name);

// The model's figures of a GPU, in flops and bytes per second.
struct Card {
  const char *part;   // part of the GPU's name
  double bf16, codes; // GEMMs in bf16, and in codes of one byte
  double memory;      // kernels that compute little
  double host;        // each way between host and device
  double links;       // each way between the GPUs of a host
  double launch;      // seconds that an operation takes however small it is
  double tail;        // a GEMM's or attention's extra: the last tiles leave most of the GPU idle
};

// The card of a backend's description, or NULL if none was measured.
const Card *card_of(const char *description);

// Seconds that the operation takes on the card alone; NULL: on the one that all are compared with (an H100).
double cost_seconds(const Card *card, const Backend *backend, int op, const void *arguments);

__END_DECLS
