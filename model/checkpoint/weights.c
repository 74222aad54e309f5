#include "model/checkpoint/weights.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/json.h"
#include "kernels/alloc.h"
#include "kernels/fail.h"
#include "kernels/ranks/ranks.h"
#include "kernels/text.h"

static const char head_name[] = "lm_head.weight";

enum { AT_ONCE = 1 << 22 };     // elements on the way between disk and backend
enum { READ_AHEAD = 64 << 20 }; // bytes that the disk reads while the backend takes those before
enum { REQUESTS = 4 };          // at once, which keep its queue full

static char *file_name(const char *stem, int number, int of) {
  return of > 1 ? text_format("%s-%05d-of-%05d.safetensors", stem, number, of)
                : text_format("%s.safetensors", stem);
}

static char *index_name(const char *stem) {
  return text_format("%s.safetensors.index.json", stem);
}

static void *host_buffer(size_t element) {
  return host_alloc(AT_ONCE, element, "weights on their way");
}

// --- files that are written --------------------------------------------------------------------------------

bool is_plain_name(const char *name) {
  return *name && !strchr(name, '/') && strcmp(name, ".") && strcmp(name, "..") && strlen(name) < 256;
}

void folder_give_up(Folder *f, const char *path) {
  if (f->ok) refuse(&f->reason, "cannot write %s: %s", path, strerror(errno));
  f->ok = false;
}

void folder_end_file(Folder *f) {
  if (!f->out) return;
  if (f->ok && (fflush(f->out) || fsync(fileno(f->out)))) folder_give_up(f, f->file.text);
  if (fclose(f->out)) folder_give_up(f, f->file.text);
  f->out = NULL;
}

void folder_file(Folder *f, const char *name) {
  folder_end_file(f);
  if (!f->ok) return;
  f->file = path_in(f->hidden.text, name);
  f->out = fopen(f->file.text, "wxe"); // a new one, closed in what this process starts
  if (!f->out) folder_give_up(f, f->file.text);
}

void folder_write(Folder *f, const void *bytes, size_t count) {
  if (f->ok && fwrite(bytes, 1, count, f->out) != count) folder_give_up(f, f->file.text);
}

void folder_add(Folder *f, const char *name, const void *bytes, size_t count) {
  folder_file(f, name);
  folder_write(f, bytes, count);
}

// --- opening -----------------------------------------------------------------------------------------------

// False with a reason, "" where there is no such file. One that is open already is not opened again.
static bool add_file(TensorSet *set, const char *path, Reason *reason) {
  for (int64_t i = 0; i < set->count; i++)
    if (!strcmp(set->files[i].path, path)) return true;
  Mapping mapping = file_map_or_copy(path, 0, reason);
  if (!mapping.bytes) return false;
  set->files = host_grow(set->files, set->count, &set->capacity, sizeof *set->files, set->path.text);
  TensorFile *file = &set->files[set->count++];
  *file = (TensorFile){.path = text_format("%s", path), .mapping = mapping};
  return safetensors_parse(mapping.bytes, mapping.size, &file->header, reason) ||
         refuse(reason, "%s: %s", path, reason->text);
}

// Opens the files that an index names, which hold the tensors that it says.
static bool open_indexed(TensorSet *set, const char *folder, const cJSON *map, Reason *reason) {
  const cJSON *item;
  if (!cJSON_IsObject(map)) return refuse(reason, "%s has no weight_map", set->path.text);
  cJSON_ArrayForEach(item, map) {
    if (!cJSON_IsString(item) || !is_plain_name(item->valuestring))
      return refuse(reason, "%s names no file of its folder for %s", set->path.text, item->string);
    Path path = path_in(folder, item->valuestring);
    const TensorFile *file;
    if (!add_file(set, path.text, reason))
      return *reason->text ? false
                           : refuse(reason, "%s does not exist, and %s says that %s is in it", path.text,
                                    set->path.text, item->string);
    if (!tensor_set_find(set, item->string, &file) || strcmp(file->path, path.text))
      return refuse(reason, "%s lacks %s, which %s says is in it", path.text, item->string, set->path.text);
  }
  return true;
}

