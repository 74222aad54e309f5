// A table of an operation's needs of its tensors, which kernels.c checks. Operations elsewhere use it, too.
#pragma once

#include "kernels/kernels.h"

// A field of an operation and the form it must have, in the notation of kernels.h:
//
//   "fp32 [N, H]"    its type and shape. A letter is one size in all fields: the first field's, or SIZE's
//   "fp32|bf16 [3]"  one of several types. "T": fp32 or bf16, the same in all fields
//   "any [...]"      any type, any shape
//   "... strided"    its rows may lie apart; without this word it is dense
//   "... or absent"  it may be absent
//   "absent: why"    it must be absent
//
// or a further refusal: a sentence with up to five numbers.
typedef struct {
  const char *name;
  Tensor tensor;
  const char *form;
  int64_t size; // of the letter `name`, where form is NULL
  const char *refused;
  long long numbers[5];
} Field;

#define NAMED(text, value, needed)                                                                           \
  { .name = text, .tensor = value, .form = needed }
#define FIELD(field, needed) NAMED(#field, a->field, needed)
#define SIZE(letter, count)                                                                                  \
  { .name = #letter, .size = count }
#define REFUSE(condition, sentence, ...)                                                                     \
  {                                                                                                          \
    .name = "", .refused = (condition) ? sentence : "", .numbers = { __VA_ARGS__ }                           \
  }
#define CHECK(...) check_fields(op, (const Field[]){__VA_ARGS__, {0}})

typedef const char *Op; // the operation's name, for messages

#define NEEDS(operation, Arguments, ...)                                                                     \
  static void check_##operation(Op op, Backend *backend, Arguments *a) {                                     \
    CHECK(__VA_ARGS__);                                                                                      \
  }

// Fails with a sentence at the first field that lacks its form; the last field's name is NULL.
void check_fields(Op op, const Field *fields);
void check_loss_terms(Op op, const LossTerms *terms, int64_t vocab_size);
