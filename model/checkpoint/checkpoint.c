#include "model/checkpoint/checkpoint.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kernels/base/alloc.h"
#include "kernels/base/text.h"
#include "model/checkpoint/hf_config.h"

// --- our names ---------------------------------------------------------------------------------------------

#define STEP "step-"
// Prefixes of a folder's name: while it is written or replaced, and while it is removed.
#define SAVING        ".saving-"
#define REMOVING      ".removing-"
#define TRAINER_STATE "trainer_state.json"
#define LATEST        "latest"
#define NEW_LATEST    ".latest" // until it is renamed
#define CHECKSUMS     "crc32"   // in TRAINER_STATE: {"FILE": its CRC-32}

#define DIGITS "[0-9][0-9][0-9][0-9][0-9]"

// The files of a checkpoint but tokenizer_files, as patterns.
static const char *const our_files[] = {
    TOKENIZER,
    CONFIG,
    GENERATION_CONFIG,
    TRAINER_STATE,
    "@(checksums|trainer_state).json?(.new)", // of earlier versions
    "@(" MODEL_STEM "|" STATE_STEM "|first_step)?(-" DIGITS "-of-" DIGITS ").safetensors?(.index.json)",
};
enum { OUR_FILES = sizeof our_files / sizeof *our_files };

static bool is_ours(const char *name) {
  bool ours = false;
  for (int i = 0; i < TOKENIZER_FILES; i++) ours |= !strcmp(tokenizer_files[i], name);
  for (int i = 0; i < OUR_FILES; i++) ours |= !fnmatch(our_files[i], name, FNM_EXTMATCH);
  return ours;
}

static bool is_latest(const char *name) {
  return !strcmp(name, LATEST) || !strcmp(name, NEW_LATEST);
}

static Text step_name(int64_t step) {
  return text_of(STEP "%06lld", (long long)step);
}

// The step in a folder's name, hidden or not; -1: it is not one of ours.
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

// True if a trainer_state.json, which may be absent, has the step of its folder's name.
static bool is_state_of(const cJSON *state, const char *name) {
  const cJSON *step = json_member(state, "step");
  return cJSON_IsNumber(step) && step->valuedouble == (double)step_of(name);
}

// --- folders -----------------------------------------------------------------------------------------------

typedef struct {
  struct dirent **entries;
  int count;
} Listing;

static int is_entry(const struct dirent *entry) {
  return is_plain_name(entry->d_name);
}

static int in_order(const struct dirent **a, const struct dirent **b) {
  int64_t x = step_of((*a)->d_name), y = step_of((*b)->d_name);
  return x == y ? strcmp((*a)->d_name, (*b)->d_name) : (x < y) - (x > y);
}

// A folder's entries: the newest step first, others last and in byte order; none if it is unreadable.
static Listing list(int at, const char *path) {
  Listing l = {0};
  int count = scandirat(at, path, &l.entries, is_entry, in_order);
  if (count > 0) l.count = count;
  return l;
}

static void list_free(Listing l) {
  for (int i = 0; i < l.count; i++) free(l.entries[i]);
  free(l.entries);
}

// False with errno.
static bool sync_folder(const char *path) {
  int descriptor = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return false;
  // EINVAL: a network file system that cannot sync a folder.
  bool synced = fsync(descriptor) == 0 || errno == EINVAL;
  int error = errno;
  close(descriptor);
  errno = error;
  return synced;
}

// True if a folder holds a trainer_state.json with the step of its name.
static bool is_marked(const char *path) {
  Reason reason;
  cJSON *state = json_read(path_in(path, TRAINER_STATE).text, &reason);
  bool marked = is_state_of(state, strrchr(path, '/') + 1);
  cJSON_Delete(state);
  return marked;
}

// Removes a hidden folder, if it exists; any other it only checks. False with a reason: it is another's, or
// something in it cannot be removed.
static bool remove_folder(const char *path, Reason *reason) {
  bool hidden = strrchr(path, '/')[1] == '.';
  int folder = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (folder < 0 && errno == ENOENT) return true;
  if (folder < 0) return refuse(reason, "%s is left: it is a link, no folder, or cannot be opened", path);
  Listing l = list(folder, ".");
  bool ok = true;
  for (int i = 0; i < l.count && ok; i++) {
    const char *name = l.entries[i]->d_name;
    struct stat status;
    if (!is_ours(name) || fstatat(folder, name, &status, AT_SYMLINK_NOFOLLOW) || !S_ISREG(status.st_mode))
      ok = refuse(reason, "%s is left: it holds %s, which this program did not write", path, name);
  }
  if (ok && !hidden && !is_marked(path))
    ok = refuse(reason, "%s is left: it has no " TRAINER_STATE " of that step", path);
  for (int i = 0; i < l.count && ok && hidden; i++)
    if (unlinkat(folder, l.entries[i]->d_name, 0))
      ok = refuse(reason, "cannot remove %s/%s: %s", path, l.entries[i]->d_name, strerror(errno));
  if (ok && hidden && rmdir(path)) ok = refuse(reason, "cannot remove %s: %s", path, strerror(errno));
  list_free(l);
  close(folder);
  return ok;
}

