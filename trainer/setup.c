#include "trainer/setup.h"

#include "kernels/memory.h"
#include "trainer/resume.h"

void setup_options(Options *o, int argc, char **argv) {
  memory_set_advice(
      "a smaller --batch or --seq-len, --recompute layer, or --fused-lce with a smaller --lce-chunk needs "
      "less, and --plan says how much");
  options_parse(o, argc, argv);
  resume_find(o);
  if (o->resumed_from) resume_take_settings(o);
  options_resolve(o);
}

RunData setup_data(const Options *o) {
  // What is trained on: --data, or the source tree; with --eval-only alone --val-data.
  const TextList *paths = o->data.count || !o->eval_only ? &o->data : &o->val_data;
  RunData d = {.source = source_open(paths->items, paths->count, o->model.vocab_size)};
  if (o->val_data.count)
    d.val_source = source_open(o->val_data.items, o->val_data.count, o->model.vocab_size);
  if (o->pack) source_pack(d.source, o->seq_len, o->end_of_text);
  if (o->pack && d.val_source) source_pack(d.val_source, o->seq_len, o->end_of_text);
  d.loader = loader_create((LoaderOptions){.source = d.source,
                                           .validation_source = d.val_source,
                                           .validation_fraction = o->val_fraction,
                                           .batch = o->batch,
                                           .seq_len = o->seq_len,
                                           .seed = o->seed,
                                           .order = o->data_order});
  loader_describe(&d.loader, d.text, sizeof d.text);
  return d;
}

void setup_data_close(RunData *d) {
  source_close(d->val_source);
  source_close(d->source);
  *d = (RunData){0};
}
