#include "model/checkpoint/checkpoint.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/fail.h"
#include "base/file.h"
#include "base/text.h"
#include "model/checkpoint/hf_config.h"
#include "model/checkpoint/weights.h"

#define TRAINER_STATE     "trainer_state.json"
#define GENERATION_CONFIG "generation_config.json"
#define TOKENIZER         "tokenizer.json"
#define LATEST            "latest"
#define NEW_LATEST        ".latest" // until it is renamed

// A tokenizer's other files, in the folder of TOKENIZER.
static const char *const tokenizer_names[] = {
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",  "vocab.json", "merges.txt",
    "tokenizer.model",       "chat_template.jinja",     "chat_template.json",
};
enum { TOKENIZER_NAMES = sizeof tokenizer_names / sizeof *tokenizer_names };

// --- steps in a directory ----------------------------------------------------------------------------------

static Text step_name(int64_t step) {
  Text name;
  snprintf(name.text, sizeof name.text, "step-%06lld", (long long)step);
  return name;
}

static int64_t step_of(const char *name) {
  return strtoll(name + strlen("step-"), NULL, 10);
}

static bool is_step(const char *name) {
  const char *digits = name + strlen("step-");
  return !strncmp(name, "step-", strlen("step-")) && *digits && strlen(digits) < 18 &&
         !digits[strspn(digits, "0123456789")];
}

static int newest_first(const void *a, const void *b) {
  int64_t x = step_of(*(char *const *)a), y = step_of(*(char *const *)b);
  return (x < y) - (x > y);
}

// The names of a directory's checkpoints; the caller frees each and the list.
static char **list_steps(const char *directory, int *count) {
  char **names = folder_list(directory, is_step, count);
  if (*count) qsort(names, (size_t)*count, sizeof *names, newest_first);
  return names;
}

// --- the store ---------------------------------------------------------------------------------------------

