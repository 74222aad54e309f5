// Text from a model: a Hugging Face directory or a checkpoint of ./train continues a prompt, token by token,
// as it comes.
//
//   tools/generate --init runs/llama --prompt "Once upon a time"
//   tools/generate --init gpt2 --prompt - --tokens 400 --temperature 0.7 --top-p 0.9 <prompt.txt
//
// model/generate.c draws the tokens, data/tokenizer.c makes them text.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/file.h"
#include "data/json.h"
#include "data/tokenizer.h"
#include "kernels/alloc.h"
#include "kernels/fail.h"
#include "kernels/ranks/launch.h"
#include "kernels/system.h"
#include "kernels/text.h"
#include "model/checkpoint/checkpoint.h"
#include "model/checkpoint/hf_config.h"
#include "model/generate.h"
#include "trainer/machine.h"
#include "trainer/option_rows.h"
#include "trainer/prompt.h"

typedef struct {
  Options train; // what ./train calls the same
  int64_t tokens, samples;
  bool go_on; // past the token that ends a text
} Wanted;

// --- the command line --------------------------------------------------------------------------------------

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
  if (!w.train.init)
    fail("name the model with --init DIR: a directory with config.json and model.safetensors");
  return w;
}

// --- the text ----------------------------------------------------------------------------------------------

// A token may end within a character: its bytes wait until the rest has come. On a terminal the text is shown
// as bytes_show makes it safe; elsewhere the bytes go out as they are.
typedef struct {
  const Tokenizer *tokenizer;
  char waiting[4];
  int64_t waits;
} Printer;

// Bytes at the end that begin a character and do not finish it.
static int64_t unfinished(const char *bytes, int64_t length) {
  for (int64_t back = 1; back <= 3 && back <= length; back++) {
    unsigned char c = (unsigned char)bytes[length - back];
    if ((c & 0xC0) == 0x80) continue;
    int64_t whole = c >= 0xF0 ? 4 : c >= 0xE0 ? 3 : c >= 0xC0 ? 2 : 1;
    return whole > back ? back : 0;
  }
  return 0;
}

static void put(const char *bytes, int64_t length) {
  if (isatty(STDOUT_FILENO)) {
    char *shown = bytes_show(bytes, length);
    fputs(shown, stdout);
    free(shown);
  } else {
    fwrite(bytes, 1, (size_t)length, stdout);
  }
  fflush(stdout);
}

static void print_token(void *context, int32_t token) {
  Printer *p = context;
  int64_t length = token < 256; // without a tokenizer a byte is a token, and there are others
  char byte = (char)token,
       *decoded = p->tokenizer ? tokenizer_decode(p->tokenizer, &token, 1, &length) : NULL,
       *all = host_alloc(length + p->waits + 1, 1, "a token");
  memcpy(all, p->waiting, (size_t)p->waits);
  memcpy(all + p->waits, decoded ? decoded : &byte, (size_t)length);
  length += p->waits;
  p->waits = unfinished(all, length);
  memcpy(p->waiting, all + length - p->waits, (size_t)p->waits);
  put(all, length - p->waits);
  free(all);
  free(decoded);
}

// --- the model ---------------------------------------------------------------------------------------------

enum { MAX_STOPS = 16 };

// The ids that end a text: eos_token_id of generation_config.json or config.json, a number or a list.
static int64_t find_stops(const char *directory, int32_t stops[MAX_STOPS]) {
  static const char *const files[] = {"generation_config.json", "config.json"};
  int64_t count = 0;
  for (int i = 0; i < 2 && count == 0; i++) {
    char *path = path_join(directory, files[i]);
    cJSON *json = json_read(path);
    const cJSON *ids = json_member(json, "eos_token_id"), *id = cJSON_IsArray(ids) ? ids->child : ids;
    for (; id && count < MAX_STOPS; id = cJSON_IsArray(ids) ? id->next : NULL)
      if (json_is_whole(id) && id->valuedouble < INT32_MAX) stops[count++] = (int32_t)id->valuedouble;
    cJSON_Delete(json);
    free(path);
  }
  return count;
}

