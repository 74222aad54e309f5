// Checkpoints on disk: refusals, kills and full disks while saving, damage, and what is never removed.
#include "data/file.h"
#include "model/checkpoint/checkpoint.h"
#include "model/checkpoint/hf_config.h"
#include "model/checkpoint/weights.h"
#include "tests/runs.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define TINY                                                                                                 \
  "--model llama-tiny --vocab 20 --hidden-size 8 --intermediate-size 12 --num-layers 1 "                     \
  "--num-attention-heads 2 --num-key-value-heads 1 --seq-len 8 --batch 1 --steps 2 --data %s"

static Run *open_tiny(const char *more) {
  uint16_t tokens[40];
  for (int i = 0; i < 40; i++) tokens[i] = (uint16_t)(i * 7 % 20);
  write_shard16("tiny.bin", tokens, 40);
  return run_open(TINY " %s", temp_path("tiny.bin"), more);
}

static void shell(const char *format, ...) {
  char command[2048];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(command, sizeof command, format, arguments);
  va_end(arguments);
  assert_int_equal(system(command), 0);
}

// --- loading -----------------------------------------------------------------------------------------------

// A model's folder whose tensors a test has tampered with.
typedef struct {
  Run *run;
  TensorToStore list[16];
  int64_t count;
} Tampered;

static void add_tensor(Tampered *t, const char *name, Tensor tensor) {
  TensorToStore *s = &t->list[t->count++];
  *s = (TensorToStore){.tensor = tensor, .dtype = DTYPE_F32};
  snprintf(s->name, sizeof s->name, "%s", name);
}

static Tampered tamper(const char *more) {
  Tampered t = {.run = open_tiny(more)};
  const ParameterSet *p = &t.run->trainer.model.parameters;
  for (int64_t i = 0; i < p->count; i++) add_tensor(&t, p->items[i].name, p->items[i].value);
  return t;
}

// Stores what there is and loads it.
static void load_tampered(Tampered *t, size_t shard_bytes) {
  shell("rm -rf %s", temp_path("tampered"));
  Folder folder = folder_begin(temp_path("."), "tampered");
  tensor_set_write(&folder, "model", t->list, t->count, t->run->h->backend, shard_bytes);
  Reason reason;
  assert_true(folder_finish(&folder, &reason));
  weights_load(&t->run->trainer.model, t->run->h->backend, temp_path("tampered"), false);
}

TEST(what_is_missing_left_over_or_misshapen_is_named) {
  Tampered t = tamper("");
  load_tampered(&t, CHECKPOINT_SHARD_BYTES);
  t.count--;
  ASSERT_FAILS(load_tampered(&t, CHECKPOINT_SHARD_BYTES),
               "tampered/model.safetensors lacks model.norm.weight [8]");
  t.count--;
  ASSERT_FAILS(load_tampered(&t, CHECKPOINT_SHARD_BYTES), "lacks", "and others");
  t.count += 2;
  load_tampered(&t, CHECKPOINT_SHARD_BYTES);

  Tensor some = t.list[0].tensor; // [20, 8]
  add_tensor(&t, "model.layers.1.mlp.up_proj.weight", some);
  ASSERT_FAILS(load_tampered(&t, CHECKPOINT_SHARD_BYTES),
               "model.safetensors contains model.layers.1.mlp.up_proj.weight [20, 8]", "does not have");
  snprintf(t.list[t.count - 1].name, sizeof t.list[0].name, "norm.weight"); // model.norm.weight's other name
  t.list[t.count - 1].tensor = t.list[t.count - 2].tensor;
  ASSERT_FAILS(load_tampered(&t, CHECKPOINT_SHARD_BYTES), "holds", "norm.weight", "holds too");
  snprintf(t.list[t.count - 1].name, sizeof t.list[0].name, "model.layers.0.self_attn.rotary_emb.inv_freq");
  load_tampered(&t, CHECKPOINT_SHARD_BYTES); // which old files have, and which means nothing
  snprintf(t.list[t.count - 1].name, sizeof t.list[0].name, "evil\x1B[2J\xFF");
  ASSERT_FAILS(load_tampered(&t, CHECKPOINT_SHARD_BYTES), "contains evil\\x1B[2J\\xFF");
  t.count--;
  t.list[0].tensor = tensor_reshape_2d(some, 8, 20);
  ASSERT_FAILS(
      load_tampered(&t, CHECKPOINT_SHARD_BYTES),
      "model.safetensors: model.embed_tokens.weight has the shape [8, 20], and config.json makes it [20, 8]");
  run_close(t.run);
}