static void take_lock(CheckpointStore *store) {
  store->lock = open(store->directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (store->lock < 0) fail("--save %s: %s", store->directory, strerror(errno));
  // Some network file systems have no locks; there the run goes without.
  if (flock(store->lock, LOCK_EX | LOCK_NB) && errno == EWOULDBLOCK)
    fail("--save %s: another run is writing its checkpoints there; wait for it or name another directory",
         store->directory);
}

static bool is_listed(const char *name, const char *const *names, size_t count) {
  for (size_t i = 0; i < count; i++)
    if (!strcmp(name, names[i])) return true;
  return false;
}

// What a model's folder holds, or the directory itself, by name.
static bool is_ours_by_name(const char *name) {
  static const char *const names[] = {"config.json", GENERATION_CONFIG, TRAINER_STATE, CHECKSUMS, TOKENIZER,
                                      LATEST,        NEW_LATEST};
  const char *suffix = strstr(name, ".safetensors");
  return is_listed(name, names, sizeof names / sizeof *names) ||
         is_listed(name, tokenizer_names, TOKENIZER_NAMES) ||
         (suffix && (!suffix[12] || !strcmp(suffix + 12, ".index.json")));
}

// Such names are links that point_to made; anything else is another program's, and would be mixed with ours or lost.
static void refuse_foreign(const CheckpointStore *store, int64_t first_step, bool may_replace) {
  int count;
  char **names = folder_list(store->directory, is_ours_by_name, &count);
  for (int i = 0; i < count; i++) {
    char target[PATH_MAX] = "", *path = path_join(store->directory, names[i]);
    char *wanted = path_join(LATEST, names[i]);
    bool link = readlink(path, target, sizeof target - 1) >= 0;
    bool latest = !strcmp(names[i], LATEST) || !strcmp(names[i], NEW_LATEST);
    if (!link || !(latest ? is_step(target) : !strcmp(target, wanted)))
      fail("--save %s: it holds a model that is no checkpoint (%s is not from this program); name another "
           "directory",
           store->directory, names[i]);
    free(path);
    free(wanted);
  }
  folder_list_free(names, count);
  names = list_steps(store->directory, &count);
  if (count && !may_replace && step_of(names[0]) > first_step)
    fail("--save %s: %s is there, which is ahead of this run; --resume auto continues from it, or name "
         "another directory",
         store->directory, names[0]);
  folder_list_free(names, count);
}

// Takes `path` over; a file that does not exist is left out.
static void take(CheckpointStore *store, const char *name, char *path) {
  Companion c = {.name = name};
  c.text = file_read(path, &c.length);
  free(path);
  if (c.text) store->companions[store->companion_count++] = c;
}

// The tokenizer's files come from one place: those of two tokenizers would contradict each other.
static void take_tokenizer(CheckpointStore *store, const char *path) {
  const char *slash = strrchr(path, '/');
  bool is_folder = path_is_folder(path);
  char *folder = is_folder ? text_format("%s", path)
                           : text_format("%.*s", slash ? (int)(slash - path) + 1 : 1, slash ? path : ".");
  if (!store->companion_count) // where the origin does not say what ends a text, the tokenizer's folder may
    take(store, GENERATION_CONFIG, path_join(folder, GENERATION_CONFIG));
  take(store, TOKENIZER, is_folder ? path_join(path, TOKENIZER) : text_format("%s", path));
  for (int i = 0; i < TOKENIZER_NAMES; i++)
    take(store, tokenizer_names[i], path_join(folder, tokenizer_names[i]));
  free(folder);
}

static void take_along(CheckpointStore *store, const char *origin, const char *tokenizer) {
  store->companions =
      host_alloc(TOKENIZER_NAMES + 2, sizeof *store->companions, "the files that go with a model");
  if (origin) {
    char *path = path_join(origin, "config.json");
    size_t length;
    store->config = file_read(path, &length);
    free(path);
    take(store, GENERATION_CONFIG, path_join(origin, GENERATION_CONFIG));
  }
  if (tokenizer || origin) take_tokenizer(store, tokenizer ? tokenizer : origin);
}

CheckpointStore checkpoint_store_open(const char *directory, const char *origin, const char *tokenizer,
                                      int64_t first_step, bool may_replace) {
  CheckpointStore store = {.shard_bytes = CHECKPOINT_SHARD_BYTES, .last_step = first_step};
  path_make_folders("save", directory);
  store.directory = text_format("%s", directory);
  refuse_foreign(&store, first_step, may_replace);
  take_lock(&store);
  folder_clean(directory);
  take_along(&store, origin, tokenizer);
  return store;
}

void checkpoint_store_close(CheckpointStore *store) {
  if (!store->directory) return;
  close(store->lock);
  for (int i = 0; i < store->companion_count; i++) free(store->companions[i].text);
  free(store->companions);
  free(store->config);
  free(store->directory);
  *store = (CheckpointStore){0};
}

// --- saving ------------------------------------------------------------------------------------------------

// `latest` always leads to whole files of one checkpoint. --resume does without it, as on file systems without links.
static void point_to(const char *directory, const char *name) {
  char *fresh = path_join(directory, NEW_LATEST), *latest = path_join(directory, LATEST);
  char *folder = path_join(directory, name);
  unlink(fresh);
  if (symlink(name, fresh) || rename(fresh, latest))
    warn("cannot make the link %s: %s", latest, strerror(errno));
  int count;
  char **files = folder_list(folder, is_plain_name, &count);
  for (int i = 0; i < count; i++) {
    char *link = path_join(directory, files[i]), *target = path_join(LATEST, files[i]);
    if (symlink(target, link) && errno != EEXIST) warn("cannot make the link %s: %s", link, strerror(errno));
    free(link);
    free(target);
  }
  folder_list_free(files, count);
  folder_sync(directory);
  free(fresh);
  free(latest);
  free(folder);
}

static void delete_older(const CheckpointStore *store, int64_t step) {
  int count;
  char **names = list_steps(store->directory, &count);
  int64_t kept = 1; // the one of `step`
  for (int i = 0; i < count; i++)
    if (step_of(names[i]) < step && kept++ >= store->keep) folder_discard(store->directory, names[i]);
  folder_list_free(names, count);
}

bool checkpoint_save(CheckpointStore *store, const Model *model, Backend *backend, int64_t step,
                     const cJSON *trainer_state, Reason *reason) {
  Text name = step_name(step);
  Folder folder = store->directory ? folder_begin(store->directory, name.text) : (Folder){0};
  size_t shard_bytes = store->directory ? store->shard_bytes : CHECKPOINT_SHARD_BYTES;
  weights_store(model, backend, &folder, store->dtype, shard_bytes);
  optimizer_store(model, backend, &folder, store->dtype, shard_bytes);
  if (!store->directory) return true;
  bool generation = false;
  for (int i = 0; i < store->companion_count; i++) {
    const Companion *c = &store->companions[i];
    generation |= !strcmp(c->name, GENERATION_CONFIG);
    folder_add(&folder, c->name, c->text, c->length);
  }
  const char *nothing = "{\"_from_model_config\": true}\n";
  if (!generation) folder_add(&folder, GENERATION_CONFIG, nothing, strlen(nothing));
  char *config = hf_config_write(&model->config, store->dtype, store->config);
  char *state = json_print(trainer_state, true);
  folder_add(&folder, "config.json", config, strlen(config));
  folder_add(&folder, TRAINER_STATE, state, strlen(state));
  free(config);
  free(state);
  if (!folder_finish(&folder, reason)) {
    if (store->last_step < 0)
      return refuse(reason, "%s; there is no checkpoint of this run yet", reason->text);
    return refuse(reason, "%s; the last good checkpoint is that of step %lld", reason->text,
                  (long long)store->last_step);
  }
  store->last_step = step;
  point_to(store->directory, name.text);
  if (store->keep) delete_older(store, step);
  return true;
}

// --- reading -----------------------------------------------------------------------------------------------

char *checkpoint_newest(const char *directory, FolderCheck check, bool *any) {
  int count;
  char **names = list_steps(directory, &count), *newest = NULL;
  *any = count > 0;
  for (int i = 0; i < count && !newest; i++) {
    Reason reason;
    char *path = path_join(directory, names[i]);
    if (folder_intact(path, check, NULL, &reason)) {
      newest = path;
    } else {
      warn("%s; %s is passed over", reason.text, names[i]);
      free(path);
    }
  }
  folder_list_free(names, count);
  return newest;
}

void checkpoint_require_intact(const char *folder, FolderCheck check, bool whole) {
  char *list = path_join(folder, CHECKSUMS);
  bool listed = path_exists(list);
  free(list);
  Reason reason;
  if (!whole && !listed) return;
  if (!folder_intact(folder, check, whole ? NULL : is_optimizer_file, &reason))
    fail("%s; %s", reason.text,
         whole ? "name another checkpoint, or a directory of some, of which the newest intact one is taken"
               : "take another checkpoint, or delete " CHECKSUMS " if you changed the file on purpose");
}

cJSON *checkpoint_trainer_state(const char *folder) {
  char *path = path_join(folder, TRAINER_STATE);
  cJSON *state = json_read(path);
  if (!state)
    fail("%s does not exist: %s is no checkpoint of this program; --init starts from a model", path, folder);
  free(path);
  return state;
}

void checkpoint_load(const char *folder, Model *model, Backend *backend, bool state) {
  weights_load(model, backend, folder);
  if (state) optimizer_load(model, backend, folder);
}
