#include "tests/runs.h"

#include "kernels/base/alloc.h"

// `more` is appended to the line.
static Options options_of(DeviceKind device, const char *more, const char *format, va_list arguments) {
  enum { LINE = 1200, WORDS = 64 };
  static char lines[8][LINE];
  static int turn;
  char *line = lines[turn++ % 8], *argv[WORDS] = {"train"}, *rest = line;
  int length = vsnprintf(line, LINE, format, arguments), argc = 1;
  length += snprintf(line + length, (size_t)(LINE - length), "%s", more);
  assert_in_range(length, 0, LINE - 1);
  for (char *word; argc < WORDS && (word = strtok_r(NULL, " ", &rest));) argv[argc++] = word;
  assert_in_range(argc, 1, WORDS - 1);
  Options options;
  options_read(&options, &options_table, argc, argv);
  resume_find(&options);
  options_resolve(&options);
  plan_set_step(train_step);
  options_resolve_device(&options, &(Backend){.device = device});
  plan_resolve(&options, device, 0);
  return options;
}

Options options_on(DeviceKind device, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  Options options = options_of(device, "", format, arguments);
  va_end(arguments);
  return options;
}

Run *run_open_on(const char *backend, const char *format, ...) {
  Harness *h = harness_open(backend);
  if (!h) return NULL;
  Run *run = host_alloc(1, sizeof *run, "a test");
  run->h = h;
  bool cuda = !strncmp(backend, "cuda", 4), fp32 = cuda && strstr(backend, "fp32");
  va_list arguments;
  va_start(arguments, format);
  run->options = options_of(cuda ? ON_CUDA : ON_CPU, fp32 ? " --dtype fp32" : "", format, arguments);
  va_end(arguments);
  const Options *o = &run->options;
  run->data = run_data_open(o);
  trainer_create(&run->trainer, o, run->h->backend);
  plan_set_mode(&run->trainer, o->pass.mode);
  return run;
}

void run_close(Run *run) {
  trainer_destroy(&run->trainer);
  run_data_close(&run->data);
  harness_close(run->h);
  options_free(&run->options);
  free(run);
}

void draw_weights(Harness *h, Model *model) {
  for (int64_t i = 0; i < model->parameters.count; i++) {
    const Parameter *p = &model->parameters.items[i];
    int64_t count = tensor_count(p->value);
    double *values = random_values(h, count, p->rank == 2 ? 1.2 / sqrt((double)p->shape[1]) : 0.3);
    float *weights = p->value.data; // of a CPU
    for (int64_t k = 0; k < count; k++) weights[k] = (float)(values[k] + (p->init == INIT_ONES));
  }
}

double *model_logits(Harness *h, Model *model, const int32_t *tokens, int64_t batch, int64_t seq_len) {
  enum { ENOUGH = 64 << 20 }; // which the plan of a step need not be
  Memory *memory = &h->backend->memory;
  if (!memory->pushed_count && memory->stack_capacity < ENOUGH) memory_set_stack(memory, ENOUGH);
  MemoryMark mark = memory_mark(memory);
  int64_t count = batch * seq_len, vocab = model->config.vocab_size;
  int32_t *rows = random_ids(h, count, 1);
  for (int64_t n = 0; n < count; n++) rows[n] = (int32_t)n;
  Batch b = {.batch = batch, .seq_len = seq_len, .tokens = ids_from(h, tokens, count)};
  Tensor logits = poisoned(h, DTYPE_F32, count, vocab);
  transformer_logits(h->backend, model, &b, NULL, 0, ids_from(h, rows, count), logits);
  double *values = values_of(h, logits);
  memory_pop_to(memory, mark);
  return values;
}

double *model_losses(Harness *h, Model *model, const int32_t *tokens, const int32_t *targets, int64_t batch,
                     int64_t seq_len) {
  double *z = model_logits(h, model, tokens, batch, seq_len), *loss = host_values(h, batch * seq_len);
  double cap = model->config.final_logit_softcapping;
  int64_t vocab = model->config.vocab_size;
  for (int64_t i = 0; i < batch * seq_len * vocab && cap > 0; i++) z[i] = cap * tanh(z[i] / cap);
  reference_cross_entropy(loss, z, targets, batch * seq_len, vocab);
  return loss;
}

StepResult run_step(Run *run, int64_t step) {
  StepResult results[TRAINER_PENDING];
  train_step(&run->trainer, &run->data.loader, step);
  assert_int_equal(trainer_collect(&run->trainer, results), 1);
  assert_int_equal(results[0].step, step);
  return results[0];
}

void assert_planned(const Run *run) {
  const Memory *memory = &run->h->backend->memory;
  const Ledger *measured = &memory->ledger;
  Ledger plan = plan_run(&run->options, run->h->backend->device, run->trainer.transformer.mode);
  assert_int_equal(memory->stack_capacity, plan.stack_peak);
  assert_int_equal(measured->peak, plan.peak);
  assert_int_equal(measured->stack_peak, plan.stack_peak);
  assert_int_equal(measured->highest[MEMORY_HEAD], plan.highest[MEMORY_HEAD]);
  assert_memory_equal(measured->at_peak, plan.at_peak, sizeof plan.at_peak);
  assert_memory_equal(measured->host, plan.host, sizeof plan.host);
  assert_int_equal(memory->pushed_count, 0);
}