static void remove_or_warn(const char *path) {
  Reason reason;
  if (!remove_folder(path, &reason)) warn("%s", reason.text);
}

static Path hidden_path(const char *parent, const char *prefix, const char *name) {
  char hidden[sizeof REMOVING + NAME_MAX];
  snprintf(hidden, sizeof hidden, "%s%s", prefix, name);
  return path_in(parent, hidden);
}

// Removes the checkpoint parent/name; the folder `fresh` (or NULL) takes its place at once for every reader.
static bool retire(const char *parent, const char *name, const char *fresh, Reason *reason) {
  Path path = path_in(parent, name), away = hidden_path(parent, REMOVING, name);
  if (!remove_folder(path.text, reason) || !remove_folder(away.text, reason)) return false;
  if (fresh && !renameat2(AT_FDCWD, fresh, AT_FDCWD, path.text, RENAME_EXCHANGE)) { // both at once
    rename(fresh, away.text);
  } else if (rename(path.text, away.text)) {
    return refuse(reason, "cannot move %s: %s", path.text, strerror(errno));
  } else if (fresh && rename(fresh, path.text)) { // on a file system that cannot exchange
    refuse(reason, "cannot move %s: %s", fresh, strerror(errno));
    rename(away.text, path.text);
    return false;
  }
  if (fresh && !sync_folder(parent)) return refuse(reason, "cannot sync %s: %s", parent, strerror(errno));
  remove_or_warn(away.text);
  return true;
}

Folder folder_begin(const char *parent, const char *name) {
  Folder f = {.ok = true, .hidden = hidden_path(parent, SAVING, name)};
  snprintf(f.parent.text, sizeof f.parent.text, "%s", parent);
  snprintf(f.name, sizeof f.name, "%s", name);
  remove_or_warn(f.hidden.text); // left by a killed run
  if (mkdir(f.hidden.text, 0777)) {
    folder_give_up(&f, f.hidden.text);
    f.hidden.text[0] = 0; // it is another's
  }
  if (f.ok) f.checksums = cJSON_CreateObject();
  return f;
}

bool folder_finish(Folder *f, Reason *reason) {
  folder_end_file(f);
  Path path = path_in(f->parent.text, f->name);
  Reason why = {"it exists; name another directory"};
  if (f->ok && !sync_folder(f->hidden.text)) folder_give_up(f, f->hidden.text);
  if (f->ok && path_exists(path.text))
    f->ok = (is_step(f->name) && retire(f->parent.text, f->name, f->hidden.text, &why)) ||
            refuse(&f->reason, "cannot write %s: %s", path.text, why.text);
  else if (f->ok && (rename(f->hidden.text, path.text) || !sync_folder(f->parent.text)))
    folder_give_up(f, path.text);
  if (!f->ok && *f->hidden.text) remove_or_warn(f->hidden.text);
  cJSON_Delete(f->checksums);
  f->checksums = NULL;
  if (!f->ok) *reason = f->reason;
  return f->ok;
}

void folder_require_new(const char *option, const char *parent, const char *name) {
  Reason reason;
  if (!path_make_folders(parent, &reason)) fail("--%s %s: %s", option, parent, reason.text);
  Path path = path_in(parent, name);
  if (path_exists(path.text)) fail("--%s %s: %s exists; name another directory", option, parent, path.text);
}

// --- the store ---------------------------------------------------------------------------------------------

// Makes the directory and takes its lock, unless it is held and the directory has not been removed since.
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
  // Some network file systems have no locks.
  return !flock(store->lock, LOCK_EX | LOCK_NB) || errno != EWOULDBLOCK ||
         refuse(reason,
                "another run is writing its checkpoints there; wait for it or name another directory");
}

// True if directory/name is a link as point_to makes it.
static bool is_own_link(const char *directory, const char *name) {
  char target[PATH_MAX] = "";
  return readlink(path_in(directory, name).text, target, sizeof target - 1) >= 0 &&
         (is_latest(name) ? is_step(target) : !strcmp(target, path_in(LATEST, name).text));
}

