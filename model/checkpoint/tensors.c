#include "model/checkpoint/tensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fail.h"
#include "kernels/ranks/ranks.h"
#include "model/checkpoint/json.h"

enum { AT_ONCE = 1 << 22 }; // numbers on the way between disk and backend

static char *file_name(const char *stem, int number, int of) {
  char *name;
  int length = of > 1 ? asprintf(&name, "%s-%05d-of-%05d.safetensors", stem, number, of)
                      : asprintf(&name, "%s.safetensors", stem);
  if (length < 0) fail("out of host memory for the name of a file of %s", stem);
  return name;
}

static char *index_name(const char *stem) {
  char *name;
  if (asprintf(&name, "%s.safetensors.index.json", stem) < 0)
    fail("out of host memory for the name of %s", stem);
  return name;
}

static void *host_buffer(size_t bytes) {
  void *buffer = malloc(bytes);
  if (!buffer) fail("out of host memory for %zu MiB of weights on their way", bytes >> 20);
  return buffer;
}

// --- opening -----------------------------------------------------------------------------------------------

// Takes `path` over. False when there is no such file.
static bool add_file(TensorSet *set, char *path) {
  Mapping mapping = file_map(path);
  if (!mapping.bytes) return false;
  TensorFile file = {.path = path, .mapping = mapping};
  Reason reason;
  if (!safetensors_parse(mapping.bytes, mapping.size, &file.header, &reason))
    fail("%s: %s", path, reason.text);
  file.ahead = read_ahead_create(mapping);
  set->files = realloc(set->files, (size_t)(set->count + 1) * sizeof *set->files);
  if (!set->files) fail("out of host memory for the files of %s", set->path);
  set->files[set->count++] = file;
  return true;
}

static bool is_open(const TensorSet *set, const char *path) {
  for (int i = 0; i < set->count; i++)
    if (!strcmp(set->files[i].path, path)) return true;
  return false;
}

static void open_index(TensorSet *set, const char *folder, const cJSON *json) {
  const cJSON *map = cJSON_GetObjectItemCaseSensitive(json, "weight_map"), *item;
  if (!cJSON_IsObject(map)) fail("%s has no weight_map", set->path);
  cJSON_ArrayForEach(item, map) {
    if (!cJSON_IsString(item) || !is_plain_name(item->valuestring))
      fail("%s names no file of its folder for %s", set->path, item->string);
    char *path = path_join(folder, item->valuestring);
    if (is_open(set, path)) {
      free(path);
      continue;
    }
    if (!add_file(set, path))
      fail("%s does not exist, and %s says that %s is in it", path, set->path, item->string);
  }
  cJSON_ArrayForEach(item, map) {
    const TensorFile *file;
    char *path = path_join(folder, item->valuestring);
    if (!tensor_set_find(set, item->string, &file) || strcmp(file->path, path))
      fail("%s lacks %s, which %s says is in it", path, item->string, set->path);
    free(path);
  }
}

TensorSet tensor_set_open(const char *folder, const char *stem) {
  TensorSet set = {0};
  char *single = file_name(stem, 1, 1), *index = index_name(stem);
  set.path = path_join(folder, index);
  cJSON *json = json_read(set.path);
  if (json) {
    open_index(&set, folder, json);
    cJSON_Delete(json);
  } else {
    free(set.path);
    set.path = path_join(folder, single);
    char *path = path_join(folder, single);
    if (!add_file(&set, path)) free(path);
  }
  free(single);
  free(index);
  return set;
}