bool tensor_set_try_open(TensorSet *set, const char *folder, const char *stem, Reason *reason) {
  char *single = file_name(stem, 1, 1), *index = index_name(stem);
  *set = (TensorSet){.path = path_in(folder, index)};
  cJSON *json = json_try_read(set->path.text, reason);
  bool good = json ? open_indexed(set, folder, json_member(json, "weight_map"), reason) : !*reason->text;
  if (!json && good) {
    set->path = path_in(folder, single);
    good = add_file(set, set->path.text, reason) || !*reason->text;
  }
  cJSON_Delete(json);
  free(single);
  free(index);
  if (!good) tensor_set_close(set);
  return good;
}

TensorSet tensor_set_open(const char *folder, const char *stem) {
  TensorSet set;
  Reason reason;
  if (!tensor_set_try_open(&set, folder, stem, &reason)) fail("%s", reason.text);
  return set;
}

void tensor_set_close(TensorSet *set) {
  for (int i = 0; i < set->count; i++) {
    safetensors_free(&set->files[i].header);
    file_unmap(&set->files[i].mapping);
    free(set->files[i].path);
  }
  free(set->files);
  *set = (TensorSet){0};
}

const SafetensorsEntry *tensor_set_find(const TensorSet *set, const char *name, const TensorFile **file) {
  for (int i = 0; i < set->count; i++)
    for (int64_t k = 0; k < set->files[i].header.count; k++)
      if (!strcmp(set->files[i].header.entries[k].name, name)) {
        *file = &set->files[i];
        return &set->files[i].header.entries[k];
      }
  return NULL;
}

// --- reading -----------------------------------------------------------------------------------------------

// Copies a stored tensor (F32, BF16 or F16) to a parameter of as many elements, in one role (parameters->value,
// ...) and in another unless that is NULL: straight from the file's pages where they are of the role's dtype, else
// by way of fp32, rounded where the role is bf16. A rank keeps what it owns.
static void tensor_read(const TensorFile *file, const SafetensorsEntry *e, Backend *backend,
                        const Parameters *parameters, const Parameter *parameter, const Tensor *role,
                        const Tensor *also_role) {
  const Tensor *const roles[] = {role, also_role};
  int64_t total = parameter_elements(parameter);
  size_t width = total ? e->bytes / (size_t)total : 0;
  float *values = host_buffer(sizeof *values);
  uint16_t *rounded = host_buffer(sizeof *rounded);
  for (int64_t first = 0; first < total; first += AT_ONCE) {
    int64_t count = min_i64(total - first, AT_ONCE);
    size_t offset = e->offset + (size_t)first * width;
    const char *stored = file->mapping.bytes + offset;
    bool widened = false;
    size_t piece = (size_t)count * width / REQUESTS + 1;
#pragma omp parallel for schedule(static)
    for (int i = 0; i < REQUESTS; i++)
      file_will_need(&file->mapping, offset + READ_AHEAD + (size_t)i * piece, piece);
    for (int r = 0; r < 2 && roles[r]; r++) {
      Dtype dtype = roles[r][parameter->group].dtype;
      bool as_stored = !strcmp(e->dtype, safetensors_dtype(dtype));
      if (!as_stored && !widened) widened = safetensors_widen(e->dtype, stored, count, values);
      shards_write(parameters, backend, roles[r], parameter, first, count,
                   as_stored ? (const void *)stored : values, as_stored ? dtype : DTYPE_F32, rounded);
    }
    file_done_with(&file->mapping, offset, (size_t)count * width);
    ranks_alive();
  }
  free(values);
  free(rounded);
}

// --- writing -----------------------------------------------------------------------------------------------