static bool is_whole(const char *folder, bool contents, Reason *reason);

// Fails on another program's files by our names, which would be mixed with ours or lost, and on another run's
// checkpoints: `own` says that those up to first_step are this run's.
static void refuse_foreign(const char *directory, int64_t first_step, bool own, bool may_replace) {
  Reason reason;
  Listing l = list(AT_FDCWD, directory);
  for (int i = 0; i < l.count; i++) {
    const char *name = l.entries[i]->d_name;
    bool ahead = is_step(name) && step_of(name) > first_step;
    Path path = path_in(directory, name);
    if (ahead && may_replace && !remove_folder(path.text, &reason))
      fail("--save %s: %s; move it away", directory, reason.text);
    if (ahead && !may_replace && !is_whole(path.text, false, &reason))
      fail("--save %s: %s; move %s away, or name another directory", directory, reason.text, name);
    if (ahead && !may_replace)
      fail("--save %s already contains %s, which is further along than this run; --resume auto continues "
           "from it, or name another directory",
           directory, name);
    if (is_step(name) && !may_replace && !own)
      fail("--save %s already contains %s, which is not of this run; name another directory, or move it "
           "away",
           directory, name);
    if ((is_ours(name) || is_latest(name)) && !is_own_link(directory, name))
      fail("--save %s: it holds a model that is no checkpoint (%s is not from this program); name another "
           "directory",
           directory, name);
  }
  list_free(l);
}

// Removes what a killed run left, and tries to make a folder, long before the first is saved.
static void clean(const char *directory) {
  Reason reason;
  Listing l = list(AT_FDCWD, directory);
  for (int i = 0; i < l.count; i++) {
    const char *name = l.entries[i]->d_name;
    if (!is_left_over(name) || remove_folder(path_in(directory, name).text, &reason)) continue;
    if (!strncmp(name, SAVING, strlen(SAVING))) // in the way of that step's checkpoint
      fail("--save %s: %s; move it away", directory, reason.text);
    warn("--save %s: %s", directory, reason.text);
  }
  list_free(l);
  Path trial = path_in(directory, SAVING STEP "0");
  if (mkdir(trial.text, 0777) || rmdir(trial.text))
    fail("--save %s: nothing can be written there: %s", directory, strerror(errno));
}

// --- saving ------------------------------------------------------------------------------------------------

// Makes the link directory/name, or replaces our own.
static void make_link(const char *directory, const char *name, const char *target) {
  bool latest = is_latest(name);
  Path path = path_in(directory, name), fresh = path_in(directory, latest ? NEW_LATEST : name);
  if (path_exists(path.text) && !is_own_link(directory, name))
    warn("%s is not from this program, which makes a link there: move it away", path.text);
  else if (latest ? (is_own_link(directory, NEW_LATEST) && unlink(fresh.text)) ||
                        symlink(target, fresh.text) || rename(fresh.text, path.text)
                  : symlink(target, path.text) && errno != EEXIST)
    warn("cannot make the link %s: %s", path.text, strerror(errno));
}

// `latest` always leads to whole files of one checkpoint.
static void point_to(const char *directory, const char *name) {
  make_link(directory, LATEST, name);
  Listing files = list(AT_FDCWD, path_in(directory, name).text), links = list(AT_FDCWD, directory);
  for (int i = 0; i < files.count; i++) {
    const char *file = files.entries[i]->d_name;
    if (is_ours(file)) make_link(directory, file, path_in(LATEST, file).text);
  }
  for (int i = 0; i < links.count; i++) { // to files that only an earlier checkpoint has
    const char *link = links.entries[i]->d_name;
    Path path = path_in(directory, link);
    if (is_ours(link) && access(path.text, F_OK) && is_own_link(directory, link)) unlink(path.text);
  }
  list_free(files);
  list_free(links);
  sync_folder(directory);
}

static void delete_older(const CheckpointStore *store, int64_t step) {
  Listing l = list(AT_FDCWD, store->directory);
  int64_t kept = 1; // the one of `step`
  for (int i = 0; i < l.count; i++) {
    const char *name = l.entries[i]->d_name;
    Reason reason;
    if (is_step(name) && step_of(name) < step && kept++ >= store->keep &&
        !retire(store->directory, name, NULL, &reason))
      warn("%s", reason.text);
  }
  list_free(l);
}

// Points to a checkpoint that is in its place, then deletes older ones.
static void finish_step(const CheckpointStore *store) {
  point_to(store->directory, step_name(store->last_step).text);
  if (store->keep) delete_older(store, store->last_step); // only now: `latest` never leads to one that goes
}

