#include "trainer/update.h"

#include "model/shards.h"

// Elements that this rank updates in one call: a whole group, or its slice of a bucket.
typedef struct {
  ParameterGroup group;
  Bucket bucket; // what it is a slice of
  Tensor value, master, m, v, grad;
} Piece;

static Piece piece_of(const Parameters *p, ParameterGroup g, Bucket b) {
  if (p->spread.parts == 1) return (Piece){g, b, p->value[g], p->master[g], p->m[g], p->v[g], p->grad[g]};
  return (Piece){.group = g,
                 .bucket = b,
                 .value = shards_weights(p, g, b),
                 .master = shards_slice_of_shard(p, p->master[g], b),
                 .m = shards_slice_of_shard(p, p->m[g], b),
                 .v = shards_slice_of_shard(p, p->v[g], b),
                 .grad = shards_reduced_grads(p, g, b)};
}

// Goes on to the piece before `piece`; starts as {0}. False when there is none left.
static bool next_piece(const Parameters *p, Piece *piece) {
  int group = (int)piece->group;
  int64_t end = piece->bucket.count ? piece->bucket.first : p->group_elements[group];
  while (end == 0 && ++group < GROUP_COUNT) end = p->group_elements[group];
  if (group == GROUP_COUNT) return false;
  Bucket b = p->spread.parts == 1 ? (Bucket){0, end} : shards_bucket(p, (ParameterGroup)group, end);
  *piece = piece_of(p, (ParameterGroup)group, b);
  return true;
}

static void step_piece(Trainer *t, const Piece *piece, AdamW a) {
  const Parameters *p = &t->model.parameters;
  a.weight = piece->value;
  a.master = piece->master;
  a.m = piece->m;
  a.v = piece->v;
  a.grad = piece->grad;
  a.seed = t->options->seed * GROUP_COUNT + (uint64_t)piece->group;
  if (piece->group == GROUP_VECTORS) a.weight_decay = 0;
  if (p->spread.parts == 1) {
    adamw(t->backend, a);
    return;
  }
  a.first = piece->bucket.first + p->spread.part * (piece->bucket.count / p->spread.parts);
  adamw(t->backend, a);
  if (!shards_weights_are_whole(p, piece->group)) return;
  Tensor whole = tensor_rows(p->value[piece->group], piece->bucket.first, piece->bucket.count);
  all_gather(t->backend, (Collective){.out = whole, .x = piece->value, .async = true});
}

void update_weights(Trainer *t, Tensor norm, double learning_rate, int64_t step) {
  const Options *o = t->options;
  const Parameters *p = &t->model.parameters;
  bool started = false;
  for (Piece piece = {0}; next_piece(p, &piece); started = true)
    reduce(t->backend, (Reduce){.sum = t->squares, .x = piece.grad, .squares = true, .accumulate = started});
  if (p->spread.parts > 1) all_reduce(t->backend, (Collective){.out = t->squares, .x = t->squares});
  clip_scale(t->backend, (ClipScale){.norm = norm,
                                     .scale = t->scale,
                                     .sum_of_squares = t->squares,
                                     .max_norm = (float)o->max_grad_norm});
  AdamW settings = {.grad_scale = t->scale,
                    .lr = (float)learning_rate,
                    .beta1 = (float)o->beta1,
                    .beta2 = (float)o->beta2,
                    .epsilon = (float)o->epsilon,
                    .weight_decay = (float)o->weight_decay,
                    .step = step + 1};
  for (Piece piece = {0}; next_piece(p, &piece);) step_piece(t, &piece, settings);
  collectives_join(t->backend, 0);
}