static SafetensorsEntry entry_of(const TensorToStore *t) {
  SafetensorsEntry e = {
      .name = (char *)t->name, .dtype = safetensors_dtype(t->dtype), .rank = t->tensor.rank};
  for (int i = 0; i < e.rank; i++) e.shape[i] = t->tensor.shape[i];
  e.bytes = (size_t)tensor_count(t->tensor) * dtype_bytes(t->dtype);
  return e;
}

// Elements [first, first + count) of the tensor, into `host`.
static void fetch(const TensorToStore *t, Backend *backend, int64_t first, int64_t count, void *host) {
  if (t->role)
    shards_read(t->parameters, backend, t->role, t->parameter, first, count, host);
  else if (backend->rank == 0)
    backend_to_host(backend, host, tensor_rows(tensor_flat(t->tensor), first, count));
}

// By way of two host_buffers.
static void write_elements(Folder *folder, const TensorToStore *t, Backend *backend, void *raw,
                           void *converted) {
  Dtype dtype = t->tensor.dtype;
  // Where other ranks take part in fetching, everything is fetched even after a write has failed.
  bool together = backend->ranks > 1;
  for (int64_t first = 0, total = tensor_count(t->tensor); first < total && (folder->ok || together);
       first += AT_ONCE) {
    int64_t count = min_i64(total - first, AT_ONCE);
    fetch(t, backend, first, count, raw);
    ranks_alive();
    if (!folder->ok) continue;
    if (t->dtype != dtype && t->dtype == DTYPE_F32) {
      safetensors_widen(safetensors_dtype(dtype), raw, count, converted);
    } else if (t->dtype != dtype) {
      const float *wide = raw;
      uint16_t *rounded = converted;
#pragma omp parallel for schedule(static)
      for (int64_t i = 0; i < count; i++) rounded[i] = bf16_from_f32(wide[i]);
    }
    folder_write(folder, t->dtype == dtype ? raw : converted, (size_t)count * dtype_bytes(t->dtype));
  }
}

static void write_file(Folder *folder, const char *name, const TensorToStore *tensors,
                       const SafetensorsEntry *entries, int64_t count, Backend *backend) {
  size_t length;
  char *header = safetensors_compose(entries, count, &length);
  folder_add(folder, name, header, length);
  void *raw = host_buffer(sizeof(float)), *converted = host_buffer(sizeof(float));
  for (int64_t i = 0; i < count; i++) write_elements(folder, &tensors[i], backend, raw, converted);
  free(header);
  free(raw);
  free(converted);
}

// Where the file that begins with tensor `first` ends.
static int64_t file_end(const SafetensorsEntry *entries, int64_t first, int64_t count, size_t shard_bytes) {
  size_t bytes = entries[first].bytes;
  int64_t end = first + 1;
  while (end < count && bytes + entries[end].bytes <= shard_bytes) bytes += entries[end++].bytes;
  return end;
}

void tensor_set_write(Folder *folder, const char *stem, const TensorToStore *tensors, int64_t count,
                      Backend *backend, size_t shard_bytes) {
  SafetensorsEntry *entries = host_alloc(count, sizeof *entries, "a list of tensors");
  double total = 0;
  int files = 0;
  for (int64_t i = 0; i < count; i++) {
    entries[i] = entry_of(&tensors[i]);
    total += (double)entries[i].bytes;
  }
  for (int64_t first = 0; first < count; first = file_end(entries, first, count, shard_bytes)) files++;

  cJSON *index = cJSON_CreateObject();
  cJSON_AddNumberToObject(cJSON_AddObjectToObject(index, "metadata"), "total_size", total);
  cJSON *map = cJSON_AddObjectToObject(index, "weight_map");
  int64_t first = 0;
  for (int number = 1; number <= files; number++) {
    int64_t end = file_end(entries, first, count, shard_bytes);
    char *name = file_name(stem, number, files);
    write_file(folder, name, tensors + first, entries + first, end - first, backend);
    for (int64_t i = first; i < end; i++) cJSON_AddStringToObject(map, tensors[i].name, name);
    free(name);
    first = end;
  }
  if (files > 1) {
    char *name = index_name(stem), *text = json_print(index, true);
    folder_add(folder, name, text, strlen(text));
    free(name);
    free(text);
  }
  cJSON_Delete(index);
  free(entries);
}