CheckpointStore checkpoint_store_open(const char *directory, const char *origin, const char *tokenizer,
                                      int64_t keep, int64_t first_step, bool may_replace) {
  CheckpointStore store = {
      .keep = keep, .shard_bytes = CHECKPOINT_SHARD_BYTES, .last_step = first_step, .lock = -1};
  Reason reason;
  store.directory = text_format("%s", directory);
  bool own =
      origin && first_step >= 0 && path_is_same(origin, path_in(directory, step_name(first_step).text).text);
  refuse_foreign(directory, first_step, own, may_replace);
  if (!enter(&store, &reason)) fail("--save %s: %s", directory, reason.text);
  clean(directory);
  store.companions = companions_read(origin, tokenizer);
  if (own)
    finish_step(&store); // the run that saved it may have been killed before
  else
    store.last_step = -1;
  return store;
}

// Writes trainer_state.json with the checksums of all files before it, and of itself without them.
static void add_state(Folder *f, cJSON *state) {
  char *text = json_print(state, true);
  folder_end_file(f);
  cJSON_AddNumberToObject(f->checksums, TRAINER_STATE, checksum(0, text, strlen(text)));
  cJSON_AddItemReferenceToObject(state, CHECKSUMS, f->checksums);
  free(text);
  text = json_print(state, true);
  folder_add(f, TRAINER_STATE, 0666, text, strlen(text));
  free(text);
  cJSON_DeleteItemFromObjectCaseSensitive(state, CHECKSUMS);
}

bool checkpoint_save(CheckpointStore *store, const Model *model, Backend *backend, int64_t step,
                     cJSON *trainer_state, Reason *reason) {
  Folder folder = {0};
  Text name = step_name(step);
  if (store->directory && enter(store, &folder.reason)) folder = folder_begin(store->directory, name.text);
  size_t shard_bytes = store->directory ? store->shard_bytes : CHECKPOINT_SHARD_BYTES;
  weights_store(model, backend, &folder, store->dtype, shard_bytes);
  if (!store->directory) return true;
  companions_write(&store->companions, &folder, &model->config, store->dtype);
  if (folder.checksums) add_state(&folder, trainer_state);
  if (!folder_finish(&folder, reason)) {
    if (store->last_step < 0)
      return refuse(reason, "%s; there is no checkpoint of this run yet", reason->text);
    return refuse(reason, "%s; the last good checkpoint is that of step %lld", reason->text,
                  (long long)store->last_step);
  }
  store->last_step = step;
  finish_step(store);
  return true;
}

void checkpoint_store_close(CheckpointStore *store) {
  if (!store->directory) return;
  if (store->lock >= 0) close(store->lock);
  companions_free(&store->companions);
  free(store->directory);
  *store = (CheckpointStore){0};
}

// --- reading -----------------------------------------------------------------------------------------------

#define WEIGHTS MODEL_STEM "*.safetensors*"

static bool is_checksum(const cJSON *item) {
  return json_is_whole(item) && item->valuedouble <= UINT32_MAX;
}

// False with a reason if a file that a model is read from, and that `pattern` matches, has no checksum.
static bool all_have_checksums(const char *folder, const char *pattern, const cJSON *checksums,
                               Reason *reason) {
  static const char *const read[] = {CONFIG, TRAINER_STATE, WEIGHTS, STATE_STEM "*.safetensors*"};
  if (!cJSON_IsObject(checksums))
    return refuse(reason, "%s/" TRAINER_STATE ": " CHECKSUMS " is no object of checksums", folder);
  Listing l = list(AT_FDCWD, folder);
  bool all = true;
  for (int i = 0; i < 4 * l.count && all; i++) {
    const char *name = l.entries[i / 4]->d_name;
    if (!fnmatch(read[i % 4], name, 0) && !fnmatch(pattern, name, 0) &&
        !is_checksum(json_member(checksums, name)))
      all = refuse(reason, "%s/" TRAINER_STATE " has no checksum of %s", folder, name);
  }
  list_free(l);
  return all;
}

