// The batches of train.c's step: from the loader to the host, all of a step at once, then to the device.
#include "kernels/base/integers.h"
#include "kernels/base/random.h"
#include "trainer/trainer.h"

enum { STREAM_TILES = 8 }; // of random numbers: --lce-sample's seeds

// --- micro-batches -----------------------------------------------------------------------------------------

int64_t trainer_load(Trainer *t, const Loader *loader, int64_t step) {
  const Options *o = t->options;
  const Backend *b = t->backend;
  int64_t tokens = o->batch * o->seq_len, counted = loader ? 0 : o->total_batch;
  for (int64_t m = 0; loader && m < o->micro_steps; m++) {
    int32_t *to = t->host_tokens + m * tokens, *targets = t->host_targets + m * tokens;
    int32_t *documents = o->pack ? t->host_documents + 2 * m * tokens : NULL;
    t->host_max_counted[m] = 0;
    // Every rank reads and counts all ranks' masked batches, its own last: cheaper than communication.
    for (int i = o->masked ? 1 : b->ranks; i <= b->ranks; i++) {
      int64_t index = m * b->ranks + (b->rank + i) % b->ranks, batches = o->micro_steps * b->ranks;
      int64_t here = loader_train_batch(loader, step, index, batches, to, targets, documents);
      counted += here * (o->masked ? 1 : b->ranks);
      t->host_max_counted[m] = max_i64(t->host_max_counted[m], here);
    }
  }
  return counted;
}

Batch trainer_copy_batch(Trainer *t, int64_t m, bool masked) {
  int64_t n = t->options->batch * t->options->seq_len, counted = 0, ignored = n;
  Batch b = {.batch = t->options->batch,
             .seq_len = t->options->seq_len,
             .tokens = t->tokens,
             .targets = t->targets,
             .documents = t->documents,
             .counted = n};
  if (masked) b.indices = t->positions;
  if (t->backend->memory.planning) return b;
  const int32_t *targets = t->host_targets + m * n;
  backend_to_device(t->backend, b.tokens, t->host_tokens + m * n);
  backend_to_device(t->backend, b.targets, targets);
  if (t->options->pack) backend_to_device(t->backend, b.documents, t->host_documents + 2 * m * n);
  if (!masked) return b;
  for (int64_t i = 0; i < n; i++) // counted positions from the front, ignored ones from the end
    t->host_positions[targets[i] != IGNORE_INDEX ? counted++ : --ignored] = (int32_t)i;
  backend_to_device(t->backend, b.indices, t->host_positions);
  b.counted = counted;
  return b;
}

Batch trainer_micro_batch(Trainer *t, int64_t m) {
  bool masked = t->options->masked;
  Batch batch = trainer_copy_batch(t, m, masked);
  if (masked && t->model.shard.vocab_size && !t->backend->memory.planning)
    batch.counted = t->host_max_counted[m]; // with a split head all ranks compute as many tokens
  return batch;
}

TransformerOptions pass_options(Trainer *t, int64_t step, int64_t m) {
  const Options *o = t->options;
  TransformerOptions pass = t->transformer;
  pass.sampling.seed = random_bits(o->seed, STREAM_TILES, (uint64_t)(step * o->micro_steps + m));
  pass.last = m == o->micro_steps - 1;
  return pass;
}