// The stack that a text takes, found out by a plan; fails when weights and stack do not fit.
static size_t plan_stack(const Wanted *w, const Backend *backend, const ModelConfig *config,
                         const Generation *g) {
  Backend *plan = plan_backend_create(backend->device, w->train.dtype);
  Model model;
  int64_t count;
  ParameterDtypes dtypes = {.weight = w->train.dtype, .frozen = true};
  model_create(&model, config, plan, dtypes, g->window);
  generate(plan, &model, g, &count);
  size_t stack = plan->memory.ledger.stack_peak, needed = plan->memory.ledger.peak,
         usable = machine_usable_bytes(backend);
  model_destroy(&model);
  backend_destroy(plan);
  if (usable && needed > usable)
    fail("a text of %lld tokens needs %s and the device has %s to give; lower --tokens or use another "
         "--device",
         (long long)g->window, text_bytes(needed).text, text_bytes(usable).text);
  return stack;
}

static void write_samples(const Wanted *w, Backend *backend, Model *model, const Generation *wanted,
                          const Tokenizer *tokenizer) {
  int64_t written = 0, count;
  double start = now_seconds();
  for (int64_t i = 0; i < w->samples; i++) {
    Printer printer = {.tokenizer = tokenizer};
    Generation g = *wanted;
    g.on_token = print_token;
    g.context = &printer;
    g.seed = w->train.seed + (uint64_t)i;
    if (i > 0) fputs("\n---\n", stdout);
    for (int64_t k = 0; k < g.prompt_count; k++) print_token(&printer, g.prompt[k]);
    free(generate(backend, model, &g, &count));
    put(printer.waiting, printer.waits);
    written += count - g.prompt_count;
  }
  putchar('\n');
  fflush(stdout);
  double seconds = now_seconds() - start;
  fprintf(stderr, "%s tokens, %.1f a second, on %s\n", text_grouped(written).text, (double)written / seconds,
          backend->description);
}

int main(int argc, char **argv) {
  if (launch_read().rank) return 0; // several processes are no faster than one
  Wanted w = parse(argc, argv);
  ModelConfig config = hf_config_read(w.train.init);
  Tokenizer *tokenizer = prompt_tokenizer(w.train.tokenizer, w.train.init, true);
  char *text = NULL;
  size_t capacity = 0;
  bool given = strcmp(w.train.prompt, "-") || getdelim(&text, &capacity, 0, stdin) < 0; // or nothing is there
  if (given) free(text), text = text_format("%s", strcmp(w.train.prompt, "-") ? w.train.prompt : "");
  int64_t length = (int64_t)strlen(text), count = length;
  int32_t stops[MAX_STOPS], *prompt = tokenizer ? tokenizer_encode(tokenizer, text, length, true, &count)
                                                : host_alloc(length + 1, sizeof *prompt, "the prompt");
  if (!tokenizer) byte_encode(text, length, prompt);
  if (count < 1) fail("--prompt: give at least one character to continue");
  for (int64_t i = 0; i < count; i++)
    if (prompt[i] < 0 || prompt[i] >= config.vocab_size)
      fail("--prompt: its token %lld is %d and the model has %lld; name the model's own --tokenizer",
           (long long)i, prompt[i], (long long)config.vocab_size);

  Backend *backend = machine_open(&w.train);
  int64_t whole = count + w.tokens, longest = model_max_seq_len(&config);
  Generation generation = {
      .prompt = prompt,
      .prompt_count = count,
      .max_new_tokens = w.tokens,
      .window = whole < longest ? whole : longest,
      .sampling = {.temperature = w.train.temperature, .top_k = w.train.top_k, .top_p = w.train.top_p},
      .stop = stops,
      .stop_count = w.go_on ? 0 : find_stops(w.train.init, stops)};
  size_t stack = plan_stack(&w, backend, &config, &generation);
  Model model;
  ParameterDtypes dtypes = {.weight = w.train.dtype, .frozen = true};
  model_create(&model, &config, backend, dtypes, generation.window);
  checkpoint_load(w.train.init, &model, backend, false);
  memory_set_stack(&backend->memory, stack);
  write_samples(&w, backend, &model, &generation, tokenizer);

  model_destroy(&model);
  backend_destroy(backend);
  tokenizer_close(tokenizer);
  free(prompt);
  free(text);
  return 0;
}
