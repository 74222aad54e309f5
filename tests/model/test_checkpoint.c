// Checkpoints on disk: what is refused when weights are loaded, folders that appear whole or not at all,
// damage that is noticed, and the directory that holds them. tests/trainer/test_resume.py has whole runs.
#include "base/file.h"
#include "model/checkpoint/checkpoint.h"
#include "model/checkpoint/hf_config.h"
#include "model/checkpoint/weights.h"
#include "tests/runs.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#define TINY                                                                                                 \
  "--model llama-tiny --vocab 20 --hidden-size 8 --intermediate-size 12 --num-layers 1 "                     \
  "--num-attention-heads 2 "                                                                                 \
  "--num-key-value-heads 1 --seq-len 8 --batch 1 --steps 2 --data %s"

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

static Tampered tamper(const char *more) {
  Tampered t = {.run = open_tiny(more)};
  const Parameters *p = &trainer_model(&t.run->trainer)->parameters;
  for (int64_t i = 0; i < p->count; i++) {
    TensorToStore *s = &t.list[t.count++];
    snprintf(s->name, sizeof s->name, "%s", p->items[i].name);
    s->tensor = p->items[i].value;
    s->dtype = DTYPE_F32;
  }
  return t;
}

static void add_tensor(Tampered *t, const char *name, Tensor tensor) {
  TensorToStore *s = &t->list[t->count++];
  snprintf(s->name, sizeof s->name, "%s", name);
  s->tensor = tensor;
  s->dtype = DTYPE_F32;
}

// Stores what there is and loads it.
static void load_tampered(Tampered *t, size_t shard_bytes) {
  Folder folder = folder_begin(temp_path("."), "tampered");
  tensor_set_write(&folder, "model", t->list, t->count, t->run->h->backend, shard_bytes);
  Reason reason;
  assert_true(folder_finish(&folder, &reason));
  weights_load(trainer_model(&t->run->trainer), t->run->h->backend, temp_path("tampered"));
}

static void what_is_missing_left_over_or_misshapen_is_named(void **state) {
  (void)state;
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
               "model.safetensors holds model.layers.1.mlp.up_proj.weight [20, 8]", "no place");
  snprintf(t.list[t.count - 1].name, sizeof t.list[0].name, "norm.weight"); // model.norm.weight's other name
  t.list[t.count - 1].tensor = t.list[t.count - 2].tensor;
  ASSERT_FAILS(load_tampered(&t, CHECKPOINT_SHARD_BYTES), "holds", "norm.weight", "holds too");
  snprintf(t.list[t.count - 1].name, sizeof t.list[0].name, "model.layers.0.self_attn.rotary_emb.inv_freq");
  load_tampered(&t, CHECKPOINT_SHARD_BYTES); // which old files have, and which means nothing
  snprintf(t.list[t.count - 1].name, sizeof t.list[0].name, "evil\x1B[2J\xFF");
  ASSERT_FAILS(load_tampered(&t, CHECKPOINT_SHARD_BYTES), "holds evil\\x1B[2J\\xFF");
  t.count--;
  t.list[0].tensor = tensor_reshape_2d(some, 8, 20);
  ASSERT_FAILS(
      load_tampered(&t, CHECKPOINT_SHARD_BYTES),
      "model.safetensors: model.embed_tokens.weight has the shape [8, 20], and config.json makes it [20, 8]");
  run_close(t.run);
}

static void a_tied_head_must_be_the_embedding(void **state) {
  (void)state;
  Tampered t = tamper("");
  add_tensor(&t, "lm_head.weight", t.list[0].tensor);
  load_tampered(&t, CHECKPOINT_SHARD_BYTES);
  t.list[t.count - 1].tensor = trainer_model(&t.run->trainer)->head.grad; // as large, and zero
  ASSERT_FAILS(load_tampered(&t, CHECKPOINT_SHARD_BYTES),
               "lm_head.weight differs from model.embed_tokens.weight", "tie_word_embeddings");
  run_close(t.run);
  t = tamper("--untie-word-embeddings");
  load_tampered(&t, CHECKPOINT_SHARD_BYTES);
  t.count--;
  ASSERT_FAILS(load_tampered(&t, CHECKPOINT_SHARD_BYTES), "lacks lm_head.weight [20, 8]");
  run_close(t.run);
}