TEST(a_tied_head_must_be_the_embedding) {
  Tampered t = tamper("");
  add_tensor(&t, "lm_head.weight", t.list[0].tensor);
  load_tampered(&t, CHECKPOINT_SHARD_BYTES);
  TensorToStore *head = &t.list[t.count - 1], *embedding = &t.list[0];
  memmove(embedding->name, embedding->name + strlen("model."), strlen(embedding->name)); // as a base model's
  load_tampered(&t, CHECKPOINT_SHARD_BYTES);
  snprintf(embedding->name, sizeof embedding->name, "%s", t.run->trainer.model.parameters.items->name);
  head->dtype = head->tensor.dtype = DTYPE_I32; // the same bytes
  ASSERT_FAILS(load_tampered(&t, CHECKPOINT_SHARD_BYTES), "lm_head.weight differs from");
  head->dtype = DTYPE_F32;
  head->tensor = t.run->trainer.model.head.grad; // as large, and zero
  ASSERT_FAILS(load_tampered(&t, CHECKPOINT_SHARD_BYTES),
               "lm_head.weight differs from model.embed_tokens.weight", "tie_word_embeddings");
  // safetensors.torch.save_model keeps the head's name alone
  t.count--;
  float first, *weights = t.run->trainer.model.parameters.items->value.data;
  snprintf(t.list[0].name, sizeof t.list[0].name, "lm_head.weight");
  load_tampered(&t, CHECKPOINT_SHARD_BYTES);
  first = *weights, *weights = 7;
  weights_load(&t.run->trainer.model, t.run->h->backend, temp_path("tampered"), false);
  assert_true(*weights == first);
  t.list[0].tensor = tensor_reshape_2d(t.list[0].tensor, 8, 20);
  ASSERT_FAILS(load_tampered(&t, CHECKPOINT_SHARD_BYTES), "lm_head.weight has the shape [8, 20]");
  run_close(t.run);
  t = tamper("--untie-word-embeddings");
  load_tampered(&t, CHECKPOINT_SHARD_BYTES);
  t.count--;
  ASSERT_FAILS(load_tampered(&t, CHECKPOINT_SHARD_BYTES), "lacks lm_head.weight [20, 8]");
  run_close(t.run);
}

TEST(files_are_filled_to_their_last_byte) {
  Tampered t = tamper("");
  size_t total = 0;
  for (int64_t i = 0; i < t.count; i++) total += 4 * (size_t)tensor_count(t.list[i].tensor);
  for (int less = 0; less < 2; less++) {
    load_tampered(&t, total - (size_t)less);
    assert_int_equal(path_exists(temp_path("tampered/model.safetensors")), !less);
    assert_int_equal(path_exists(temp_path("tampered/model-00002-of-00002.safetensors")), less);
  }
  run_close(t.run);
}

TEST(shards_and_index_must_agree) {
  static const struct {
    const char *command, *why, *more;
  } cases[] = {
      {"sed -i s/00003-of/00001-of/ *.json", "model-00001-of-00003.safetensors lacks it", "says that"},
      {"rm model-00003*", "model-00003-of-00003.safetensors does not exist", "says that"},
      {"sed -i 's/model-00003-of/..\\/model-00003-of/' *.json", "names no file of its folder", ""},
      {"echo '{}' >model.safetensors.index.json", "index.json has no weight_map", ""},
      {"echo '[' >model.safetensors.index.json", "index.json cannot be read: it is no JSON object", ""},
      {"rm *; ln -s nowhere model.safetensors.index.json", "cannot open", "index.json"},
      {"rm *; ln -s model.safetensors model.safetensors", "cannot open", "model.safetensors"},
      {"rm *", "model.safetensors does not exist", "save_pretrained"},
      {"rm *; truncate -s 100 model.safetensors", "other/model.safetensors: its header", ""}};
  Tampered t = tamper("");
  load_tampered(&t, 1000);
  assert_true(path_exists(temp_path("tampered/model-00002-of-00003.safetensors")));
  for (volatile size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    shell("cd %s && rm -rf other && cp -r tampered other && cd other && %s", temp_path("."),
          cases[i].command);
    ASSERT_FAILS(weights_load(&t.run->trainer.model, t.run->h->backend, temp_path("other"), false),
                 cases[i].why, cases[i].more);
  }
  // A head that the index names and no file has: a tied one. The one file counts even with an index.
  shell("cd %s && rm -rf other && cp -r tampered other && cd other && "
        "sed -i 's/\"weight_map\":[^{]*{/&\"lm_head.weight\": \"model-00001-of-00003.safetensors\",/' *.json "
        "&& "
        "grep -q lm_head *.json",
        temp_path("."));
  weights_load(&t.run->trainer.model, t.run->h->backend, temp_path("other"), false);
  run_close(t.run);
  t = tamper("--untie-word-embeddings");
  ASSERT_FAILS(weights_load(&t.run->trainer.model, t.run->h->backend, temp_path("other"), false),
               "index.json lacks lm_head.weight [20, 8]");
  load_tampered(&t, CHECKPOINT_SHARD_BYTES);
  shell("echo '[' >%s", temp_path("tampered/model.safetensors.index.json"));
  weights_load(&t.run->trainer.model, t.run->h->backend, temp_path("tampered"), false);
  run_close(t.run);
}

