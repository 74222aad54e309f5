// Time of causal attention by itself, hot: after 0.7 s of both passes, each pass is queued twenty times, and
// prints a JSON object with the seconds of one. Inputs are independent normal values, as in a benchmark of
// PyTorch's, since a GPU at its power limit is slower on random bits than on constants.
// bench_attention.py alternates it with others.
//
//  bench_attention --device cuda --batch 1 --seq-len 32768 --num-attention-heads 32 --num-key-value-heads 8
//    --head-dim 128
#include <stdio.h>

#include "kernels/base/fail.h"
#include "kernels/base/system.h"
#include "model/parameters.h"
#include "trainer/option_rows.h"
#include "trainer/trainer.h"

typedef struct {
  AttentionShape shape;
  DeviceKind device;
} Settings;

#define OPTION_VALUES Settings
static const Option option_rows[] = {
    {INTEGER("batch", "B", shape.batch, 1, INT32_MAX), "Sequences", .initial = "1"},
    {INTEGER("seq-len", "T", shape.seq_len, 1, INT32_MAX), "Tokens per sequence", .initial = "1024"},
    {INTEGER("num-attention-heads", "Q", shape.num_heads, 1, 4096), "Query heads", .initial = "12"},
    {INTEGER("num-key-value-heads", "K", shape.num_key_value_heads, 1, 4096),
     "Key/value heads, which divide Q", .initial = "12"},
    {INTEGER("head-dim", "D", shape.head_dim, 1, 256), "Elements of a head", .initial = "64"},
    {CHOICE("device", device, "cpu", "cuda"), "Where to run", .initial = "cpu"},
    {.type = OPTION_END}};

typedef struct {
  Backend *backend;
  AttentionForward forward;
  AttentionBackward backward;
} Bench;

static double seconds_of(const Bench *b, int passes, int times) {
  backend_synchronize(b->backend);
  double start = now_seconds();
  for (int i = 0; i < times; i++) {
    if (passes & 1) attention_forward(b->backend, b->forward);
    if (passes & 2) attention_backward(b->backend, b->backward);
  }
  backend_synchronize(b->backend);
  return (now_seconds() - start) / times;
}

int main(int argc, char **argv) {
  static const OptionTable table = {.rows = option_rows,
                                    .doc = "Times causal attention, forward and backward, by itself.",
                                    .stray = "there are no paths"};
  Settings o = {0};
  option_table_parse(&table, &o, NULL, argc, argv);
  const AttentionShape s = o.shape;
  memory_set_advice("give a smaller --batch or --seq-len");
  if (s.num_heads % s.num_key_value_heads)
    fail("--num-attention-heads %lld is no multiple of --num-key-value-heads %lld", (long long)s.num_heads,
         (long long)s.num_key_value_heads);
  const Dtype dtype = o.device == ON_CUDA ? DTYPE_BF16 : DTYPE_F32;
  Bench b = {.backend = machine_open(&(Options){.device = o.device == ON_CUDA ? DEVICE_CUDA : DEVICE_CPU,
                                                .dtypes.weight = dtype})};
  Memory *memory = &b.backend->memory;
  memory_set_stack(memory, machine_usable_bytes(b.backend) / 32 * 31);
  const int64_t rows = s.batch * s.seq_len, width = s.num_heads * s.head_dim,
                packed = width + 2 * s.num_key_value_heads * s.head_dim;
#define PUSH(name, columns) memory_push_2d(memory, name, MEMORY_ACTIVATIONS, dtype, rows, columns)
  b.forward = (AttentionForward){.shape = s, .qkv = PUSH("qkv", packed), .out = PUSH("out", width)};
  b.forward.lse =
      memory_push_2d(memory, "lse", MEMORY_ACTIVATIONS, DTYPE_F32, s.batch, s.num_heads * s.seq_len);
  b.backward = (AttentionBackward){.shape = s,
                                   .qkv = b.forward.qkv,
                                   .out = b.forward.out,
                                   .lse = b.forward.lse,
                                   .dout = PUSH("dout", width),
                                   .dqkv = PUSH("dqkv", packed)};
  parameters_fill_normal(b.backend, b.forward.qkv, 0, 1, 1, 1);
  parameters_fill_normal(b.backend, b.backward.dout, 0, 1, 1, 2);
  enum { FORWARD = 1, BACKWARD = 2, TIMES = 20 };
  for (double spent = 0; spent < (o.device == ON_CUDA ? 0.7 : 0);)
    spent += seconds_of(&b, FORWARD | BACKWARD, 1);
  double forward = seconds_of(&b, FORWARD, TIMES), backward = seconds_of(&b, BACKWARD, TIMES);
  printf("{\"event\":\"attention\",\"forward_seconds\":%.9g,\"backward_seconds\":%.9g}\n", forward, backward);
  backend_destroy(b.backend);
  return 0;
}