static void shards_and_index_must_agree(void **state) {
  (void)state;
  Tampered t = tamper("");
  load_tampered(&t, 1000);
  const char *index = temp_path("tampered/model.safetensors.index.json");
  assert_true(path_exists(temp_path("tampered/model-00002-of-00003.safetensors")));
  Model *model = trainer_model(&t.run->trainer);
  Backend *backend = t.run->h->backend;
  char folder[512];
  snprintf(folder, sizeof folder, "%s", temp_path("tampered"));
  shell("cd %s && cp -r tampered aside && sed -i 's/00003-of/00001-of/' tampered/*.json", temp_path("."));
  ASSERT_FAILS(weights_load(model, backend, folder), "model-00001-of-00003.safetensors lacks",
               "says is in it");
  shell("cd %s && cp aside/*.json tampered && rm tampered/model-00003*", temp_path("."));
  ASSERT_FAILS(weights_load(model, backend, folder), "model-00003-of-00003.safetensors does not exist",
               "says that");
  shell("cd %s && sed -i 's/model-00003-of/..\\/model-00003-of/' tampered/*.json", temp_path("."));
  ASSERT_FAILS(weights_load(model, backend, folder), "names no file of its folder");
  shell("echo '{}' >%s", index);
  ASSERT_FAILS(weights_load(model, backend, folder), "index.json has no weight_map");
  shell("echo '[' >%s", index);
  ASSERT_FAILS(weights_load(model, backend, folder), "index.json cannot be read: it is no JSON object");
  shell("rm -r %s/*", folder);
  ASSERT_FAILS(weights_load(model, backend, folder), "model.safetensors does not exist", "save_pretrained");
  shell("truncate -s 100 %s/model.safetensors", folder);
  ASSERT_FAILS(weights_load(model, backend, folder), "tampered/model.safetensors: its header");
  run_close(t.run);
}

static void options_that_contradict_the_model_are_refused(void **state) {
  (void)state;
  const char *origin = "--init tests/golden/llama --data tests/golden/llama/tokens.bin --batch 1 --seq-len 8";
  static const char *const refused[][2] = {
      {"--vocab 62", "--vocab is 62, and tests/golden/llama/config.json says 61"},
      {"--hidden-size 25", "--hidden-size"},
      {"--num-layers 3", "--num-layers"},
      {"--num-key-value-heads 4", "--num-key-value-heads"},
      {"--head-dim 8", "--head-dim"},
      {"--tie-word-embeddings", "--tie-word-embeddings"},
      {"--rope-theta 7", "--rope-theta"},
      {"--model llama-tiny", "--model and --init"},
      {"--seq-len 65", "longer than the 64 positions"},
      {"--save-every 3", "add --save DIR"},
      {"--resume auto", "--save DIR"}};
  for (volatile size_t i = 0; i < sizeof refused / sizeof *refused; i++)
    ASSERT_FAILS(run_open("%s %s", origin, refused[i][0]), refused[i][1]);
  ASSERT_FAILS(run_open("--init tests/golden/mistral --data tests/golden/mistral/tokens.bin --seq-len 17"),
               "--seq-len 17 is longer than the sliding window of 16 tokens");
  run_close(run_open("%s --vocab 61 --num-layers 2 --untie-word-embeddings", origin));
  ASSERT_FAILS(run_open("--init %s", temp_path("nowhere")), "nowhere/config.json does not exist");
}

// --- folders -----------------------------------------------------------------------------------------------

static bool make_folder(const char *name, const char *text, Reason *reason) {
  Folder folder = folder_begin(temp_path("."), name);
  folder_file(&folder, "a");
  folder_write(&folder, text, strlen(text));
  folder_file(&folder, "empty");
  return folder_finish(&folder, reason);
}

static void every_damage_is_noticed(void **state) {
  (void)state;
  Reason reason;
  assert_true(make_folder("whole", "some text", &reason));
  char folder[512], path[640];
  snprintf(folder, sizeof folder, "%s", temp_path("whole"));
  snprintf(path, sizeof path, "%s/a", folder);
  assert_true(folder_intact(folder, CHECK_ALL, NULL, &reason));
  for (int bit = 0; bit < 9 * 8; bit++) {
    char text[] = "some text";
    text[bit / 8] ^= (char)(1 << bit % 8);
    write_bytes("whole/a", text, 9);
    assert_true(folder_intact(folder, CHECK_LENGTHS, NULL, &reason));
    assert_false(folder_intact(folder, CHECK_ALL, NULL, &reason));
    assert_non_null(strstr(reason.text, "whole/a is damaged"));
  }
  write_bytes("whole/a", "some tex", 8);
  assert_false(folder_intact(folder, CHECK_LENGTHS, NULL, &reason));
  assert_non_null(strstr(reason.text, "has 8 bytes, not the 9 that were written"));
  write_bytes("whole/a", "some text", 9);
  assert_true(folder_intact(folder, CHECK_ALL, NULL, &reason));
  unlink(path);
  assert_false(folder_intact(folder, CHECK_LENGTHS, NULL, &reason));
  write_text("whole/checksums.json", "{\"../x\":{}}");
  assert_false(folder_intact(folder, CHECK_ALL, NULL, &reason));
  write_text("whole/checksums.json", "{\"a\":");
  assert_false(folder_intact(folder, CHECK_ALL, NULL, &reason));
  assert_false(folder_intact(temp_path("absent"), CHECK_ALL, NULL, &reason));
}

