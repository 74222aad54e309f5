#include "model/checkpoint/weights.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fail.h"

static const char model_stem[] = "model", state_stem[] = "training_state", head_name[] = "lm_head.weight";

// --- which tensor is whose ---------------------------------------------------------------------------------

// "model." of model.layers.0..., "transformer." of transformer.h.0...
static const char *base_prefix(const Model *model) {
  return model->config.family == FAMILY_GPT2 ? "transformer." : "model.";
}

static Parameter *owner_of(Model *model, const char *name) {
  char prefixed[SAFETENSORS_NAME + 16];
  snprintf(prefixed, sizeof prefixed, "%s%s", base_prefix(model), name);
  Parameter *p = parameters_find(&model->parameters, name);
  return p ? p : parameters_find(&model->parameters, prefixed);
}

static bool ends_with(const char *text, const char *end) {
  size_t length = strlen(text), tail = strlen(end);
  return length >= tail && !strcmp(text + length - tail, end);
}

// What old files hold beside the weights: GPT-2's causal mask, Llama's rotary frequencies.
static bool is_buffer(const Model *model, const char *name) {
  if (model->config.family == FAMILY_LLAMA) return ends_with(name, ".rotary_emb.inv_freq");
  return ends_with(name, ".attn.bias") || ends_with(name, ".attn.masked_bias");
}

static bool is_tied_head(const Model *model, const char *name) {
  return model->config.tie_word_embeddings && !strcmp(name, head_name);
}

static TensorText shape_of(const Parameter *p) {
  return safetensors_shape(&(SafetensorsEntry){.rank = p->rank, .shape = {p->shape[0], p->shape[1]}});
}

static void check_fit(const TensorFile *file, const SafetensorsEntry *e, const Parameter *p) {
  bool same = e->rank == p->rank;
  for (int i = 0; i < p->rank && same; i++) same = e->shape[i] == p->shape[i];
  if (!same)
    fail("%s: %s has the shape %s, and config.json makes it %s", file->path, e->name,
         safetensors_shape(e).text, shape_of(p).text);
  if (strcmp(e->dtype, "F32") && strcmp(e->dtype, "BF16") && strcmp(e->dtype, "F16"))
    fail("%s: %s is stored as %s; weights can be F32, BF16 or F16", file->path, e->name, e->dtype);
}

static bool same_numbers(const TensorFile *a, const SafetensorsEntry *x, const TensorFile *b,
                         const SafetensorsEntry *y) {
  return !strcmp(x->dtype, y->dtype) && x->bytes == y->bytes &&
         !memcmp(a->mapping.bytes + x->offset, b->mapping.bytes + y->offset, x->bytes);
}

typedef struct {
  const TensorFile *file;
  const SafetensorsEntry *entry; // NULL: not found yet
} Stored;

static int64_t index_of(const Model *model, const Parameter *p) {
  return p - model->parameters.items;
}

// A tied model's own copy of the head must be the embedding.
static void check_tied_head(Model *model, const TensorSet *set, const Stored *stored) {
  const TensorFile *file;
  const SafetensorsEntry *head =
      model->config.tie_word_embeddings ? tensor_set_find(set, head_name, &file) : NULL;
  if (!head) return;
  for (int64_t i = 0; i < model->parameters.count; i++)
    if (model->parameters.items[i].value.data == model->head.value.data &&
        !same_numbers(file, head, stored[i].file, stored[i].entry))
      fail("%s: %s differs from %s, and config.json says tie_word_embeddings; set it to false there to train "
           "both",
           file->path, head_name, stored[i].entry->name);
}

// stored[i] is where the numbers of the model's i-th tensor are; the caller frees it.
static Stored *match(Model *model, const TensorSet *set) {
  int64_t count = model->parameters.count;
  Stored *stored = calloc((size_t)count, sizeof *stored);
  if (!stored) fail("out of host memory for the names of %lld tensors", (long long)count);
  for (int f = 0; f < set->count; f++)
    for (int64_t k = 0; k < set->files[f].header.count; k++) {
      const TensorFile *file = &set->files[f];
      const SafetensorsEntry *e = &file->header.entries[k];
      const Parameter *p = owner_of(model, e->name);
      if (!p && (is_buffer(model, e->name) || is_tied_head(model, e->name))) continue;
      if (!p)
        fail("%s holds %s %s, for which the model that config.json describes has no place", file->path,
             e->name, safetensors_shape(e).text);
      Stored *place = &stored[index_of(model, p)];
      if (place->entry) fail("%s holds %s, which %s holds too", file->path, e->name, place->file->path);
      check_fit(file, e, p);
      *place = (Stored){file, e};
    }
  int64_t missing = 0;
  const Parameter *first = NULL;
  for (int64_t i = count - 1; i >= 0; i--)
    if (!stored[i].entry) missing++, first = &model->parameters.items[i];
  if (missing)
    fail("%s lacks %s %s%s, which the model that config.json describes needs", set->path, first->name,
         shape_of(first).text, missing > 1 ? " and others" : "");
  check_tied_head(model, set, stored);
  return stored;
}

