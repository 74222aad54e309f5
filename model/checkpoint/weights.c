#include "model/checkpoint/weights.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <stb/stb_ds.h>

#include "kernels/base/alloc.h"
#include "kernels/base/text.h"
#include "kernels/ranks/ranks.h"
#include "model/shards.h"

static const char head_name[] = "lm_head.weight";

enum {
  AT_ONCE = 1 << 22,     // elements on the way between disk and backend
  READ_AHEAD = 64 << 20, // bytes that the disk reads while the backend takes those before
  REQUESTS = 4           // reads that keep the disk's queue full
};

// One of several, or the index (number 0).
static Path file_name(const char *stem, int number, int of) {
  char part[32] = "";
  Path name;
  if (of > 1) snprintf(part, sizeof part, "-%05d-of-%05d", number, of);
  snprintf(name.text, sizeof name.text, "%s%s.safetensors%s", stem, part, number ? "" : ".index.json");
  return name;
}

static void *host_buffer(void) {
  return host_alloc(AT_ONCE, sizeof(float), "weights on their way");
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
  if (f->checksums) cJSON_AddNumberToObject(f->checksums, strrchr(f->file.text, '/') + 1, f->crc);
  f->crc = 0;
}

static void folder_write(Folder *f, const void *bytes, size_t count) {
  if (f->ok && fwrite(bytes, 1, count, f->out) != count) folder_give_up(f, f->file.text);
  if (f->ok && f->checksums) f->crc = checksum(f->crc, bytes, count);
}