// The standard's check value, in one piece, in many, and over more than one block.
static void checksums_are_crc32(void **state) {
  (void)state;
  assert_int_equal(checksum(0, "123456789", 9), 0xCBF43926);
  assert_int_equal(checksum(checksum(0, "1234", 4), "56789", 5), 0xCBF43926);
  size_t size = ((size_t)66 << 20) + 5;
  char *bytes = malloc(size);
  for (size_t i = 0; i < size; i++) bytes[i] = (char)(i * i >> 7);
  uint32_t parts = 0;
  for (size_t first = 0; first < size; first += 999999)
    parts = checksum(parts, bytes + first, size - first < 999999 ? size - first : 999999);
  assert_int_equal(checksum(0, bytes, size), parts);
  free(bytes);
}

// Writes as far as a limit lets it, at every byte of the way: the folder of before stays, and nothing else.
static void a_full_disk_leaves_what_was_there(void **state) {
  (void)state;
  Reason reason;
  assert_true(make_folder("kept", "first", &reason));
  char folder[512];
  snprintf(folder, sizeof folder, "%s", temp_path("kept"));
  struct rlimit before, limit;
  getrlimit(RLIMIT_FSIZE, &before);
  signal(SIGXFSZ, SIG_IGN);
  int failures = 0;
  for (rlim_t most = 0; most < 200; most += 3) {
    limit = (struct rlimit){.rlim_cur = most, .rlim_max = before.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
    bool made = make_folder("kept", "second, which is longer than the first", &reason);
    setrlimit(RLIMIT_FSIZE, &before);
    Reason why;
    assert_true(folder_intact(folder, CHECK_ALL, NULL, &why));
    size_t length;
    char *text = file_read(temp_path("kept/a"), &length);
    assert_string_equal(text, made ? "second, which is longer than the first" : "first");
    free(text);
    assert_false(path_exists(temp_path(".saving-kept")));
    if (made) break;
    failures++;
    assert_non_null(strstr(reason.text, "cannot write"));
    assert_non_null(strstr(reason.text, strerror(EFBIG)));
  }
  assert_in_range(failures, 10, 66);
}

// --- the directory of checkpoints --------------------------------------------------------------------------

static void save_steps(Run *run, CheckpointStore *store, const int64_t *steps, int count) {
  cJSON *state = cJSON_CreateObject();
  Reason reason;
  for (int i = 0; i < count; i++)
    assert_true(
        checkpoint_save(store, trainer_model(&run->trainer), run->h->backend, steps[i], state, &reason));
  cJSON_Delete(state);
}

static void the_newest_are_kept(void **state) {
  (void)state;
  Run *run = open_tiny("");
  char directory[512];
  snprintf(directory, sizeof directory, "%s", temp_path("deep/down/store"));
  CheckpointStore store = checkpoint_store_open(directory, NULL, NULL, -1, false);
  store.keep = 2;
  save_steps(run, &store, (const int64_t[]){5, 10, 999999, 1000000}, 4);
  assert_false(path_exists(temp_path("deep/down/store/step-000005")));
  assert_false(path_exists(temp_path("deep/down/store/step-000010")));
  assert_true(path_exists(temp_path("deep/down/store/step-999999")));
  char target[64] = "";
  assert_int_equal(readlink(temp_path("deep/down/store/latest"), target, 63), 12);
  assert_string_equal(target, "step-1000000");
  assert_true(path_exists(temp_path("deep/down/store/model.safetensors")));
  ModelConfig config = hf_config_read(directory);
  assert_string_equal(config.name, "llama-tiny");
  assert_int_equal(config.vocab_size, 20);

  bool any;
  char *newest = checkpoint_newest(directory, CHECK_ALL, &any);
  assert_non_null(strstr(newest, "step-1000000"));
  free(newest);
  write_text("deep/down/store/step-1000000/config.json", "{}");
  newest = checkpoint_newest(directory, CHECK_ALL, &any); // warns
  assert_non_null(strstr(newest, "step-999999"));
  free(newest);
  ASSERT_FAILS(checkpoint_store_open(directory, NULL, NULL, 999999, true), "another run is writing");
  checkpoint_store_close(&store);

  ASSERT_FAILS(checkpoint_store_open(directory, NULL, NULL, -1, false), "step-1000000 is there",
               "--resume auto");
  shell("cd %s && mkdir .saving-step-000007 .removing-step-000003 && touch .saving-step-000007/x && "
        "echo '{\"x\": {}}' >.saving-step-000007/checksums.json",
        directory);
  store = checkpoint_store_open(directory, NULL, NULL, 999999, true);
  assert_false(path_exists(temp_path("deep/down/store/.saving-step-000007")));
  assert_false(path_exists(temp_path("deep/down/store/.removing-step-000003")));
  save_steps(run, &store, (const int64_t[]){1000000}, 1); // in the damaged one's place
  newest = checkpoint_newest(directory, CHECK_ALL, &any);
  assert_non_null(strstr(newest, "step-1000000"));
  free(newest);
  checkpoint_store_close(&store);
  run_close(run);
}

// Nothing is removed but what a folder's list names: no link is followed, no foreign file deleted.
static void foreign_files_are_never_removed(void **state) {
  (void)state;
  Run *run = open_tiny("");
  char directory[512];
  snprintf(directory, sizeof directory, "%s", temp_path("shared"));
  shell("mkdir -p %s/.saving-real %s/../elsewhere && cd %s && touch ../elsewhere/precious "
        ".saving-real/precious && "
        "ln -s ../elsewhere .removing-x && ln -s ../elsewhere .saving-x",
        directory, directory, directory);
  CheckpointStore store = checkpoint_store_open(directory, NULL, NULL, -1, false);
  store.keep = 1;
  save_steps(run, &store, (const int64_t[]){1}, 1);
  // One step moved elsewhere and linked back, a file put into the next one, a third as it was.
  shell("cd %s && mv step-000001 ../elsewhere/moved && ln -s ../elsewhere/moved step-000001", directory);
  save_steps(run, &store, (const int64_t[]){2}, 1);
  shell("cd %s && touch step-000002/notes", directory);
  save_steps(run, &store, (const int64_t[]){3, 4}, 2);
  shell("cd %s && test -e ../elsewhere/precious && test -e .saving-real/precious && test -L .removing-x && "
        "test -e ../elsewhere/moved/model.safetensors && test -L step-000001 && test -e step-000002/notes && "
        "test -e step-000002/model.safetensors && test ! -e step-000003 && test -e step-000004",
        directory);
  // A file that stands where a folder's replacement goes is moved aside whole.
  save_steps(run, &store, (const int64_t[]){2}, 1);
  shell("cd %s && test -e .removing-step-000002/notes && test ! -e step-000002/notes", directory);
  checkpoint_store_close(&store);
  run_close(run);
}

// What a writer that was killed left is known from its list, at any moment of the writing.
static void left_overs_are_known_by_their_list(void **state) {
  (void)state;
  char parent[512];
  snprintf(parent, sizeof parent, "%s", temp_path("."));
  for (int files = 0; files < 3; files++) {
    Folder folder = folder_begin(parent, "killed"); // and never finished
    if (files > 0) folder_add(&folder, "a", "text", 4);
    if (files > 1) folder_file(&folder, "b");
    assert_true(folder.ok && path_exists(temp_path(".saving-killed")));
    folder_clean(parent);
    assert_false(path_exists(temp_path(".saving-killed")));
    Reason reason;
    folder_finish(&folder, &reason);
  }
}

static void a_model_is_not_written_over(void **state) {
  (void)state;
  static const char *const foreign[] = {"model.safetensors",
                                        "model-00001-of-00002.safetensors",
                                        "model.safetensors.index.json",
                                        "tokenizer.json",
                                        "latest",
                                        ".latest"};
  for (volatile size_t i = 0; i < 2 * sizeof foreign / sizeof *foreign; i++) {
    shell("rm -rf %s; mkdir %s; cd %s && %s %s", temp_path("mixed"), temp_path("mixed"), temp_path("mixed"),
          i % 2 ? "ln -s ../elsewhere" : "touch", foreign[i / 2]);
    ASSERT_FAILS(checkpoint_store_open(temp_path("mixed"), NULL, NULL, -1, false),
                 "it holds a model that is no checkpoint", foreign[i / 2]);
  }
  make_directory("model");
  write_text("model/config.json", "{}");
  ASSERT_FAILS(checkpoint_store_open(temp_path("model"), NULL, NULL, -1, false),
               "it holds a model that is no checkpoint");
  write_text("file", "");
  ASSERT_FAILS(checkpoint_store_open(temp_path("file/store"), NULL, NULL, -1, false), "cannot make");
  bool any;
  assert_null(checkpoint_newest(temp_path("absent"), CHECK_ALL, &any));
  assert_false(any);
}

// Companions come from the model's folder, unless it is gone: their bytes are kept.
static void companions_travel_along(void **state) {
  (void)state;
  shell("cp -r tests/golden/llama %s", temp_path("origin"));
  write_text("origin/tokenizer.json", "{\"not\": \"read\"}");
  Run *run = run_open("--init %s --data %s/tokens.bin --batch 1 --seq-len 8", temp_path("origin"),
                      temp_path("origin"));
  CheckpointStore store = checkpoint_store_open(temp_path("travelled"), temp_path("origin"), NULL, -1, false);
  shell("rm -r %s", temp_path("origin"));
  save_steps(run, &store, (const int64_t[]){1}, 1);
  size_t length;
  char *text = file_read(temp_path("travelled/tokenizer.json"), &length);
  assert_string_equal(text, "{\"not\": \"read\"}");
  free(text);
  text = file_read(temp_path("travelled/config.json"), &length);
  assert_non_null(strstr(text, "\"eos_token_id\":\t2"));
  free(text);
  checkpoint_store_close(&store);
  run_close(run);
}

static void assert_travelled(const char *store, const char *name, const char *text) {
  size_t length;
  char *path = path_join(temp_path(store), name), *found = file_read(path, &length);
  if (text && !found) fail_msg("%s did not travel", path);
  if (text) assert_string_equal(found, text);
  if (!text) assert_null(found);
  free(found);
  free(path);
}

// The tokenizer that the run was given is the model's from then on, with what lies next to it and nothing of
// the one before; a later run that resumes needs not be given it again.
static void a_given_tokenizer_travels_too(void **state) {
  (void)state;
  static const char config[] = "{\"model_max_length\": 8}";
  shell("cp -r tests/golden/llama %s", temp_path("base"));
  write_text("base/tokenizer.json", "the model's");
  write_text("base/merges.txt", "the model's");
  write_text("base/generation_config.json", "{\"top_k\": 3}");
  make_directory("given");
  write_text("given/mine.json", "mine");
  write_text("given/tokenizer.json", "another");
  write_text("given/tokenizer_config.json", config);
  write_text("given/special_tokens_map.json", "{}");
  Run *run =
      run_open("--init %s --data %s/tokens.bin --batch 1 --seq-len 8", temp_path("base"), temp_path("base"));
  const struct {
    const char *store, *origin, *tokenizer, *text;
  } cases[] = {{"by-file", "base", "given/mine.json", "mine"},
               {"by-folder", "base", "given", "another"},
               {"no-model", NULL, "given/mine.json", "mine"},
               {"resumed", "by-file", NULL, "mine"}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    char *origin = cases[i].origin ? strdup(temp_path(cases[i].origin)) : NULL;
    char *tokenizer = cases[i].tokenizer ? strdup(temp_path(cases[i].tokenizer)) : NULL;
    CheckpointStore store = checkpoint_store_open(temp_path(cases[i].store), origin, tokenizer, -1, false);
    save_steps(run, &store, (const int64_t[]){1}, 1);
    checkpoint_store_close(&store);
    assert_travelled(cases[i].store, "tokenizer.json", cases[i].text);
    assert_travelled(cases[i].store, "tokenizer_config.json", config);
    assert_travelled(cases[i].store, "special_tokens_map.json", "{}");
    assert_travelled(cases[i].store, "merges.txt", NULL);
    if (origin) assert_travelled(cases[i].store, "generation_config.json", "{\"top_k\": 3}");
    free(origin);
    free(tokenizer);
  }
  run_close(run);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(what_is_missing_left_over_or_misshapen_is_named),
      cmocka_unit_test(a_tied_head_must_be_the_embedding),
      cmocka_unit_test(shards_and_index_must_agree),
      cmocka_unit_test(options_that_contradict_the_model_are_refused),
      cmocka_unit_test(every_damage_is_noticed),
      cmocka_unit_test(checksums_are_crc32),
      cmocka_unit_test(a_full_disk_leaves_what_was_there),
      cmocka_unit_test(the_newest_are_kept),
      cmocka_unit_test(foreign_files_are_never_removed),
      cmocka_unit_test(left_overs_are_known_by_their_list),
      cmocka_unit_test(a_model_is_not_written_over),
      cmocka_unit_test(companions_travel_along),
      cmocka_unit_test(a_given_tokenizer_travels_too),
  };
  return cmocka_run_group_tests(tests, make_temp_dir, remove_temp_dir);
}
