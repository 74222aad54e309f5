#include "model/checkpoint/checkpoint.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/fail.h"
#include "base/text.h"
#include "model/checkpoint/hf_config.h"

// --- our names ---------------------------------------------------------------------------------------------

#define STEP              "step-"
#define SAVING            ".saving-" // before a folder's name while it is made, or while its replacement is put there
#define REMOVING          ".removing-" // while it is removed
#define CONFIG            "config.json"
#define GENERATION_CONFIG "generation_config.json"
#define TOKENIZER         "tokenizer.json"
#define TRAINER_STATE     "trainer_state.json"
#define NEW_STATE         TRAINER_STATE ".new" // until it is renamed
#define LIST              "checksums.json"     // of checkpoints from before they went without
#define LATEST            "latest"
#define NEW_LATEST        ".latest" // until it is renamed

// A tokenizer's other files, in the folder of TOKENIZER.
static const char *const tokenizer_names[] = {
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",  "vocab.json", "merges.txt",
    "tokenizer.model",       "chat_template.jinja",     "chat_template.json",
};
enum { TOKENIZER_NAMES = sizeof tokenizer_names / sizeof *tokenizer_names };

static Text step_name(int64_t step) {
  Text name;
  snprintf(name.text, sizeof name.text, STEP "%06lld", (long long)step);
  return name;
}

// That a folder's name says, hidden or not; -1 where it is not one of ours.
static int64_t step_of(const char *name) {
  static const char *const prefixes[] = {STEP, SAVING STEP, REMOVING STEP};
  for (int i = 0; i < 3; i++) {
    size_t length = strlen(prefixes[i]), digits = strspn(name + strnlen(name, length), "0123456789");
    if (!strncmp(name, prefixes[i], length) && digits && digits < 18 && !name[length + digits])
      return strtoll(name + length, NULL, 10);
  }
  return -1;
}

static bool is_step(const char *name) {
  return *name != '.' && step_of(name) >= 0;
}

static bool is_left_over(const char *name) {
  return *name == '.' && step_of(name) >= 0;
}

static bool is_tensor_file(const char *name) {
  static const char *const stems[] = {MODEL_STEM, STATE_STEM, "first_step"}, shard[] = "-ddddd-of-ddddd";
  for (int i = 0; i < 3; i++) {
    size_t length = strlen(stems[i]), k = 0;
    if (strncmp(name, stems[i], length)) continue;
    const char *rest = name + length;
    while (shard[k] && (shard[k] == 'd' ? rest[k] >= '0' && rest[k] <= '9' : rest[k] == shard[k])) k++;
    if (!shard[k]) rest += k;
    if (!strcmp(rest, ".safetensors") || !strcmp(rest, ".safetensors.index.json")) return true;
  }
  return false;
}

// A file of a checkpoint.
static bool is_ours(const char *name) {
  static const char *const names[] = {CONFIG, GENERATION_CONFIG, TOKENIZER, TRAINER_STATE, NEW_STATE,
                                      LIST,   LIST ".new"};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    if (!strcmp(name, names[i])) return true;
  for (int i = 0; i < TOKENIZER_NAMES; i++)
    if (!strcmp(name, tokenizer_names[i])) return true;
  return is_tensor_file(name);
}

static bool is_latest(const char *name) {
  return !strcmp(name, LATEST) || !strcmp(name, NEW_LATEST);
}

static bool is_ours_in_store(const char *name) {
  return is_ours(name) || is_latest(name);
}

// --- folders -----------------------------------------------------------------------------------------------

static int by_bytes(const void *a, const void *b) {
  return strcmp(*(char *const *)a, *(char *const *)b);
}

// The `count` entries that `accept` takes, in byte order; NULL: unreadable. Closes the descriptor.
static char **list_entries(int descriptor, bool (*accept)(const char *name), int *count) {
  *count = 0;
  DIR *folder = descriptor < 0 ? NULL : fdopendir(descriptor);
  if (!folder) return NULL;
  char **names = NULL;
  int64_t capacity = 0;
  for (struct dirent *entry; (entry = readdir(folder));) {
    if (!accept(entry->d_name)) continue;
    names = host_grow(names, *count, &capacity, sizeof *names, "a list of files");
    names[(*count)++] = text_format("%s", entry->d_name);
  }
  closedir(folder);
  if (*count) qsort(names, (size_t)*count, sizeof *names, by_bytes);
  return names;
}