TEST(options_that_contradict_the_model_are_refused) {
  const char *origin = "--init tests/golden/llama --data tests/golden/llama/tokens.bin --batch 1 --seq-len 8";
  static const char *const refused[][2] = {
      {"--vocab 62", "--vocab is 62, and tests/golden/llama/config.json says 61"},
      {"--hidden-size 25", "--hidden-size"},
      {"--num-layers 3", "--num-layers"},
      {"--num-key-value-heads 4", "--num-key-value-heads"},
      {"--head-dim 8", "--head-dim"},
      {"--tie-word-embeddings", "is set, and tests/golden/llama/config.json says otherwise"},
      {"--seq-len 65", "longer than the 64 positions"}};
  for (volatile size_t i = 0; i < sizeof refused / sizeof *refused; i++)
    ASSERT_FAILS(run_open("%s %s", origin, refused[i][0]), refused[i][1]);
  ASSERT_FAILS(run_open("--init tests/golden/mistral --data tests/golden/mistral/tokens.bin --seq-len 17"),
               "--seq-len 17 is longer than the sliding window of 16 tokens");
  run_close(run_open("%s --vocab 61 --num-layers 2 --untie-word-embeddings", origin));
}

// --- saving, step by step ----------------------------------------------------------------------------------

// The C library's calls that make a checkpoint, noted in order; the program may be killed before any of them.
static char events[65536];
static int event_count, kill_before = -1;
static bool read_only, no_exchange, no_entry, no_unlink; // what the file system cannot do
static int no_folder_sync;                               // its errno; 0: it can
static jmp_buf killed;

static const char *in_store(const char *path) {
  const char *at = strstr(path, "/store");
  return at ? at + strlen("/store") + (at[strlen("/store")] == '/') : path;
}

static void event(const char *call, const char *path, const char *to) {
  if (event_count++ == kill_before) longjmp(killed, 1);
  size_t length = strlen(events);
  snprintf(events + length, sizeof events - length, "%s %s%s%s\n", call, in_store(path), *to ? " " : "",
           in_store(to));
}

int fsync(int file) {
  char link[64], path[PATH_MAX] = "";
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  assert_true(readlink(link, path, sizeof path - 1) > 0);
  event("sync", path, "");
  struct stat status;
  if (no_folder_sync && !fstat(file, &status) && S_ISDIR(status.st_mode)) return errno = no_folder_sync, -1;
  return 0; // the order counts, and the disk is slow
}

int rename(const char *from, const char *to) {
  event("rename", from, to);
  if (no_entry && strstr(from, "/.saving-")) return errno = EIO, -1;
  return (int)syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
}

int renameat2(int a, const char *from, int b, const char *to, unsigned flags) {
  event("exchange", from, to);
  if (no_exchange) return errno = EINVAL, -1;
  return (int)syscall(SYS_renameat2, a, from, b, to, flags);
}

int symlink(const char *target, const char *path) {
  event("link", path, "");
  return (int)syscall(SYS_symlinkat, target, AT_FDCWD, path);
}

int unlink(const char *path) {
  event("unlink", path, "");
  return (int)syscall(SYS_unlinkat, AT_FDCWD, path, 0);
}

int unlinkat(int folder, const char *name, int flags) {
  event("unlink", name, "");
  if (no_unlink && !strcmp(name, "model.safetensors")) return errno = EIO, -1;
  return (int)syscall(SYS_unlinkat, folder, name, flags);
}

int mkdir(const char *path, mode_t mode) {
  if (read_only && strstr(path, "/.saving-")) return errno = EROFS, -1;
  if (strstr(path, "/.saving-")) event("mkdir", path, "");
  return (int)syscall(SYS_mkdirat, AT_FDCWD, path, mode);
}

static bool save_step(Run *run, CheckpointStore *store, int64_t step, Reason *reason) {
  cJSON *state = cJSON_CreateObject();
  cJSON_AddNumberToObject(state, "step", (double)step);
  bool saved = checkpoint_save(store, &run->trainer.model, run->h->backend, step, state, reason);
  cJSON_Delete(state);
  return saved;
}

static void save_steps(Run *run, CheckpointStore *store, const int64_t *steps, int count) {
  Reason reason;
  for (int i = 0; i < count; i++)
    if (!save_step(run, store, steps[i], &reason)) fail_msg("%s", reason.text);
}

static CheckpointStore open_store(const char *name, int64_t keep) {
  return checkpoint_store_open(temp_path(name), NULL, NULL, keep, -1, true);
}

#define NEW_STEP                                                                                             \
  "mkdir .saving-step-000002\nsync .saving-step-000002/model.safetensors\n"                                  \
  "sync .saving-step-000002/training_state.safetensors\n"                                                    \
  "sync .saving-step-000002/generation_config.json\nsync .saving-step-000002/config.json\n"                  \
  "sync .saving-step-000002/trainer_state.json\nsync .saving-step-000002\n"