void weights_load(Model *model, Backend *backend, const char *folder) {
  TensorSet set = tensor_set_open(folder, model_stem);
  if (!set.count)
    fail("%s does not exist, nor an index of shards beside it; save the model as safetensors "
         "(save_pretrained of "
         "transformers does)",
         set.path);
  Stored *stored = match(model, &set);
  // In the files' order, for the disk's sake.
  for (int f = 0; f < set.count; f++)
    for (int64_t k = 0; k < set.files[f].header.count; k++) {
      const SafetensorsEntry *e = &set.files[f].header.entries[k];
      const Parameter *p = owner_of(model, e->name);
      const Parameters *all = &model->parameters;
      if (p) tensor_read(&set.files[f], e, backend, all, p, all->value, all->master);
    }
  free(stored);
  tensor_set_close(&set);
}

// --- storing -----------------------------------------------------------------------------------------------

static TensorToStore *list_for(int64_t count) {
  TensorToStore *list = calloc((size_t)count, sizeof *list);
  if (!list) fail("out of host memory for the names of %lld tensors", (long long)count);
  return list;
}

static void add(TensorToStore *list, int64_t *count, const char *prefix, const Parameters *all,
                const Parameter *p, const Tensor *role, Dtype dtype) {
  TensorToStore *t = &list[(*count)++];
  snprintf(t->name, sizeof t->name, "%s%s", prefix, p->name);
  t->tensor = (Tensor){.dtype = role[p->group].dtype, .rank = p->rank, .shape = {p->shape[0], p->shape[1]}};
  t->dtype = dtype;
  t->parameters = all;
  t->parameter = p;
  t->role = role;
}

// The master weights where there are any: what the weights would be without rounding.
static const Tensor *exact_weights(const Parameters *all) {
  return tensor_exists(all->master[GROUP_MATRICES]) ? all->master : all->value;
}

void weights_store(const Model *model, Backend *backend, Folder *folder, Dtype dtype, size_t shard_bytes) {
  const Parameters *all = &model->parameters;
  TensorToStore *list = list_for(all->count);
  int64_t count = 0;
  for (int64_t i = 0; i < all->count; i++)
    add(list, &count, "", all, &all->items[i], dtype == DTYPE_F32 ? exact_weights(all) : all->value, dtype);
  tensor_set_write(folder, model_stem, list, count, backend, shard_bytes);
  free(list);
}

// --- what the optimizer knows ------------------------------------------------------------------------------

void optimizer_store(const Model *model, Backend *backend, Folder *folder, Dtype weights_dtype,
                     size_t shard_bytes) {
  const Parameters *all = &model->parameters;
  const Tensor *exact = exact_weights(all);
  TensorToStore *list = list_for(3 * all->count);
  int64_t count = 0;
  for (int64_t i = 0; i < all->count; i++) {
    const Parameter *p = &all->items[i];
    add(list, &count, "m.", all, p, all->m, all->m[p->group].dtype);
    add(list, &count, "v.", all, p, all->v, all->v[p->group].dtype);
    if (weights_dtype == DTYPE_BF16 && exact[p->group].dtype == DTYPE_F32)
      add(list, &count, "master.", all, p, exact, DTYPE_F32);
  }
  tensor_set_write(folder, state_stem, list, count, backend, shard_bytes);
  free(list);
}

// False when there is none of that name.
static bool load_state(const TensorSet *set, Backend *backend, const char *prefix, const Parameters *all,
                       const Parameter *p, const Tensor *role, const Tensor *also_role) {
  char name[112];
  snprintf(name, sizeof name, "%s%s", prefix, p->name);
  const TensorFile *file;
  const SafetensorsEntry *e = tensor_set_find(set, name, &file);
  if (!e) return false;
  check_fit(file, e, p);
  tensor_read(file, e, backend, all, p, role, also_role);
  return true;
}

void optimizer_load(Model *model, Backend *backend, const char *folder) {
  TensorSet set = tensor_set_open(folder, state_stem);
  const Parameters *all = &model->parameters;
  for (int64_t i = 0; i < all->count; i++) {
    const Parameter *p = &all->items[i];
    if (!load_state(&set, backend, "m.", all, p, all->m, NULL) ||
        !load_state(&set, backend, "v.", all, p, all->v, NULL))
      fail("%s lacks the moments of %s; --init instead of --resume starts from the weights alone", set.path,
           p->name);
    load_state(&set, backend, "master.", all, p, all->value, all->master);
  }
  tensor_set_close(&set);
}

bool is_optimizer_file(const char *name) {
  return !strncmp(name, state_stem, sizeof state_stem - 1);
}