static char **list(const char *path, bool (*accept)(const char *name), int *count) {
  return list_entries(open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC), accept, count);
}

static void list_free(char **names, int count) {
  for (int i = 0; i < count; i++) free(names[i]);
  free(names);
}

// What was made and renamed in it is on the disk; errno says why not.
static bool sync_folder(const char *path) {
  int descriptor = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return false;
  // Some network file systems cannot sync a folder and say EINVAL; there is nothing more to be done there.
  bool synced = fsync(descriptor) == 0 || errno == EINVAL;
  int error = errno;
  close(descriptor);
  errno = error;
  return synced;
}

// Whether a folder holds the trainer_state.json of the step in its name. One that was left behind may have its list
// instead, or nothing but the beginning of that file.
static bool is_marked(const char *path, char **names, int count) {
  const char *name = strrchr(path, '/') + 1;
  char *file = path_join(path, TRAINER_STATE), *listed = path_join(path, LIST);
  Reason reason;
  cJSON *state = json_try_read(file, &reason);
  const cJSON *step = json_member(state, "step");
  bool marked = cJSON_IsNumber(step) && step->valuedouble == (double)step_of(name);
  if (*name == '.')
    marked = marked || path_exists(listed) || count == 0 || (count == 1 && !strcmp(names[0], NEW_STATE));
  cJSON_Delete(state);
  free(file);
  free(listed);
  return marked;
}

typedef enum {
  LOOK,       // only checks that a folder may be removed
  REMOVE,     // removes it where it may be
  REMOVE_MADE // which this process made
} Removal;

// Removes a folder of ours, its mark last. False with a reason, and nothing is removed: it is not. True where there is none.
static bool remove_folder(const char *path, Removal removal, Reason *reason) {
  int folder = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC), count;
  if (folder < 0 && errno == ENOENT) return true;
  if (folder < 0) return refuse(reason, "%s is left: it is a link, no folder, or cannot be opened", path);
  char **names = list_entries(dup(folder), is_plain_name, &count);
  bool ok = true;
  for (int i = 0; i < count && ok; i++) {
    struct stat status;
    if (!is_ours(names[i]) || fstatat(folder, names[i], &status, AT_SYMLINK_NOFOLLOW) ||
        !S_ISREG(status.st_mode))
      ok = refuse(reason, "%s is left: it holds %s, which this program did not write", path, names[i]);
  }
  if (ok && removal != REMOVE_MADE && !is_marked(path, names, count))
    ok = refuse(reason, "%s is left: it has no " TRAINER_STATE " of that step", path);
  for (int last = 0; last < 2 && removal != LOOK; last++)
    for (int i = 0; i < count && ok; i++)
      if ((strcmp(names[i], TRAINER_STATE) == 0) == last) unlinkat(folder, names[i], 0);
  if (ok && removal != LOOK && rmdir(path))
    ok = refuse(reason, "cannot remove %s: %s", path, strerror(errno));
  list_free(names, count);
  close(folder);
  return ok;
}

static void remove_or_warn(const char *path, Removal removal) {
  Reason reason;
  if (!remove_folder(path, removal, &reason)) warn("%s", reason.text);
}

// Takes parent/name away at once for every reader, then removes it, if it is ours.
static void discard(const char *parent, const char *name) {
  Reason reason;
  char *path = path_join(parent, name), *away = text_format("%s/" REMOVING "%s", parent, name);
  if (!remove_folder(path, LOOK, &reason) || !remove_folder(away, REMOVE, &reason))
    warn("%s", reason.text);
  else if (rename(path, away))
    warn("cannot remove %s: %s", path, strerror(errno));
  else
    remove_or_warn(away, REMOVE);
  free(path);
  free(away);
}