#define LATEST                                                                                               \
  "link .latest\nrename .latest latest\nlink config.json\nlink generation_config.json\n"                     \
  "link model.safetensors\nlink trainer_state.json\nlink training_state.safetensors\nsync \n"
#define GONE                                                                                                 \
  "unlink config.json\nunlink generation_config.json\nunlink model.safetensors\n"                            \
  "unlink trainer_state.json\nunlink training_state.safetensors\n"

// All is on disk before it has its name, and `latest` moves before anything goes.
TEST(a_checkpoint_is_saved_in_this_order) {
  Run *run = open_tiny("");
  CheckpointStore store = open_store("order/store", 1);
  save_steps(run, &store, (const int64_t[]){1}, 1);
  events[0] = 0;
  save_steps(run, &store, (const int64_t[]){2}, 1);
  assert_string_equal(events, NEW_STEP "rename .saving-step-000002 step-000002\nsync \n" LATEST
                                       "rename step-000001 .removing-step-000001\n" GONE);
  events[0] = 0;
  save_steps(run, &store, (const int64_t[]){2}, 1); // which takes the old one's place
  assert_string_equal(events,
                      NEW_STEP "exchange .saving-step-000002 step-000002\n"
                               "rename .saving-step-000002 .removing-step-000002\nsync \n" GONE LATEST);
  events[0] = 0;
  no_exchange = true;
  save_steps(run, &store, (const int64_t[]){2}, 1);
  assert_string_equal(events, NEW_STEP "exchange .saving-step-000002 step-000002\n"
                                       "rename step-000002 .removing-step-000002\n"
                                       "rename .saving-step-000002 step-000002\nsync \n" GONE LATEST);
  Reason reason;
  no_entry = true;
  assert_false(save_step(run, &store, 2, &reason));
  no_exchange = no_entry = false;
  assert_non_null(strstr(reason.text, strerror(EIO)));
  checkpoint_require_whole(temp_path("order/store/step-000002"), true); // the old one is back
  no_folder_sync = ENOSPC;
  assert_false(save_step(run, &store, 2, &reason));
  no_folder_sync = EINVAL; // a network file system that has no such call
  assert_true(save_step(run, &store, 2, &reason));
  no_folder_sync = 0;
  checkpoint_store_close(&store);
  run_close(run);
}

// Killed before each of those calls: `latest` leads to a whole checkpoint, and the next run cleans up.
TEST(a_killed_save_leaves_a_whole_checkpoint) {
  Run *run = open_tiny("");
  for (volatile int replace = 0; replace < 2; replace++)
    for (volatile int at = 0, done = 0; !done; at++) {
      shell("rm -rf %s", temp_path("killed"));
      static CheckpointStore store;
      store = open_store("killed/store", 1);
      save_steps(run, &store, (const int64_t[]){1}, 1);
      event_count = 0;
      kill_before = at;
      expect_failures(true); // what a killed process had allocated is no leak
      if (!setjmp(killed)) {
        save_steps(run, &store, (const int64_t[]){2 - replace}, 1);
        done = 1;
      }
      expect_failures(false);
      kill_before = -1;
      assert_true(!done || at > 20);
      checkpoint_store_close(&store); // a process that ends gives its lock back
      checkpoint_require_whole(temp_path("killed/store/latest"), true);
      store = open_store("killed/store", 1);
      bool any;
      char *newest = checkpoint_newest(temp_path("killed/store"), true, &any);
      assert_non_null(newest);
      free(newest);
      shell("cd %s && ! ls -A | grep -e saving -e removing", temp_path("killed/store"));
      save_steps(run, &store, (const int64_t[]){3}, 1);
      shell("cd %s && test $(ls -d step-*) = step-000003 && test $(readlink latest) = step-000003",
            temp_path("killed/store"));
      checkpoint_store_close(&store);
    }
  run_close(run);
}