void folder_add(Folder *f, const char *name, mode_t mode, const void *bytes, size_t count) {
  folder_end_file(f);
  if (!f->ok) return;
  f->file = path_in(f->hidden.text, name);
  int file = open(f->file.text, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
  f->out = file < 0 ? NULL : fdopen(file, "w");
  if (!f->out) folder_give_up(f, f->file.text);
  folder_write(f, bytes, count);
}

// False with a reason, "" if the file is absent. A file that is open already is not opened again.
static bool add_file(TensorSet *set, const char *path, Reason *reason) {
  for (int64_t i = 0; i < set->count; i++)
    if (!strcmp(set->files[i].path, path)) return true;
  Mapping mapping = file_map_or_copy(path, 0, reason);
  if (!mapping.bytes) return false;
  TensorFile file = {.path = text_format("%s", path), .mapping = mapping};
  arrput(set->files, file);
  set->count++;
  return safetensors_parse(mapping.bytes, mapping.size, &arrlast(set->files).header, reason) ||
         refuse(reason, "%s: %s", path, reason->text);
}

// Opens the files that an index names, which hold the tensors it lists, except a head, which may be tied.
static bool open_indexed(TensorSet *set, const char *folder, const cJSON *map, Reason *reason) {
  const cJSON *item;
  if (!cJSON_IsObject(map)) return refuse(reason, "%s has no weight_map", set->path.text);
  cJSON_ArrayForEach(item, map) {
    if (!cJSON_IsString(item) || !is_plain_name(item->valuestring))
      return refuse(reason, "%s names no file of its folder for %s", set->path.text, item->string);
    Path path = path_in(folder, item->valuestring);
    bool there = add_file(set, path.text, reason);
    if (!there && *reason->text) return false;
    StoredTensor t = tensor_set_find(set, item->string);
    if (there && !t.entry && !strcmp(item->string, head_name)) continue;
    if (!there || !t.entry || strcmp(t.file->path, path.text))
      return refuse(reason, "%s %s, and %s says that %s is in it", path.text,
                    there ? "lacks it" : "does not exist", set->path.text, item->string);
  }
  return true;
}

bool tensor_set_try_open(TensorSet *set, const char *folder, const char *stem, Reason *reason) {
  *set = (TensorSet){.path = path_in(folder, file_name(stem, 1, 1).text)};
  bool good = add_file(set, set->path.text, reason) || !*reason->text;
  if (good && !set->count) { // as transformers: an index beside the one file means nothing
    Path path = path_in(folder, file_name(stem, 0, 1).text);
    cJSON *index = json_read(path.text, reason);
    if (index) set->path = path;
    good = index ? open_indexed(set, folder, json_member(index, "weight_map"), reason) : !*reason->text;
    cJSON_Delete(index);
  }
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
  arrfree(set->files);
  *set = (TensorSet){0};
}

StoredTensor tensor_set_find(const TensorSet *set, const char *name) {
  for (const TensorFile *file = set->files; file < set->files + set->count; file++)
    for (int64_t k = 0; k < file->header.count; k++)
      if (!strcmp(file->header.entries[k].name, name)) return (StoredTensor){file, &file->header.entries[k]};
  return (StoredTensor){0};
}

// --- reading -----------------------------------------------------------------------------------------------

// Copies a stored tensor to a parameter in one role (parameters->value, ...) and, unless NULL, another:
// straight from the file's pages if the dtype is the role's. A rank keeps its part.
static void tensor_read(StoredTensor t, Backend *backend, const ParameterSet *parameters,
                        const Parameter *parameter, const Tensor *role, const Tensor *also_role) {
  const Tensor *const roles[] = {role, also_role};
  const Mapping *mapping = &t.file->mapping;
  int64_t total = parameter_elements(parameter);
  size_t width = total ? t.entry->bytes / (size_t)total : 0;
  void *converted = host_buffer();
  for (int64_t first = 0; first < total; first += AT_ONCE) {
    int64_t count = min_i64(total - first, AT_ONCE);
    size_t offset = t.entry->offset + (size_t)first * width, piece = (size_t)count * width / REQUESTS + 1;
    const char *stored = mapping->bytes + offset;
#pragma omp parallel for schedule(static)
    for (int i = 0; i < REQUESTS; i++)
      file_advise(mapping, offset + READ_AHEAD + (size_t)i * piece, piece, MADV_WILLNEED);
    for (int r = 0; r < 2 && roles[r]; r++) {
      Tensor group = roles[r][parameter->group];
      bool as_stored = !strcmp(t.entry->dtype, safetensors_dtype(group.dtype));
      if (!tensor_exists(group)) continue;
      if (!as_stored) safetensors_convert(t.entry->dtype, stored, count, group.dtype, converted);
      shards_write(parameters, backend, roles[r], parameter, first, count, as_stored ? stored : converted);
    }
    file_advise(mapping, offset, (size_t)count * width, MADV_DONTNEED);
    ranks_alive();
  }
  free(converted);
}

// --- writing -----------------------------------------------------------------------------------------------

static SafetensorsEntry entry_of(const TensorToStore *t) {
  return (SafetensorsEntry){.name = t->name,
                            .dtype = safetensors_dtype(t->dtype),
                            .rank = t->tensor.rank,
                            .shape = {t->tensor.shape[0], t->tensor.shape[1]},
                            .bytes = (size_t)tensor_count(t->tensor) * dtype_bytes(t->dtype)};
}

// Writes through two host buffers. Several ranks fetch everything even after a write has failed.
static void write_elements(Folder *folder, const TensorToStore *t, Backend *backend, void *raw,
                           void *converted) {
  Tensor x = t->tensor;
  for (int64_t first = 0, total = tensor_count(x); first < total && (folder->ok || backend->ranks > 1);
       first += AT_ONCE) {
    int64_t count = min_i64(total - first, AT_ONCE);
    if (t->role)
      shards_read(t->parameters, backend, t->role, t->parameter, first, count, raw);
    else if (backend->rank == 0)
      backend_to_host(backend, raw, tensor_rows(tensor_flat(x), first, count));
    ranks_alive();
    if (!folder->ok) continue;
    bool as_it_is = t->dtype == x.dtype;
    if (!as_it_is) safetensors_convert(safetensors_dtype(x.dtype), raw, count, t->dtype, converted);
    folder_write(folder, as_it_is ? raw : converted, (size_t)count * dtype_bytes(t->dtype));
  }
}

static void write_file(Folder *folder, const char *name, const TensorToStore *tensors,
                       const SafetensorsEntry *entries, int64_t count, Backend *backend) {
  char *header = safetensors_compose(entries, count);
  uint64_t length = strlen(header);
  folder_add(folder, name, 0666, &length, sizeof length);
  folder_write(folder, header, length);
  void *raw = host_buffer(), *converted = host_buffer();
  for (int64_t i = 0; i < count; i++) write_elements(folder, &tensors[i], backend, raw, converted);
  free(header);
  free(raw);
  free(converted);
}

// The end of the file that begins with tensor `first`.
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
    Path name = file_name(stem, number, files);
    write_file(folder, name.text, tensors + first, entries + first, end - first, backend);
    for (; first < end; first++) cJSON_AddStringToObject(map, tensors[first].name, name.text);
  }
  if (files > 1) {
    char *text = json_print(index, true);
    folder_add(folder, file_name(stem, 0, 1).text, 0666, text, strlen(text));
    free(text);
  }
  cJSON_Delete(index);
  free(entries);
}