Folder folder_begin(const char *parent, const char *name, const char *state) {
  Folder f = {.ok = true,
              .parent = text_format("%s", parent),
              .name = text_format("%s", name),
              .hidden = text_format("%s/" SAVING "%s", parent, name)};
  if (state) remove_or_warn(f.hidden, REMOVE);
  if (mkdir(f.hidden, 0777)) {
    folder_give_up(&f, f.hidden);
    free(f.hidden); // it is another's
    f.hidden = NULL;
  }
  if (!state || !f.ok) return f;
  char *fresh = path_join(f.hidden, NEW_STATE), *mark = path_join(f.hidden, TRAINER_STATE);
  folder_add(&f, NEW_STATE, state, strlen(state));
  folder_end_file(&f);
  if (f.ok && (rename(fresh, mark) || !sync_folder(f.hidden))) folder_give_up(&f, mark);
  free(fresh);
  free(mark);
  return f;
}

// The folder takes the place of an old checkpoint, which is removed when it is there.
static void replace(Folder *f, const char *path) {
  Reason why;
  char *away = text_format("%s/" REMOVING "%s", f->parent, f->name);
  if (!is_step(f->name))
    f->ok = refuse(&f->reason, "cannot write %s: it exists; name another directory", path);
  else if (!remove_folder(path, LOOK, &why) || !remove_folder(away, REMOVE, &why))
    f->ok = refuse(&f->reason, "cannot write %s: %s", path, why.text);
  else if (!renameat2(AT_FDCWD, f->hidden, AT_FDCWD, path, RENAME_EXCHANGE)) // both at once
    rename(f->hidden, away);
  else if (rename(path, away)) // the file system cannot do that
    folder_give_up(f, path);
  else if (rename(f->hidden, path)) {
    folder_give_up(f, path);
    rename(away, path);
  }
  if (f->ok && !sync_folder(f->parent)) folder_give_up(f, path);
  if (f->ok) remove_or_warn(away, REMOVE);
  free(away);
}

bool folder_finish(Folder *f, Reason *reason) {
  folder_end_file(f);
  char *path = f->ok ? path_join(f->parent, f->name) : NULL;
  if (f->ok && !sync_folder(f->hidden)) folder_give_up(f, f->hidden);
  if (f->ok && path_exists(path))
    replace(f, path);
  else if (f->ok && (rename(f->hidden, path) || !sync_folder(f->parent)))
    folder_give_up(f, path);
  if (!f->ok && f->hidden) remove_or_warn(f->hidden, REMOVE_MADE);
  if (!f->ok) *reason = f->reason;
  bool ok = f->ok;
  free(path);
  free(f->parent);
  free(f->name);
  free(f->hidden);
  *f = (Folder){0};
  return ok;
}

void folder_require_new(const char *option, const char *parent, const char *name) {
  Reason reason;
  if (!path_make_folders(parent, &reason)) fail("--%s %s: %s", option, parent, reason.text);
  char *path = path_join(parent, name);
  if (path_exists(path)) fail("--%s %s: %s exists; name another directory", option, parent, path);
  free(path);
}

// --- the store ---------------------------------------------------------------------------------------------

static int newest_first(const void *a, const void *b) {
  int64_t x = step_of(*(char *const *)a), y = step_of(*(char *const *)b);
  return (x < y) - (x > y);
}

// The names of a directory's checkpoints; the caller frees each and the list.
static char **list_steps(const char *directory, int *count) {
  char **names = list(directory, is_step, count);
  if (*count) qsort(names, (size_t)*count, sizeof *names, newest_first);
  return names;
}