// Writes up to a limit, for every third byte of the way: the checkpoint of before stays, and nothing else.
TEST(a_full_disk_leaves_what_was_there) {
  static const char *const texts[] = {"first", "second, which is longer than the first"};
  make_directory("full");
  struct rlimit before, limit;
  getrlimit(RLIMIT_FSIZE, &before);
  signal(SIGXFSZ, SIG_IGN);
  int failures = 0;
  bool made = false;
  for (rlim_t most = 100; !made; most = most == 100 ? 0 : most + 3) {
    const char *text = texts[most != 100];
    limit = (struct rlimit){.rlim_cur = most, .rlim_max = before.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
    Reason reason;
    Folder folder = folder_begin(temp_path("full"), "step-000007");
    folder_add(&folder, "model.safetensors", 0666, text, strlen(text));
    folder_add(&folder, "trainer_state.json", 0666, "{\"step\": 7}", 11);
    bool finished = folder_finish(&folder, &reason);
    setrlimit(RLIMIT_FSIZE, &before);
    made = finished && most != 100;
    size_t length;
    char *found = file_read(temp_path("full/step-000007/model.safetensors"), &length, NULL);
    assert_string_equal(found, texts[made]);
    free(found);
    shell("cd %s && test $(ls -A) = step-000007", temp_path("full"));
    if (finished) continue;
    failures++;
    assert_non_null(strstr(reason.text, "cannot write"));
    assert_non_null(strstr(reason.text, strerror(EFBIG)));
  }
  assert_in_range(failures, 10, 66);
}

TEST(damage_is_noticed_and_passed_over) {
  static const struct {
    const char *command, *why;
  } cases[] = {
      {"truncate -s -1 training_state.safetensors", "cut short"},
      {"truncate -s 50 model.safetensors", "model.safetensors: its header would have"},
      {"printf x >model.safetensors", "model.safetensors"},
      {"printf '\\0\\0\\0\\0\\0\\1\\0\\0' | dd of=training_state.safetensors conv=notrunc status=none",
       "training_state.safetensors: its header would have 1099511627776 bytes"},
      {"rm model.safetensors", "model.safetensors does not exist"},
      {"rm training_state.safetensors", "training_state.safetensors does not exist"},
      {"rm trainer_state.json", "trainer_state.json does not exist"},
      {"rm trainer_state.json; mkdir trainer_state.json", "it is not a regular file"},
      {"echo '{' >trainer_state.json", "trainer_state.json cannot be read"},
      {"echo '{}' >trainer_state.json", "trainer_state.json has no step"},
      {"echo '{\"step\":2}' >trainer_state.json", "trainer_state.json is of step 2"},
      {"rm config.json", "config.json does not exist"},
      {"rm generation_config.json", "generation_config.json does not exist"}, // which has a checksum
#define CHECKSUMS(json) "sed -i -z 's/\"crc32\":[^}]*}/\"crc32\":" json "/' trainer_state.json"
      {CHECKSUMS("[1]"), "trainer_state.json: crc32 is no object of checksums"},
      {CHECKSUMS("5"), "crc32 is no object"},
      {CHECKSUMS("\"x\""), "crc32 is no object"},
      {CHECKSUMS("null"), "crc32 is no object"},
      {CHECKSUMS("{}"), "trainer_state.json has no checksum of config.json"},
      {"sed -i '/model.safetensors/d' trainer_state.json", "has no checksum of model.safetensors"},
      {"sed -i '/training_state.safetensors/d' trainer_state.json",
       "has no checksum of training_state.safetensors"},
      {"sed -i -z 's/,[^,]*\"trainer_state.json\":[^}]*//' trainer_state.json",
       "has no checksum of trainer_state.json"},
      {"sed -i 's/\\(model.safetensors\":\\).*,/\\1\"x\",/' trainer_state.json",
       "has no checksum of model.safetensors"},
      {"sed -i 's/\\(model.safetensors\":\\).*,/\\15.5,/' trainer_state.json",
       "has no checksum of model.safetensors"},
      {"sed -i 's/\\(model.safetensors\":\\).*,/\\14294967296,/' trainer_state.json",
       "has no checksum of model.safetensors"},
      {"echo '{}' >config.json", "config.json: model_type"},
      {"rm config.json; ln -s config.json config.json", "cannot open"},
      {"rm model.safetensors; ln -s nowhere model.safetensors.index.json", "cannot open"}};
  Run *run = open_tiny("");
  CheckpointStore store = open_store("store", 0);
  save_steps(run, &store, (const int64_t[]){5, 1000000}, 2);
  char at[512];
  snprintf(at, sizeof at, "%s", temp_path("damaged/step-1000000"));
  for (volatile size_t i = 0; i <= sizeof cases / sizeof *cases; i++) {
    bool last = i == sizeof cases / sizeof *cases, any; // what an earlier version left is no damage
    shell("cd %s/.. && rm -rf damaged && cp -r store damaged && cd damaged/step-1000000 && %s",
          temp_path("store"), last ? "echo x >checksums.json" : cases[i].command);
    if (!last) ASSERT_FAILS(checkpoint_require_whole(at, true), cases[i].why, "name another checkpoint");
    char *newest = checkpoint_newest(temp_path("damaged"), true, &any); // warns
    assert_string_equal(strrchr(newest, '/'), last ? "/step-1000000" : "/step-000005");
    free(newest);
  }
  checkpoint_store_close(&store);
  // Killed right after its last checkpoint was in its place; the run that resumes from a copy is another.
  shell("cd %s && ln -sfn step-000005 latest && cp -r step-1000000 ../copy", temp_path("damaged"));
  for (int own = 0; own < 2; own++) {
    snprintf(at, sizeof at, "%s", temp_path(own ? "damaged/step-1000000" : "copy"));
    store = checkpoint_store_open(temp_path("damaged"), at, NULL, 1, 1000000, true);
    checkpoint_store_close(&store);
    shell("cd %s && test $(readlink latest) = %s && test %s -e step-000005", temp_path("damaged"),
          own ? "step-1000000" : "step-000005", own ? "!" : "");
  }
  store = checkpoint_store_open(temp_path("damaged"), NULL, NULL, 1, 1000000, true);
  save_steps(run, &store, (const int64_t[]){1000001}, 1);
  shell("cd %s && test $(ls -d step-*) = step-1000001",
        temp_path("damaged")); // the list of before is ours, too
  checkpoint_store_close(&store);
  snprintf(at, sizeof at, "%s", temp_path("damaged/step-1000001"));
  weights_load(&run->trainer.model, run->h->backend, at, true);
  shell("sed -i s/v.model.norm.weight/x.model.norm.weight/ %s/training_state.safetensors", at);
  ASSERT_FAILS(weights_load(&run->trainer.model, run->h->backend, at, true),
               "training_state.safetensors lacks the moments of model.norm.weight", "--init");
  run_close(run);
}

// --- the directory of checkpoints --------------------------------------------------------------------------

TEST(the_newest_are_kept) {
  Run *run = open_tiny("");
  char directory[512];
  snprintf(directory, sizeof directory, "%s", temp_path("deep/down/here"));
  CheckpointStore store = open_store("deep/down/here", 2);
  store.shard_bytes = 1000;
  save_steps(run, &store, (const int64_t[]){5, 10, 999999}, 3);
  assert_true(path_exists(temp_path("deep/down/here/model.safetensors.index.json")));
  shell("cd %s && cp -r step-999999 ../parts && cd ../parts && rm trainer_state.json && "
        "f=$(echo model-00001-of-*) && "
        "printf x | dd of=$f conv=notrunc bs=1 seek=$(($(stat -c%%s $f) - 1)) 2>/dev/null",
        directory);
  assert_true(
      checkpoint_weights_checksum(temp_path("deep/down/parts")) !=
      checkpoint_weights_checksum(temp_path("deep/down/here/step-999999"))); // in the first file alone
  store.shard_bytes = CHECKPOINT_SHARD_BYTES;
  save_steps(run, &store, (const int64_t[]){1000000}, 1);
  shell("cd %s && test \"$(echo step-*)\" = 'step-1000000 step-999999' && test $(readlink latest) = "
        "step-1000000 && test ! -L model.safetensors.index.json && test -e model.safetensors",
        directory);
  ModelConfig config = hf_config_read(directory);
  assert_string_equal(config.name, "llama-tiny");
  shell("mkdir %s/step-2000000", directory); // of a later step: neither removed nor counted
  save_steps(run, &store, (const int64_t[]){1000001}, 1);
  shell("cd %s && test \"$(echo step-*)\" = 'step-1000000 step-1000001 step-2000000'", directory);
  shell("mv %s %s.away && mkdir %s", directory, directory, directory); // made anew, it is locked anew
  save_steps(run, &store, (const int64_t[]){1000002}, 1);
  ASSERT_FAILS(checkpoint_store_open(directory, NULL, NULL, 0, 2000000, true), "another run is writing");
  checkpoint_store_close(&store);
  ASSERT_FAILS(checkpoint_store_open(directory, NULL, NULL, 0, -1, false), "already contains step-1000002",
               "--resume auto");
  ASSERT_FAILS(checkpoint_store_open(directory, temp_path("elsewhere"), NULL, 0, 2000000, false),
               "already contains step-1000002, which is not of this run"); // and which --keep would remove
  run_close(run);
}

// A checkpoint that a failing disk, or NFS, does not let go is no checkpoint, and no later run fails by it.
TEST(what_cannot_be_removed_is_tried_again) {
  Run *run = open_tiny("");
  CheckpointStore store = open_store("stuck/store", 1);
  save_steps(run, &store, (const int64_t[]){1}, 1);
  no_unlink = true;
  save_steps(run, &store, (const int64_t[]){2}, 1); // warns, and the next start, too
  checkpoint_store_close(&store);
  store = open_store("stuck/store", 1);
  shell("cd %s && test $(ls -d step-*) = step-000002 && test -e .removing-step-000001/model.safetensors",
        temp_path("stuck/store"));
  checkpoint_store_close(&store);
  no_unlink = false;
  store = open_store("stuck/store", 1);
  shell("cd %s && test $(ls -A | grep step) = step-000002", temp_path("stuck/store"));
  checkpoint_store_close(&store);
  run_close(run);
}

// No link is followed, no foreign file is removed or overwritten.
TEST(foreign_files_are_never_removed) {
  static const struct {
    const char *command,
        *left; // in a store with step 1, before steps 2 and 3 are saved and 1 is too old; and after
  } cases[] = {
      {"mv step-000001 ../moved && ln -s ../moved step-000001",
       "-L step-000001 && test -e ../moved/config.json"},
      {"touch step-000001/notes", "-e step-000001/notes && test -e step-000001/model.safetensors"},
      {"mkdir step-000001/vocab.json", "-e step-000001/model.safetensors"},
      {"ln -sf ../../keep step-000001/merges.txt", "-L step-000001/merges.txt"},
      {"rm step-000001/trainer_state.json", "-e step-000001/model.safetensors"},
      {"echo '{\"step\": 7}' >step-000001/trainer_state.json", "-e step-000001/model.safetensors"},
      {"echo '{\"global_step\": 1}' >step-000001/trainer_state.json", "-e step-000001/model.safetensors"},
      {"mv step-000001 step-1x", "-e step-1x/model.safetensors"},
      {"mkdir -p .removing-step-000001/x",
       "-e step-000001/model.safetensors && test -e .removing-step-000001/x"},
      {"rm model.safetensors && echo mine >model.safetensors", "$(cat model.safetensors) = mine"},
      {"rm latest && echo mine >latest", "$(cat latest) = mine"},
      {"echo mine >.latest", "$(cat .latest) = mine"},
      {"touch adapter.safetensors", "-e adapter.safetensors"},
      {"cp -r ../store ../moved && rm -r ../store",
       "-e step-000003/model.safetensors && test -e latest/config.json"}};
  Run *run = open_tiny("");
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    shell("rm -rf %s", temp_path("foreign"));
    CheckpointStore store = open_store("foreign/store", 2);
    save_steps(run, &store, (const int64_t[]){1}, 1);
    shell("cd %s && %s", temp_path("foreign/store"), cases[i].command);
    save_steps(run, &store, (const int64_t[]){2, 3}, 2); // warns
    shell("cd %s && test -e step-000003/model.safetensors && test %s", temp_path("foreign/store"),
          cases[i].left);
    checkpoint_store_close(&store);
  }
  // A foreign file in a checkpoint's place, or hidden by our names, is in the way.
  CheckpointStore store = open_store("foreign/store", 2);
  Reason reason;
  shell("touch %s/step-000003/notes", temp_path("foreign/store"));
  assert_false(save_step(run, &store, 3, &reason));
  assert_non_null(
      strstr(reason.text, "step-000003 is left: it holds notes, which this program did not write"));
  shell("cd %s && test -e step-000003/model.safetensors && ! ls -A | grep saving",
        temp_path("foreign/store"));
  checkpoint_store_close(&store);
  ASSERT_FAILS(open_store("foreign/store", 2), "step-000003 is left: it holds notes", "move it away");
  shell("cd %s/step-000003 && rm notes trainer_state.json", temp_path("foreign/store"));
  ASSERT_FAILS(open_store("foreign/store", 2), "step-000003 is left: it has no trainer_state.json",
               "move it away");
  shell("cd %s && rm -r step-000003 && mkdir .saving-step-000009 .saving-mine && "
        "touch .saving-step-000009/notes",
        temp_path("foreign/store"));
  ASSERT_FAILS(open_store("foreign/store", 2), ".saving-step-000009 is left: it holds notes", "move it away");
  shell("test -e %s/.saving-step-000009/notes", temp_path("foreign/store"));
  make_directory("dumped");
  Folder folder = folder_begin(temp_path("."), "dumped");
  folder_add(&folder, "first_step.safetensors", 0666, "x", 1);
  assert_false(folder_finish(&folder, &reason));
  assert_non_null(strstr(reason.text, "dumped: it exists; name another directory"));
  assert_false(path_exists(temp_path(".saving-dumped")));
  ASSERT_FAILS(folder_require_new("dump", temp_path("."), "dumped"), "dumped exists; name another directory");
  run_close(run);
}

