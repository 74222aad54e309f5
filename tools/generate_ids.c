// Token ids from a model: a Hugging Face directory or a checkpoint of ./train continues a prompt. Prints each
// id on a line of its own as it is drawn, and an empty line between two samples. tools/generate turns them
// into text.
//
//   tools/generate_ids --init gpt2 --prompt 15496,995 --tokens 20
//   tools/generate_ids --init gpt2 --prompt - --top-p 0.9 <ids.txt
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <stb/stb_ds.h>

#include "data/file.h"
#include "data/json.h"
#include "kernels/base/fail.h"
#include "kernels/base/integers.h"
#include "kernels/base/system.h"
#include "kernels/ranks/launch.h"
#include "model/checkpoint/checkpoint.h"
#include "model/checkpoint/hf_config.h"
#include "model/generate.h"
#include "trainer/data.h"
#include "trainer/option_rows.h"
#include "trainer/trainer.h"

typedef struct {
  Options train; // the options that ./train has, too
  int64_t tokens, samples;
  bool go_on; // past the token that ends a text
} Wanted;

static const char advice[] = "lower --tokens or use another --device";

#define OPTION_VALUES Wanted
enum { MANY = 1000000000 };
static const char *const train_options[] = {"init", "temperature", "top-k", "top-p",
                                            "seed", "device",      "dtype"};
static const Option own[] = {
    {TEXT("prompt", "IDS", train.prompt),
     "Ids such as 15496,995 that the text begins with; - reads them from standard input"},
    {INTEGER("tokens", "N", tokens, 1, MANY), "Tokens to add; the model may end the text earlier",
     .initial = "200"},
    {INTEGER("samples", "N", samples, 1, MANY), "Texts to write", .initial = "1"},
    {FLAG("go-on", go_on, true), "Do not stop at the token that ends a text"},
    {.type = OPTION_END}};
enum { TRAIN_OPTIONS = sizeof train_options / sizeof *train_options };

static Wanted parse(int argc, char **argv) {
  Option rows[TRAIN_OPTIONS + sizeof own / sizeof *own];
  for (int i = 0; i < TRAIN_OPTIONS; i++) rows[i] = *option_find(options_rows, train_options[i]);
  memcpy(rows + TRAIN_OPTIONS, own, sizeof own);
  const OptionTable table = {
      .rows = rows,
      .doc = "Continues a prompt of token ids, and prints ids. tools/generate takes and prints text.",
      .stray = "the model is named with --init DIR"};
  Wanted w = {.train = {.dtypes = {.weight = DTYPE_COUNT, .grad = DTYPE_COUNT}}};
  option_table_parse(&table, &w, NULL, argc, argv);
  Options *o = &w.train;
  if (!o->init) fail("name the model with --init DIR: a directory with config.json and model.safetensors");
  o->origin = (char *)o->init;
  o->model = hf_config_read(o->init);
  return w;
}

static int32_t *read_prompt(const Options *o) {
  char *input = NULL;
  size_t capacity = 0;
  bool reads = o->prompt && !strcmp(o->prompt, "-");
  const char *list = !reads ? o->prompt : getdelim(&input, &capacity, 0, stdin) < 0 ? "" : input;
  int32_t *ids = list ? prompt_ids(list, o->model.vocab_size) : NULL;
  if (!ids)
    fail("--prompt: give ids such as 15496,995, or - for those on standard input; tools/generate takes text");
  free(input);
  return ids;
}

static void print_token(void *context, int32_t token) {
  printf("%d\n", token);
  fflush(stdout);
}

// The ids that end a text: eos_token_id of generation_config.json or config.json, a number or a list.
static int32_t *find_stops(const char *folder) {
  static const char *const files[] = {"generation_config.json", "config.json"};
  int32_t *stops = NULL;
  for (int i = 0; i < 2 && !stops; i++) {
    cJSON *json = json_read(path_in(folder, files[i]).text, NULL);
    const cJSON *ids = json_member(json, "eos_token_id"), *id = cJSON_IsArray(ids) ? ids->child : ids;
    for (; id; id = id == ids ? NULL : id->next)
      if (json_is_whole(id) && id->valuedouble < INT32_MAX) arrput(stops, id->valueint);
    cJSON_Delete(json);
  }
  return stops;
}

static void create_model(Model *model, const Options *o, Backend *backend, int64_t window) {
  ParameterDtypes dtypes = {.weight = o->dtypes.weight, .weights_only = true};
  model_create(model, &o->model, backend, dtypes, window);
}

// The stack that a text takes, found out by a plan; fails when weights and stack do not fit.
static size_t plan_stack(const Options *o, const Backend *backend, const Generation *g) {
  Backend *plan = plan_backend_create(backend->device, o->dtypes.weight);
  Model model;
  int64_t count;
  create_model(&model, o, plan, g->window);
  generate_tokens(plan, &model, g, &count);
  size_t stack = plan->memory.ledger.stack_peak, needed = plan->memory.ledger.peak,
         usable = machine_usable_bytes(backend);
  model_destroy(&model);
  backend_destroy(plan);
  if (usable && needed > usable)
    fail("a text of %lld tokens needs %s and the device has %s to give; %s", (long long)g->window,
         text_bytes(needed).text, text_bytes(usable).text, advice);
  return stack;
}

int main(int argc, char **argv) {
  if (launch_read().rank) return 0; // several processes are no faster than one
  memory_set_advice(advice);
  Wanted w = parse(argc, argv);
  Options *o = &w.train;
  int32_t *prompt = read_prompt(o), *stops = w.go_on ? NULL : find_stops(o->init);
  Backend *backend = machine_open(o);
  Generation g = {.prompt = prompt,
                  .prompt_count = arrlen(prompt),
                  .max_new_tokens = w.tokens,
                  .window = min_i64(arrlen(prompt) + w.tokens, model_max_seq_len(&o->model)),
                  .sampling = o->generation.sampling,
                  .seed = o->seed,
                  .stop = stops,
                  .stop_count = arrlen(stops),
                  .on_token = print_token};
  size_t stack = plan_stack(o, backend, &g);
  Model model;
  create_model(&model, o, backend, g.window);
  checkpoint_require_weights(o->init);
  weights_load(&model, backend, o->init, false);
  memory_set_stack(&backend->memory, stack);

  int64_t written = 0, count;
  double start = now_seconds();
  for (int64_t i = 0; i < w.samples; i++, g.seed++) {
    if (i > 0) putchar('\n');
    free(generate_tokens(backend, &model, &g, &count));
    written += count - g.prompt_count;
  }
  fprintf(stderr, "%s tokens, %.1f a second, on %s\n", text_grouped(written).text,
          (double)written / (now_seconds() - start), backend->description);
  model_destroy(&model);
  backend_destroy(backend);
  arrfree(prompt);
  arrfree(stops);
  return 0;
}