// --- matching tensors --------------------------------------------------------------------------------------

// True if a tied head and embedding, the first of the parameters, are stored once and as the head.
static bool stored_as_head(const Model *model, const TensorSet *set) {
  const char *embedding = model->parameters.items->name;
  const char *bare = embedding + strlen(model_families[model->config.family].prefix);
  return model->config.tie_word_embeddings && !tensor_set_find(set, embedding).entry &&
         !tensor_set_find(set, bare).entry;
}

// Names may lack the base model's prefix.
static Parameter *owner_of(Model *model, const TensorSet *set, const char *name) {
  char prefixed[SAFETENSORS_NAME + 16];
  snprintf(prefixed, sizeof prefixed, "%s%s", model_families[model->config.family].prefix, name);
  Parameter *p = parameters_find(&model->parameters, name);
  if (!p) p = parameters_find(&model->parameters, prefixed);
  return !p && !strcmp(name, head_name) && stored_as_head(model, set) ? model->parameters.items : p;
}

// Buffers of old files, and a copy of a tied head.
static bool means_nothing(const Model *model, const char *name) {
  const char *const *ends = model_families[model->config.family].buffers;
  return text_ends_in(name, ends[0]) || (ends[1] && text_ends_in(name, ends[1])) ||
         (model->config.tie_word_embeddings && !strcmp(name, head_name));
}

static TensorText shape_of(const Parameter *p) {
  return safetensors_shape(&(SafetensorsEntry){.rank = p->rank, .shape = {p->shape[0], p->shape[1]}});
}

static void check_fit(StoredTensor t, const Parameter *p) {
  const SafetensorsEntry *e = t.entry;
  if (strcmp(safetensors_shape(e).text, shape_of(p).text))
    fail("%s: %s has the shape %s, and config.json makes it %s", t.file->path, e->name,
         safetensors_shape(e).text, shape_of(p).text);
  if (!safetensors_convert(e->dtype, NULL, 0, DTYPE_F32, NULL))
    fail("%s: %s is stored as %s; weights can be F32, BF16 or F16", t.file->path, e->name, e->dtype);
}

// A stored copy of a tied head must equal the embedding.
static void check_tied_head(const Model *model, const TensorSet *set, StoredTensor embedding) {
  const SafetensorsEntry *e = embedding.entry;
  StoredTensor head = tensor_set_find(set, head_name);
  if (model->config.tie_word_embeddings && head.entry &&
      (strcmp(head.entry->dtype, e->dtype) || head.entry->bytes != e->bytes ||
       memcmp(head.file->mapping.bytes + head.entry->offset, embedding.file->mapping.bytes + e->offset,
              e->bytes)))
    fail("%s: %s differs from %s, and config.json says tie_word_embeddings; set it to false there to train "
         "both",
         head.file->path, head_name, e->name);
}

// Fails unless the set is exactly the model's tensors.
static void check_set(Model *model, const TensorSet *set) {
  int64_t count = model->parameters.count;
  StoredTensor *stored = host_alloc(count, sizeof *stored, "a list of tensors");
  for (const TensorFile *file = set->files; file < set->files + set->count; file++)
    for (int64_t k = 0; k < file->header.count; k++) {
      StoredTensor t = {file, &file->header.entries[k]};
      const Parameter *p = owner_of(model, set, t.entry->name);
      if (!p && means_nothing(model, t.entry->name)) continue;
      if (!p)
        fail("%s contains %s %s, which the model described by config.json does not have", file->path,
             t.entry->name, safetensors_shape(t.entry).text);
      StoredTensor *place = &stored[p - model->parameters.items];
      if (place->entry) fail("%s holds %s, which %s holds too", file->path, t.entry->name, place->file->path);
      check_fit(t, p);
      *place = t;
    }
  int64_t missing = 0;
  const Parameter *first = NULL;
  for (int64_t i = count - 1; i >= 0; i--)
    if (!stored[i].entry) missing++, first = &model->parameters.items[i];
  if (missing)
    fail("%s lacks %s %s%s, which the model that config.json describes needs", set->path.text, first->name,
         shape_of(first).text, missing > 1 ? " and others" : "");
  check_tied_head(model, set, stored[0]);
  free(stored);
}