TEST(where_checkpoints_cannot_go_is_said_at_once) {
  static const char *const foreign[] = {"model.safetensors",
                                        "model-00001-of-00002.safetensors",
                                        "model.safetensors.index.json",
                                        "tokenizer.json",
                                        "config.json",
                                        "latest",
                                        ".latest"};
  for (volatile size_t i = 0; i < 2 * sizeof foreign / sizeof *foreign; i++) {
    shell("rm -rf %s; mkdir %s; cd %s && %s %s", temp_path("mixed"), temp_path("mixed"), temp_path("mixed"),
          i % 2 ? "ln -s ../elsewhere" : "touch", foreign[i / 2]);
    ASSERT_FAILS(checkpoint_store_open(temp_path("mixed"), NULL, NULL, 0, -1, false),
                 "it holds a model that is no checkpoint", foreign[i / 2]);
  }
  write_text("file", "");
  ASSERT_FAILS(open_store("file/store", 0), "cannot make");
  ASSERT_FAILS(checkpoint_store_open("", NULL, NULL, 0, -1, false), "the name of the folder is empty");
  read_only = true;
  ASSERT_FAILS(open_store("read-only", 0), "read-only: nothing can be written there", strerror(EROFS));
  read_only = false;
  bool any;
  assert_null(checkpoint_newest(temp_path("absent"), true, &any));
  assert_false(any);
}