// Makes the directory and takes its lock, unless that is held: the directory may have been removed since.
static bool enter(CheckpointStore *store, Reason *reason) {
  struct stat now, held;
  if (store->lock >= 0 && !stat(store->directory, &now) && !fstat(store->lock, &held) &&
      now.st_ino == held.st_ino && now.st_dev == held.st_dev)
    return true;
  if (store->lock >= 0) close(store->lock);
  store->lock = -1;
  if (!path_make_folders(store->directory, reason)) return false;
  store->lock = open(store->directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (store->lock < 0) return refuse(reason, "cannot open it: %s", strerror(errno));
  // Some network file systems have no locks; there the run goes without.
  return !flock(store->lock, LOCK_EX | LOCK_NB) || errno != EWOULDBLOCK ||
         refuse(reason,
                "another run is writing its checkpoints there; wait for it or name another directory");
}

// Whether directory/name is a link as point_to makes it, to a checkpoint or by way of the latest.
static bool is_own_link(const char *directory, const char *name) {
  char target[PATH_MAX] = "", *path = path_join(directory, name), *wanted = path_join(LATEST, name);
  bool link = readlink(path, target, sizeof target - 1) >= 0;
  bool own = link && (is_latest(name) ? is_step(target) : !strcmp(target, wanted));
  free(path);
  free(wanted);
  return own;
}

// Anything else by such a name is another program's, and would be mixed with ours or lost.
static void refuse_foreign(const CheckpointStore *store, int64_t first_step, bool may_replace) {
  int count;
  char **names = list(store->directory, is_ours_in_store, &count);
  for (int i = 0; i < count; i++)
    if (!is_own_link(store->directory, names[i]))
      fail("--save %s: it holds a model that is no checkpoint (%s is not from this program); name another "
           "directory",
           store->directory, names[i]);
  list_free(names, count);
  names = list_steps(store->directory, &count);
  if (count && !may_replace && step_of(names[0]) > first_step)
    fail("--save %s: %s is there, which is ahead of this run; --resume auto continues from it, or name "
         "another directory",
         store->directory, names[0]);
  list_free(names, count);
}

// Removes what a killed run left, and shows that a folder can be made, long before the first is saved.
static void clean(const CheckpointStore *store) {
  int count;
  Reason reason;
  char **names = list(store->directory, is_left_over, &count);
  for (int i = 0; i < count; i++) {
    char *path = path_join(store->directory, names[i]);
    if (!remove_folder(path, REMOVE, &reason))
      fail("--save %s: %s; move it away", store->directory, reason.text);
    free(path);
  }
  list_free(names, count);
  char *trial = path_join(store->directory, SAVING STEP "0");
  if (mkdir(trial, 0777) || rmdir(trial))
    fail("--save %s: nothing can be written there: %s", store->directory, strerror(errno));
  free(trial);
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
  CheckpointStore store = {.shard_bytes = CHECKPOINT_SHARD_BYTES, .last_step = first_step, .lock = -1};
  Reason reason;
  store.directory = text_format("%s", directory);
  refuse_foreign(&store, first_step, may_replace);
  if (!enter(&store, &reason)) fail("--save %s: %s", directory, reason.text);
  clean(&store);
  take_along(&store, origin, tokenizer);
  return store;
}

void checkpoint_store_close(CheckpointStore *store) {
  if (!store->directory) return;
  if (store->lock >= 0) close(store->lock);
  for (int i = 0; i < store->companion_count; i++) free(store->companions[i].text);
  free(store->companions);
  free(store->config);
  free(store->directory);
  *store = (CheckpointStore){0};
}

// --- saving ------------------------------------------------------------------------------------------------

// Makes the link directory/name, or replaces our own.
static void make_link(const char *directory, const char *name, const char *target) {
  bool latest = is_latest(name);
  char *path = path_join(directory, name), *fresh = path_join(directory, latest ? NEW_LATEST : name);
  if (path_exists(path) && !is_own_link(directory, name))
    warn("%s is not from this program, which makes a link there: move it away", path);
  else if (latest ? (is_own_link(directory, NEW_LATEST) && unlink(fresh)) || symlink(target, fresh) ||
                        rename(fresh, path)
                  : symlink(target, path) && errno != EEXIST)
    warn("cannot make the link %s: %s", path, strerror(errno));
  free(path);
  free(fresh);
}

// `latest` always leads to whole files of one checkpoint. --resume does without it, as on file systems without links.
static void point_to(const char *directory, const char *name) {
  char *folder = path_join(directory, name);
  make_link(directory, LATEST, name);
  int count;
  char **files = list(folder, is_ours, &count);
  for (int i = 0; i < count; i++) {
    char *target = path_join(LATEST, files[i]);
    make_link(directory, files[i], target);
    free(target);
  }
  list_free(files, count);
  files = list(directory, is_ours, &count);
  for (int i = 0; i < count; i++) { // links to what only an earlier checkpoint has
    char *path = path_join(directory, files[i]);
    if (access(path, F_OK) && is_own_link(directory, files[i])) unlink(path);
    free(path);
  }
  list_free(files, count);
  sync_folder(directory);
  free(folder);
}

static void delete_older(const CheckpointStore *store, int64_t step) {
  int count;
  char **names = list_steps(store->directory, &count);
  int64_t kept = 1; // the one of `step`
  for (int i = 0; i < count; i++)
    if (step_of(names[i]) < step && kept++ >= store->keep) discard(store->directory, names[i]);
  list_free(names, count);
}

static Folder begin_step(CheckpointStore *store, int64_t step, const cJSON *trainer_state) {
  Folder folder = {0};
  if (!store->directory || !enter(store, &folder.reason)) return folder;
  char *state = json_print(trainer_state, true);
  folder = folder_begin(store->directory, step_name(step).text, state);
  free(state);
  return folder;
}

bool checkpoint_save(CheckpointStore *store, const Model *model, Backend *backend, int64_t step,
                     const cJSON *trainer_state, Reason *reason) {
  Folder folder = begin_step(store, step, trainer_state);
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
  folder_add(&folder, CONFIG, config, strlen(config));
  free(config);
  if (!folder_finish(&folder, reason)) {
    if (store->last_step < 0)
      return refuse(reason, "%s; there is no checkpoint of this run yet", reason->text);
    return refuse(reason, "%s; the last good checkpoint is that of step %lld", reason->text,
                  (long long)store->last_step);
  }
  store->last_step = step;
  point_to(store->directory, step_name(step).text);
  if (store->keep) delete_older(store, step); // only now: `latest` never leads to one that goes
  return true;
}

// --- reading -----------------------------------------------------------------------------------------------

// Of a file that was read or not, with the reason why not; "": there is none.
static bool is_there(bool there, const char *path, Reason *reason) {
  if (!there && !*reason->text) refuse(reason, "%s does not exist", path);
  return there;
}

static bool is_whole(const char *folder, Reason *reason) {
  char *state_path = path_join(folder, TRAINER_STATE), *config_path = path_join(folder, CONFIG);
  size_t length;
  cJSON *state = json_try_read(state_path, reason);
  bool whole = is_there(state != NULL, state_path, reason);
  if (whole && !json_is_whole(json_member(state, "step")))
    whole = refuse(reason, "%s has no step", state_path);
  char *text = whole ? file_try_read(config_path, &length, reason) : NULL;
  whole = whole && is_there(text != NULL, config_path, reason);
  ModelConfig config;
  if (whole && !hf_config_parse(text, length, &config, reason))
    whole = refuse(reason, "%s: %s", config_path, reason->text);
  static const char *const stems[] = {MODEL_STEM, STATE_STEM};
  for (int i = 0; i < 2 && whole; i++) {
    TensorSet set;
    whole = tensor_set_try_open(&set, folder, stems[i], reason);
    if (!whole) break;
    whole = is_there(set.count > 0, set.path, reason);
    tensor_set_close(&set);
  }
  free(text);
  free(state_path);
  free(config_path);
  cJSON_Delete(state);
  return whole;
}

char *checkpoint_newest(const char *directory, bool *any) {
  int count;
  char **names = list_steps(directory, &count), *newest = NULL;
  *any = count > 0;
  for (int i = 0; i < count && !newest; i++) {
    Reason reason;
    char *path = path_join(directory, names[i]);
    if (is_whole(path, &reason)) {
      newest = path;
    } else {
      warn("%s; %s is passed over", reason.text, names[i]);
      free(path);
    }
  }
  list_free(names, count);
  return newest;
}

void checkpoint_require_whole(const char *folder) {
  Reason reason;
  if (!is_whole(folder, &reason))
    fail("%s; name another checkpoint, or a directory of some, of which the newest whole one is taken",
         reason.text);
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