void tensor_set_close(TensorSet *set) {
  for (int i = 0; i < set->count; i++) {
    safetensors_free(&set->files[i].header);
    read_ahead_destroy(set->files[i].ahead);
    file_unmap(&set->files[i].mapping);
    free(set->files[i].path);
  }
  free(set->files);
  free(set->path);
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

// A tensor on its way from its file to a parameter.
typedef struct {
  const TensorFile *file;
  const SafetensorsEntry *entry;
  const Parameters *parameters;
  const Parameter *parameter;
  Backend *backend;
  float *values;
  uint16_t *rounded;
} Passage;

// Its numbers from `first` on, at `stored`, to one role of the parameter: straight from the file's pages
// where they are of the role's dtype, else by way of fp32, which the first role that needs it makes.
static void pass(const Passage *p, const Tensor *role, const char *stored, int64_t first, int64_t count,
                 bool *widened) {
  Dtype dtype = role[p->parameter->group].dtype;
  const void *numbers = stored;
  if (strcmp(p->entry->dtype, safetensors_dtype(dtype))) {
    if (!*widened && !safetensors_widen(p->entry->dtype, stored, count, p->values))
      fail("%s: %s is stored as %s; F32, BF16 and F16 can be read", p->file->path, p->entry->name,
           p->entry->dtype);
    *widened = true;
    numbers = p->values;
    dtype = DTYPE_F32;
  }
  shards_write(p->parameters, p->backend, role, p->parameter, first, count, numbers, dtype, p->rounded);
}

void tensor_read(const TensorFile *file, const SafetensorsEntry *e, Backend *backend,
                 const Parameters *parameters, const Parameter *parameter, const Tensor *role,
                 const Tensor *also_role) {
  int64_t total = parameter_elements(parameter);
  size_t width = total ? e->bytes / (size_t)total : 0;
  Passage p = {
      .file = file, .entry = e, .parameters = parameters, .parameter = parameter, .backend = backend};
  p.values = host_buffer(AT_ONCE * sizeof *p.values);
  p.rounded = host_buffer(AT_ONCE * sizeof *p.rounded);
  for (int64_t first = 0; first < total; first += AT_ONCE) {
    int64_t count = total - first < AT_ONCE ? total - first : AT_ONCE;
    size_t offset = e->offset + (size_t)first * width, bytes = (size_t)count * width;
    bool widened = false;
    read_ahead_reached(file->ahead, offset);
    pass(&p, role, file->mapping.bytes + offset, first, count, &widened);
    if (also_role) pass(&p, also_role, file->mapping.bytes + offset, first, count, &widened);
    file_done_with(&file->mapping, offset, bytes);
    ranks_alive();
  }
  free(p.values);
  free(p.rounded);
}

// --- writing -----------------------------------------------------------------------------------------------

static SafetensorsEntry entry_of(const TensorToStore *t) {
  SafetensorsEntry e = {
      .name = (char *)t->name, .dtype = safetensors_dtype(t->dtype), .rank = t->tensor.rank};
  for (int i = 0; i < e.rank; i++) e.shape[i] = t->tensor.shape[i];
  e.bytes = (size_t)tensor_count(t->tensor) * dtype_bytes(t->dtype);
  return e;
}

// Numbers [first, first + count) of it.
static void fetch(const TensorToStore *t, Backend *backend, int64_t first, int64_t count, void *host) {
  if (t->role)
    shards_read(t->parameters, backend, t->role, t->parameter, first, count, host);
  else if (backend->rank == 0)
    backend_to_host(backend, host, tensor_rows(tensor_flat(t->tensor), first, count));
}

static void write_numbers(Folder *folder, const TensorToStore *t, Backend *backend, void *raw, float *values,
                          uint16_t *rounded) {
  Dtype dtype = t->tensor.dtype;
  // Where others take part in fetching, even a folder that has no room goes through all of it.
  bool together = backend->ranks > 1;
  for (int64_t first = 0, total = tensor_count(t->tensor); first < total && (folder->ok || together);
       first += AT_ONCE) {
    int64_t count = total - first < AT_ONCE ? total - first : AT_ONCE;
    fetch(t, backend, first, count, raw);
    ranks_alive();
    if (!folder->ok) continue;
    const void *out = raw;
    if (t->dtype != dtype && t->dtype == DTYPE_F32) {
      safetensors_widen(safetensors_dtype(dtype), raw, count, values);
      out = values;
    } else if (t->dtype != dtype) {
      const float *wide = raw;
#pragma omp parallel for schedule(static)
      for (int64_t i = 0; i < count; i++) rounded[i] = bf16_from_f32(wide[i]);
      out = rounded;
    }
    folder_write(folder, out, (size_t)count * dtype_bytes(t->dtype));
  }
}

static void write_file(Folder *folder, const char *name, const TensorToStore *tensors,
                       const SafetensorsEntry *entries, int64_t count, Backend *backend) {
  size_t length;
  char *header = safetensors_compose(entries, count, &length);
  folder_file(folder, name);
  folder_write(folder, header, length);
  void *raw = host_buffer(AT_ONCE * sizeof(float));
  float *values = host_buffer(AT_ONCE * sizeof *values);
  uint16_t *rounded = host_buffer(AT_ONCE * sizeof *rounded);
  for (int64_t i = 0; i < count; i++) write_numbers(folder, &tensors[i], backend, raw, values, rounded);
  free(header);
  free(raw);
  free(values);
  free(rounded);
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
  SafetensorsEntry *entries = host_buffer((size_t)(count + 1) * sizeof *entries);
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
    char *name = index_name(stem), *text = cJSON_Print(index);
    if (!text) fail("out of host memory for the index of %s", stem);
    folder_file(folder, name);
    folder_write(folder, text, strlen(text));
    free(name);
    free(text);
  }
  cJSON_Delete(index);
  free(entries);
}