static void optimizer_load(Model *model, Backend *backend, const char *folder) {
  TensorSet set = tensor_set_open(folder, STATE_STEM);
  const ParameterSet *all = &model->parameters;
  for (const Parameter *p = all->items; p < all->items + all->count; p++)
    for (int s = 0; s <= OPTIMIZER_STATES; s++) {
      bool master = s == OPTIMIZER_STATES; // not every run stores it
      const Tensor *role = master ? all->value : all->state[s];
      if (!tensor_exists(role[p->group])) continue;
      TensorToStore stored = parameter_to_store(master ? "master" : optimizer_states[s].name, all, p, role,
                                                role[p->group].dtype);
      StoredTensor t = tensor_set_find(&set, stored.name);
      if (!t.entry && !master)
        fail("%s lacks the moments of %s; --init instead of --resume starts from the weights alone",
             set.path.text, p->name);
      if (!t.entry) continue;
      check_fit(t, p);
      tensor_read(t, backend, all, p, role, master ? all->master : NULL);
    }
  tensor_set_close(&set);
}

void weights_load(Model *model, Backend *backend, const char *folder, bool state) {
  TensorSet set = tensor_set_open(folder, MODEL_STEM);
  const ParameterSet *all = &model->parameters;
  if (!set.count)
    fail("%s does not exist, nor an index of shards next to it; save the model as safetensors "
         "(save_pretrained of transformers does)",
         set.path.text);
  check_set(model, &set);
  for (const TensorFile *file = set.files; file < set.files + set.count; file++)
    for (const SafetensorsEntry *e = file->header.entries; e < file->header.entries + file->header.count;
         e++) {
      const Parameter *p = owner_of(model, &set, e->name);
      if (p) tensor_read((StoredTensor){file, e}, backend, all, p, all->value, all->master);
    }
  tensor_set_close(&set);
  if (state) optimizer_load(model, backend, folder);
}

TensorToStore parameter_to_store(const char *prefix, const ParameterSet *all, const Parameter *p,
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

void weights_store(const Model *model, Backend *backend, Folder *folder, Dtype dtype, size_t shard_bytes) {
  const ParameterSet *all = &model->parameters;
  // The weights without rounding.
  const Tensor *exact = tensor_exists(all->master[GROUP_MATRICES]) ? all->master : all->value;
  const Tensor *role = dtype == DTYPE_F32 ? exact : all->value;
  TensorToStore *weights = host_alloc(all->count, sizeof *weights, "a list of tensors");
  TensorToStore *rest = host_alloc((OPTIMIZER_STATES + 1) * all->count, sizeof *rest, "a list of tensors");
  int64_t count = 0;
  for (int64_t i = 0; i < all->count; i++) {
    const Parameter *p = &all->items[i];
    weights[i] = parameter_to_store(NULL, all, p, role, dtype);
    for (int s = 0; s < OPTIMIZER_STATES; s++)
      if (tensor_exists(all->state[s][p->group]))
        rest[count++] = parameter_to_store(optimizer_states[s].name, all, p, all->state[s],
                                           all->state[s][p->group].dtype);
    if (dtype == DTYPE_BF16 && exact[p->group].dtype == DTYPE_F32)
      rest[count++] = parameter_to_store("master", all, p, exact, DTYPE_F32);
  }
  tensor_set_write(folder, MODEL_STEM, weights, all->count, backend, shard_bytes);
  tensor_set_write(folder, STATE_STEM, rest, count, backend, shard_bytes);
  free(weights);
  free(rest);
}
