// Text from a model: a Hugging Face directory or a checkpoint of ./train continues a prompt, token by token,
// as it comes.
//
//   tools/generate --init runs/llama --prompt "Once upon a time"
//   tools/generate --init gpt2 --prompt - --tokens 400 --temperature 0.7 --top-p 0.9 <prompt.txt
//
// trainer/data.c makes the prompt tokens, model/generate.c draws more, data/tokenizer.c makes them text.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/file.h"
#include "data/json.h"
#include "kernels/fail.h"
#include "kernels/integers.h"
#include "kernels/ranks/launch.h"
#include "kernels/system.h"
#include "model/checkpoint/hf_config.h"
#include "model/checkpoint/weights.h"
#include "model/generate.h"
#include "trainer/data.h"
#include "trainer/machine.h"
#include "trainer/option_rows.h"

typedef struct {
  Options train; // what ./train calls the same
  int64_t tokens, samples;
  bool go_on; // past the token that ends a text
} Wanted;

static const char advice[] = "lower --tokens or use another --device";

#define OPTION_VALUES Wanted
enum { MANY = 1000000000 };
static const char *const of_train[] = {"init",  "tokenizer", "prompt", "temperature", "top-k",
                                       "top-p", "seed",      "device", "dtype"};
static const Option own[] = {{WHOLE("tokens", "N", tokens, 1, MANY), DEFAULT("200"),
                              HELP("Tokens to add; the model may end the text earlier")},
                             {WHOLE("samples", "N", samples, 1, MANY), DEFAULT("1"), HELP("Texts to write")},
                             {FLAG("go-on", go_on, true), HELP("Do not stop at the token that ends a text")},
                             {.type = OPTION_END}};
enum { OF_TRAIN = sizeof of_train / sizeof *of_train };

static Wanted parse(int argc, char **argv) {
  Option rows[OF_TRAIN + sizeof own / sizeof *own];
  for (int i = 0; i < OF_TRAIN; i++) rows[i] = options_rows[option_row(options_rows, of_train[i])];
  memcpy(rows + OF_TRAIN, own, sizeof own);
  const OptionTable table = {rows, "Continues --prompt, or with --prompt - what standard input has.",
                             "the model is named with --init DIR"};
  Wanted w = {.train = {.prompt = "\n", .dtype = DTYPE_COUNT, .dtypes.grad = DTYPE_COUNT}};
  option_table_parse(&table, &w, NULL, argc, argv);
  Options *o = &w.train;
  if (!o->init) fail("name the model with --init DIR: a directory with config.json and model.safetensors");
  o->origin = (char *)o->init;
  o->model = hf_config_read(o->init);
  size_t capacity = 0;
  static char *text;
  if (!strcmp(o->prompt, "-")) o->prompt = getdelim(&text, &capacity, 0, stdin) < 0 ? "" : text;
  return w;
}

// A token may end within a character: it waits for the rest. On a terminal the text is shown as bytes_show makes it
// safe; elsewhere the bytes go out as they are.
typedef struct {
  const Tokenizer *tokenizer;
  int32_t waiting[64];
  int64_t count;
} Printer;

static void print_waiting(Printer *p, bool all) {
  int64_t length, back = 1;
  char *bytes = tokenizer_decode(p->tokenizer, p->waiting, p->count, &length),
       *shown = bytes_show(bytes, length);
  while (back < 4 && back < length && (bytes[length - back] & 0xC0) == 0x80) back++;
  unsigned char lead = length ? (unsigned char)bytes[length - back] : 0;
  if (all || back >= (lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : lead >= 0xC0 ? 2 : 1)) {
    bool terminal = isatty(STDOUT_FILENO);
    fwrite(terminal ? shown : bytes, 1, terminal ? strlen(shown) : (size_t)length, stdout);
    fflush(stdout);
    p->count = 0;
  }
  free(shown);
  free(bytes);
}

static void print_token(void *context, int32_t token) {
  Printer *p = context;
  p->waiting[p->count++] = token;
  print_waiting(p, p->count == 64);
}

enum { MAX_STOPS = 16 };

// The ids that end a text: eos_token_id of generation_config.json or config.json, a number or a list.
static int64_t find_stops(const char *folder, int32_t stops[MAX_STOPS]) {
  static const char *const files[] = {"generation_config.json", "config.json"};
  int64_t count = 0;
  for (int i = 0; i < 2 && count == 0; i++) {
    cJSON *json = json_read(path_in(folder, files[i]).text);
    const cJSON *ids = json_member(json, "eos_token_id"), *id = cJSON_IsArray(ids) ? ids->child : ids;
    for (; id && count < MAX_STOPS; id = id == ids ? NULL : id->next)
      if (json_is_whole(id) && id->valuedouble < INT32_MAX) stops[count++] = id->valueint;
    cJSON_Delete(json);
  }
  return count;
}

static void create_model(Model *model, const Options *o, Backend *backend, int64_t window) {
  ParameterDtypes dtypes = {.weight = o->dtype, .weights_only = true};
  model_create(model, &o->model, backend, dtypes, window);
}

// The stack that a text takes, found out by a plan; fails when weights and stack do not fit.
static size_t plan_stack(const Options *o, const Backend *backend, const Generation *g) {
  Backend *plan = plan_backend_create(backend->device, o->dtype);
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
  Prompt prompt = prompt_open(o, NULL);
  Backend *backend = machine_open(o);
  Printer printer = {.tokenizer = prompt.tokenizer};
  int32_t stops[MAX_STOPS];
  Generation g = {.prompt = prompt.tokens,
                  .prompt_count = prompt.count,
                  .max_new_tokens = w.tokens,
                  .window = min_i64(prompt.count + w.tokens, model_max_seq_len(&o->model)),
                  .sampling = o->generation.sampling,
                  .seed = o->seed,
                  .stop = stops,
                  .stop_count = w.go_on ? 0 : find_stops(o->init, stops),
                  .on_token = print_token,
                  .context = &printer};
  size_t stack = plan_stack(o, backend, &g);
  Model model;
  create_model(&model, o, backend, g.window);
  weights_load(&model, backend, o->init, false);
  memory_set_stack(&backend->memory, stack);

  int64_t written = 0, count;
  double start = now_seconds();
  for (int64_t i = 0; i < w.samples; i++, g.seed++) {
    if (i > 0) fputs("\n---\n", stdout);
    for (int64_t k = 0; k < g.prompt_count; k++) print_token(&printer, g.prompt[k]);
    free(generate_tokens(backend, &model, &g, &count));
    print_waiting(&printer, true);
    written += count - g.prompt_count;
  }
  putchar('\n');
  fflush(stdout);
  fprintf(stderr, "%s tokens, %.1f a second, on %s\n", text_grouped(written).text,
          (double)written / (now_seconds() - start), backend->description);
  model_destroy(&model);
  backend_destroy(backend);
  prompt_close(&prompt);
  return 0;
}
