#include "model/checkpoint/companions.h"

#include <libgen.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <stb/stb_ds.h>

#include "data/json.h"
#include "data/source.h"
#include "kernels/base/alloc.h"
#include "kernels/base/text.h"
#include "model/checkpoint/hf_config.h"

const char *const tokenizer_files[TOKENIZER_FILES] = {
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "tokenizer.model",       "chat_template.jinja",     "chat_template.json"};

// Fails if a JSON file is not JSON, as when it was cut short.
static Companion companion(const char *name, const char *path) {
  struct stat status;
  Companion c = {.name = name, .mode = S_IRUSR | S_IWUSR};
  c.text = file_read(path, &c.length, NULL);
  if (!c.text) return c;
  if (!stat(path, &status)) c.mode = status.st_mode & 0666;
  const char *end = c.text;
  cJSON *json = text_ends_in(name, ".json") ? cJSON_ParseWithOpts(c.text, &end, true) : NULL;
  if (text_ends_in(name, ".json") && !cJSON_IsObject(json))
    fail("%s cannot go into checkpoints: it is no JSON object (see byte %td); repair or remove it", path,
         end - c.text);
  cJSON_Delete(json);
  return c;
}

static void take(Companions *c, const char *name, const char *path) {
  Companion one = companion(name, path);
  if (one.text) arrput(c->files, one);
}

static cJSON *stops_of(const char *folder) {
  static const char *const files[] = {GENERATION_CONFIG, CONFIG};
  cJSON *stops = NULL;
  for (int i = 0; i < 2 && !stops; i++) {
    cJSON *json = json_read(path_in(folder, files[i]).text, NULL);
    stops = cJSON_DetachItemFromObjectCaseSensitive(json, "eos_token_id");
    cJSON_Delete(json);
  }
  return stops;
}

// NULL: none, or several. The caller frees it.
static char *template_of(const char *folder) {
  size_t length;
  char *text = file_read(path_in(folder, "chat_template.jinja").text, &length, NULL);
  cJSON *json = text ? NULL : json_read(path_in(folder, "tokenizer_config.json").text, NULL);
  const char *own = json_text(json, "chat_template");
  if (own) text = text_format("%s", own);
  cJSON_Delete(json);
  return text;
}

// Says in what a model from `origin` changes because its training data in `folder` say so.
static void warn_of_differences(const char *origin, const char *folder) {
  cJSON *stops[] = {stops_of(origin), stops_of(folder)};
  char *templates[] = {template_of(origin), template_of(folder)};
  if (stops[1] && !cJSON_Compare(stops[0], stops[1], true)) {
    char *before = stops[0] ? json_print(stops[0], false) : text_format("absent");
    char *after = json_print(stops[1], false);
    warn("the eos_token_id in %s is %s: checkpoints get that of %s, %s", origin, before, folder, after);
    free(before);
    free(after);
  }
  if (templates[1] && (!templates[0] || strcmp(templates[0], templates[1])))
    warn("%s has %s chat template: checkpoints get that of %s", origin, templates[0] ? "another" : "no",
         folder);
  for (int i = 0; i < 2; i++) {
    cJSON_Delete(stops[i]);
    free(templates[i]);
  }
}

// The tokenizer's files come from one place: two tokenizers' files would contradict each other.
static void take_tokenizer(Companions *c, const char *origin, const char *path) {
  bool is_folder = path_is_folder(path);
  Path copy = path_in(path, "");
  const char *folder = is_folder ? path : dirname(copy.text);
  Path ends = path_in(folder, GENERATION_CONFIG);
  // The folder says what ends a text if it has shards, or where the origin does not say it.
  if (manifest_is_in(folder)) {
    if (origin) warn_of_differences(origin, folder);
    while (path_exists(ends.text) && arrlen(c->files)) free(arrpop(c->files).text);
  }
  if (!arrlen(c->files)) take(c, GENERATION_CONFIG, ends.text);
  take(c, TOKENIZER, is_folder ? path_in(path, TOKENIZER).text : path);
  for (int i = 0; i < TOKENIZER_FILES; i++)
    take(c, tokenizer_files[i], path_in(folder, tokenizer_files[i]).text);
}

Companions companions_read(const char *origin, const char *tokenizer) {
  Companions c = {0};
  if (origin) {
    c.config = companion(CONFIG, path_in(origin, CONFIG).text);
    take(&c, GENERATION_CONFIG, path_in(origin, GENERATION_CONFIG).text);
  }
  if (tokenizer || origin) take_tokenizer(&c, origin, tokenizer ? tokenizer : origin);
  for (int i = 0; i < arrlen(c.files); i++)
    if (!strcmp(c.files[i].name, GENERATION_CONFIG)) return c;
  char *nothing = text_format("{\"_from_model_config\": true}\n");
  Companion plain = {GENERATION_CONFIG, nothing, strlen(nothing), 0666};
  arrput(c.files, plain);
  return c;
}

void companions_write(const Companions *c, Folder *folder, const ModelConfig *config, Dtype dtype) {
  for (const Companion *one = c->files; one < c->files + arrlen(c->files); one++)
    folder_add(folder, one->name, one->mode, one->text, one->length);
  char *text = hf_config_write(config, dtype, c->config.text);
  folder_add(folder, CONFIG, c->config.text ? c->config.mode : 0666, text, strlen(text));
  free(text);
}

void companions_free(Companions *c) {
  for (int i = 0; i < arrlen(c->files); i++) free(c->files[i].text);
  arrfree(c->files);
  free(c->config.text);
  *c = (Companions){0};
}