// --- matching tensors --------------------------------------------------------------------------------------

static Parameter *owner_of(Model *model, const char *name) {
  char prefixed[SAFETENSORS_NAME + 16];
  snprintf(prefixed, sizeof prefixed, "%s%s", model_families[model->config.family].prefix, name);
  Parameter *p = parameters_find(&model->parameters, name);
  return p ? p : parameters_find(&model->parameters, prefixed);
}

static bool is_buffer(const Model *model, const char *name) {
  const char *const *ends = model_families[model->config.family].buffers;
  return text_ends_in(name, ends[0]) || (ends[1] && text_ends_in(name, ends[1]));
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

static bool same_bytes(const TensorFile *a, const SafetensorsEntry *x, const TensorFile *b,
                       const SafetensorsEntry *y) {
  return !strcmp(x->dtype, y->dtype) && x->bytes == y->bytes &&
         !memcmp(a->mapping.bytes + x->offset, b->mapping.bytes + y->offset, x->bytes);
}

typedef struct {
  const TensorFile *file;
  const SafetensorsEntry *entry; // NULL: not found yet
} Stored;

// A stored copy of a tied head must equal the embedding, the first of the parameters.
static void check_tied_head(const Model *model, const TensorSet *set, const Stored *embedding) {
  const TensorFile *file;
  const SafetensorsEntry *head =
      model->config.tie_word_embeddings ? tensor_set_find(set, head_name, &file) : NULL;
  if (head && !same_bytes(file, head, embedding->file, embedding->entry))
    fail("%s: %s differs from %s, and config.json says tie_word_embeddings; set it to false there to train "
         "both",
         file->path, head_name, embedding->entry->name);
}

// Fails unless the set is that of the model's tensors.
static void check_set(Model *model, const TensorSet *set) {
  int64_t count = model->parameters.count;
  Stored *stored = host_alloc(count, sizeof *stored, "a list of tensors");
  for (int f = 0; f < set->count; f++)
    for (int64_t k = 0; k < set->files[f].header.count; k++) {
      const TensorFile *file = &set->files[f];
      const SafetensorsEntry *e = &file->header.entries[k];
      const Parameter *p = owner_of(model, e->name);
      if (!p && (is_buffer(model, e->name) || is_tied_head(model, e->name))) continue;
      if (!p)
        fail("%s holds %s %s, for which the model that config.json describes has no place", file->path,
             e->name, safetensors_shape(e).text);
      Stored *place = &stored[p - model->parameters.items];
      if (place->entry) fail("%s holds %s, which %s holds too", file->path, e->name, place->file->path);
      check_fit(file, e, p);
      *place = (Stored){file, e};
    }
  int64_t missing = 0;
  const Parameter *first = NULL;
  for (int64_t i = count - 1; i >= 0; i--)
    if (!stored[i].entry) missing++, first = &model->parameters.items[i];
  if (missing)
    fail("%s lacks %s %s%s, which the model that config.json describes needs", set->path.text, first->name,
         shape_of(first).text, missing > 1 ? " and others" : "");
  check_tied_head(model, set, stored);
  free(stored);
}

void weights_load(Model *model, Backend *backend, const char *folder) {
  TensorSet set = tensor_set_open(folder, MODEL_STEM);
  if (!set.count)
    fail("%s does not exist, nor an index of shards next to it; save the model as safetensors "
         "(save_pretrained of transformers does)",
         set.path.text);
  check_set(model, &set);
  // In the files' order: a disk reads sequentially.
  for (int f = 0; f < set.count; f++)
    for (int64_t k = 0; k < set.files[f].header.count; k++) {
      const SafetensorsEntry *e = &set.files[f].header.entries[k];
      const Parameter *p = owner_of(model, e->name);
      const Parameters *all = &model->parameters;
      if (p) tensor_read(&set.files[f], e, backend, all, p, all->value, all->master);
    }
  tensor_set_close(&set);
}

// --- storing -----------------------------------------------------------------------------------------------

TensorToStore parameter_to_store(const char *prefix, const Parameters *all, const Parameter *p,
                                 const Tensor *role, Dtype dtype) {
  TensorToStore t = {
      .tensor = {.dtype = role[p->group].dtype, .rank = p->rank, .shape = {p->shape[0], p->shape[1]}},
      .dtype = dtype,
      .parameters = all,
      .parameter = p,
      .role = role};
  snprintf(t.name, sizeof t.name, "%s%s%s", prefix ? prefix : "", prefix ? "." : "", p->name);
  return t;
}

// The master weights where there are any: what the weights would be without rounding.
static const Tensor *exact_weights(const Parameters *all) {
  return tensor_exists(all->master[GROUP_MATRICES]) ? all->master : all->value;
}

void weights_store(const Model *model, Backend *backend, Folder *folder, Dtype dtype, size_t shard_bytes) {
  const Parameters *all = &model->parameters;
  const Tensor *exact = exact_weights(all), *role = dtype == DTYPE_F32 ? exact : all->value;
  TensorToStore *weights = host_alloc(all->count, sizeof *weights, "a list of tensors");
  TensorToStore *rest = host_alloc((OPTIMIZER_STATES + 1) * all->count, sizeof *rest, "a list of tensors");
  int64_t count = 0;
  for (int64_t i = 0; i < all->count; i++) {
    const Parameter *p = &all->items[i];
    weights[i] = parameter_to_store(NULL, all, p, role, dtype);
    for (int s = 0; s < OPTIMIZER_STATES; s++)
      if (tensor_exists(all->state[s][p->group]))
        rest[count++] = parameter_to_store(all->optimizer->states[s].name, all, p, all->state[s],
                                           all->state[s][p->group].dtype);
    if (dtype == DTYPE_BF16 && exact[p->group].dtype == DTYPE_F32)
      rest[count++] = parameter_to_store("master", all, p, exact, DTYPE_F32);
  }
  tensor_set_write(folder, MODEL_STEM, weights, all->count, backend, shard_bytes);
  tensor_set_write(folder, STATE_STEM, rest, count, backend, shard_bytes);
  free(weights);
  free(rest);
}

// --- the optimizer's state ---------------------------------------------------------------------------------

// False when there is none of that name.
static bool load_state(const TensorSet *set, Backend *backend, const char *prefix, const Parameters *all,
                       const Parameter *p, const Tensor *role, const Tensor *also_role) {
  char name[112];
  snprintf(name, sizeof name, "%s.%s", prefix, p->name);
  const TensorFile *file;
  const SafetensorsEntry *e = tensor_set_find(set, name, &file);
  if (!e) return false;
  check_fit(file, e, p);
  tensor_read(file, e, backend, all, p, role, also_role);
  return true;
}

void optimizer_load(Model *model, Backend *backend, const char *folder) {
  TensorSet set = tensor_set_open(folder, STATE_STEM);
  const Parameters *all = &model->parameters;
  for (int64_t i = 0; i < all->count; i++) {
    const Parameter *p = &all->items[i];
    for (int s = 0; s < OPTIMIZER_STATES; s++)
      if (tensor_exists(all->state[s][p->group]) &&
          !load_state(&set, backend, all->optimizer->states[s].name, all, p, all->state[s], NULL))
        fail("%s lacks the moments of %s; --init instead of --resume starts from the weights alone",
             set.path.text, p->name);
    load_state(&set, backend, "master", all, p, all->value, all->master);
  }
  tensor_set_close(&set);
}