// The model's other files travel along, even from a folder that is gone by then; a given tokenizer wins.
TEST(companions_travel_along) {
  static const char mine[] = "{\"a\": 0}", another[] = "{\"b\": 0}", ours[] = "{\"c\": 0}";
  static const struct {
    const char *store, *origin, *tokenizer;
    const char *text, *merges; // of tokenizer.json and merges.txt
  } cases[] = {
      {"by-file", "base", "given/mine.json", mine, NULL}, {"by-folder", "base", "given", another, NULL},
      {"no-model", NULL, "given/mine.json", mine, NULL},  {"no-settings", NULL, "bare", mine, NULL},
      {"resumed", "by-file", NULL, mine, NULL},           {"prepared", "base", "shards", another, NULL},
      {"no-ends", "base", "endless", another, NULL},      {"by-model", "base", NULL, ours, "the model's"}};
  static const char limit[] = "{\"model_max_length\": 8}", top_k[] = "{\"top_k\": 3}",
                    top_p[] = "{\"top_p\": 1}", nothing[] = "{\"_from_model_config\": true}\n";
  umask(022);
  shell("cp -r tests/golden/llama %s", temp_path("base"));
  WRITE_TEXTS({"base/tokenizer.json", ours}, {"base/merges.txt", "the model's"},
              {"base/tokenizer_config.json", limit}, {"base/special_tokens_map.json", "{}"},
              {"base/generation_config.json", top_k}, {"given/mine.json", mine},
              {"given/tokenizer.json", another}, {"given/tokenizer_config.json", limit},
              {"given/special_tokens_map.json", "{}"}, {"given/generation_config.json", top_p});
  shell("cd %s && chmod 600 given/mine.json && chmod 640 base/config.json && cd base && "
        "mv merges.txt secret && chmod 600 secret && ln -s secret merges.txt",
        temp_path("."));
  shell("cd %s && cp -r given shards && cp -r given bare && cd bare && rm generation_config.json && mv "
        "mine.json tokenizer.json",
        temp_path("."));
  WRITE_TEXTS({"shards/manifest.json", "{\"format\": \"lce.c shards\"}"});
  shell("cd %s && cp -r shards endless && rm endless/generation_config.json", temp_path("."));
  Run *run =
      run_open("--init %s --data %s/tokens.bin --batch 1 --seq-len 8", temp_path("base"), temp_path("base"));
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const char *origin = cases[i].origin ? temp_path(cases[i].origin) : NULL;
    const char *tokenizer = cases[i].tokenizer ? temp_path(cases[i].tokenizer) : NULL;
    CheckpointStore store = checkpoint_store_open(temp_path(cases[i].store), origin, tokenizer, 0, -1, false);
    if (!strcmp(cases[i].store, "by-model")) shell("rm -r %s", temp_path("base"));
    save_steps(run, &store, (const int64_t[]){1}, 1);
    checkpoint_store_close(&store);
    bool shards = !strcmp(cases[i].store, "prepared"); // which say what ends a text
    const char *const texts[][2] = {{"tokenizer.json", cases[i].text},
                                    {"merges.txt", cases[i].merges},
                                    {"tokenizer_config.json", limit},
                                    {"special_tokens_map.json", "{}"},
                                    {"generation_config.json", origin && !shards           ? top_k
                                                               : strstr(tokenizer, "bare") ? nothing
                                                                                           : top_p}};
    for (int k = 0; k < 5; k++) {
      size_t length;
      char *found = file_read(path_in(temp_path(cases[i].store), texts[k][0]).text, &length, NULL);
      if (texts[k][1] && !found) fail_msg("%s has no %s", cases[i].store, texts[k][0]);
      if (texts[k][1]) assert_string_equal(found, texts[k][1]);
      if (!texts[k][1]) assert_null(found);
      free(found);
    }
    shell("cd %s && grep -q '\"eos_token_id\":\t%s' config.json", temp_path(cases[i].store),
          origin ? "2" : "null");
  }
  // Others may not read files in a checkpoint that they may not read in the origin, even through a link.
  shell("cd %s && test $(stat -Lc%%a by-file/tokenizer.json by-model/merges.txt by-model/config.json "
        "by-model/trainer_state.json no-model/config.json | tr -d '\n') = 600600640644644",
        temp_path("."));
  WRITE_TEXTS({"given/generation_config.json", "{\"top_k\": 3"}, {"given/vocab.json", "[1]"});
  ASSERT_FAILS(checkpoint_store_open(temp_path("cut"), NULL, temp_path("given"), 0, -1, false),
               "given/generation_config.json cannot go into checkpoints: it is no JSON object (see byte 11)");
  shell("rm %s", temp_path("given/generation_config.json"));
  ASSERT_FAILS(checkpoint_store_open(temp_path("invalid"), NULL, temp_path("given"), 0, -1, false),
               "vocab.json cannot go into checkpoints", "repair or remove it");
  run_close(run);
}

TEST_MAIN(tests_run("checkpoint", make_temp_dir, remove_temp_dir))