// Compares the files that match a pattern with the checksums in trainer_state.json, which older checkpoints
// lack. False if a file has changed or, without a reason, is absent; `path` is then its path.
static bool is_unchanged(const char *folder, cJSON *state, const char *pattern, Path *path, Reason *reason) {
  cJSON *item, *checksums = cJSON_DetachItemFromObjectCaseSensitive(state, CHECKSUMS);
  bool same = !checksums || all_have_checksums(folder, pattern, checksums, reason);
  cJSON_ArrayForEach(item, checksums) {
    if (!same) break;
    if (fnmatch(pattern, item->string, 0)) continue;
    *path = path_in(folder, item->string);
    Mapping file = {.copied = true};
    if (!strcmp(item->string, TRAINER_STATE))
      file.bytes = json_print(state, true), file.size = strlen(file.bytes);
    else
      file = file_map_or_copy(path->text, 0, reason);
    same = file.bytes && (checksum(0, file.bytes, file.size) == item->valuedouble ||
                          refuse(reason, "%s is not as it was written: its CRC-32 has changed", path->text));
    file_unmap(&file);
  }
  cJSON_Delete(checksums);
  return same;
}

void checkpoint_require_weights(const char *folder) {
  Path path = path_in(folder, TRAINER_STATE);
  Reason reason;
  cJSON *state = json_read(path.text, &reason);
  if (!state && *reason.text) warn("%s; the weights beside it are not checked", reason.text);
  if (state && !is_unchanged(folder, state, WEIGHTS, &path, &reason))
    fail("%s%s; copy the folder again or, where its weights were changed on purpose, remove "
         "its " TRAINER_STATE,
         *reason.text ? reason.text : path.text, *reason.text ? "" : " does not exist");
  cJSON_Delete(state);
}

uint32_t checkpoint_weights_checksum(const char *folder) {
  Reason reason;
  cJSON *state = json_read(path_in(folder, TRAINER_STATE).text, &reason);
  TensorSet set = tensor_set_open(folder, MODEL_STEM);
  uint32_t all = 0;
  for (const TensorFile *file = set.files; file < set.files + set.count; file++) {
    const cJSON *known = json_member(json_member(state, CHECKSUMS), strrchr(file->path, '/') + 1);
    uint32_t one = is_checksum(known) ? (uint32_t)known->valuedouble
                                      : checksum(0, file->mapping.bytes, file->mapping.size);
    all = checksum(all, &one, sizeof one);
  }
  tensor_set_close(&set);
  cJSON_Delete(state);
  return all;
}

// `contents`: compares the checksums, too.
static bool is_whole(const char *folder, bool contents, Reason *reason) {
  static const char *const stems[] = {MODEL_STEM, STATE_STEM};
  ModelConfig config;
  TensorSet set;
  Path path = path_in(folder, TRAINER_STATE);
  cJSON *state = json_read(path.text, reason);
  const cJSON *step = json_member(state, "step");
  const char *slash = strrchr(folder, '/'), *name = slash ? slash + 1 : folder;
  bool whole = state && (json_is_whole(step) || refuse(reason, "%s has no step", path.text));
  if (whole && is_step(name) && !is_state_of(state, name))
    whole = refuse(reason, "%s is of step %.15g", path.text, step->valuedouble);
  if (whole) {
    path = path_in(folder, CONFIG);
    whole = hf_config_try_read(folder, &config, reason);
  }
  for (int i = 0; i < 2 && whole; i++) {
    whole = tensor_set_try_open(&set, folder, stems[i], reason) && set.count;
    path = set.path;
    tensor_set_close(&set);
  }
  whole = whole && (!contents || is_unchanged(folder, state, "*", &path, reason));
  cJSON_Delete(state);
  return whole || (*reason->text ? false : refuse(reason, "%s does not exist", path.text));
}

char *checkpoint_newest(const char *directory, bool contents, bool *any) {
  Listing l = list(AT_FDCWD, directory);
  char *newest = NULL;
  *any = false;
  for (int i = 0; i < l.count && !newest; i++) {
    const char *name = l.entries[i]->d_name;
    Path path = path_in(directory, name);
    Reason reason;
    if (!is_step(name)) continue;
    *any = true;
    if (is_whole(path.text, contents, &reason))
      newest = text_format("%s", path.text);
    else
      warn("%s; %s is passed over", reason.text, name);
  }
  list_free(l);
  return newest;
}

void checkpoint_require_whole(const char *folder, bool contents) {
  Reason reason;
  if (!is_whole(folder, contents, &reason))
    fail("%s; name another checkpoint, or a directory of some, of which the newest whole one is taken",
         reason.text);
}

cJSON *checkpoint_trainer_state(const char *folder) {
  Path path = path_in(folder, TRAINER_STATE);
  cJSON *state = json_read(path.text, NULL);
  if (!state)
    fail("%s does not exist: %s is no checkpoint of this program; --init starts from a model", path.text,
         folder);
  return state;
}
