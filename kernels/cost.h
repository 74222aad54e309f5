// What an operation computes and moves, by its shapes, and how long a GPU takes for it. The model has few
// constants: rates of GEMMs and of memory, and how attention's rate grows with a sequence. It ranks settings
// (trainer/fit.c); measured steps of one GPU come out within 4% (BENCHMARKS.md).
#pragma once

#include "kernels/kernels.h"

__BEGIN_DECLS

#define ENTRY(name, Arguments, group) OP_##name,
enum { OPERATIONS(ENTRY, ENTRY) OPERATION_COUNT };
#undef ENTRY

typedef struct {
  // Of GEMMs and attention (forward: its causal half, backward: 2.5 times that), as without sampling and
  // documents.
  double flops;
  double of_codes; // the flops among these of codes
  double bytes;    // read and written; collectives: of the larger tensor
  double epilogue; // a GEMM's bytes but those of its operands
  int64_t inner;   // the length of a GEMM's sums
} Amount;

Amount amount_of(int op, const void *arguments); // the operation's struct

// The stream on which an operation runs, where a backend has streams.
StreamKind stream_of(int op);

// Peak flops a second of dense bf16 GEMMs by NVIDIA's data sheet for the GPU of this name; NaN: unknown.
double gpu_peak_flops(const char *name);

// A GPU as the model has it. Flops and bytes a second.
struct Card {
  const char *part;   // of the GPU's name
  double bf16, codes; // GEMMs, of bf16 and of codes of one byte
  double memory;      // kernels that compute little
  double host;        // each way between host and device
  double links;       // each way between the GPUs of a host
  double launch;      // seconds that an operation takes however small it is
  double tail;        // and a GEMM or attention more: the last tiles leave most of the GPU idle
};

// The card of a backend's description, or NULL where none was measured.
const Card *card_of(const char *description);

// Seconds that the operation takes on the card alone; NULL: on the one that all are compared with (an H100).
double cost_seconds(const Card *card, const Backend *backend, int op, const void *arguments);

__END_DECLS
