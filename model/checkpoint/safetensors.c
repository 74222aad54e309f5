#include "model/checkpoint/safetensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/json.h"
#include "kernels/alloc.h"
#include "kernels/system.h"

// The values after the length are little-endian, as are the machines this program runs on.
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "safetensors files are read as they lie");

enum { LENGTH_BYTES = 8, MAX_HEADER = 100000000 }; // the limit of the format's library

static const struct {
  const char *name;
  size_t bytes;
} dtypes[] = {{"F32", 4},  {"BF16", 2}, {"F16", 2},     {"F64", 8},    {"I64", 8}, {"I32", 4},
              {"I16", 2},  {"I8", 1},   {"U64", 8},     {"U32", 4},    {"U16", 2}, {"U8", 1},
              {"BOOL", 1}, {"C64", 8},  {"F8_E4M3", 1}, {"F8_E5M2", 1}};

const char *safetensors_dtype(Dtype dtype) {
  return dtype == DTYPE_BF16 ? "BF16" : dtype == DTYPE_I32 ? "I32" : "F32";
}

TensorText safetensors_shape(const SafetensorsEntry *e) {
  TensorText out = {"["};
  for (int i = 0; i < e->rank; i++) {
    size_t length = strlen(out.text);
    snprintf(out.text + length, sizeof out.text - length, i ? ", %lld" : "%lld", (long long)e->shape[i]);
  }
  strncat(out.text, "]", sizeof out.text - strlen(out.text) - 1);
  return out;
}

// --- reading -----------------------------------------------------------------------------------------------

static bool read_shape(const cJSON *shape, SafetensorsEntry *e, Reason *reason) {
  if (!cJSON_IsArray(shape)) return refuse(reason, "%s has no shape", e->name);
  const cJSON *axis;
  cJSON_ArrayForEach(axis, shape) {
    if (e->rank == SAFETENSORS_RANK) return refuse(reason, "%s has more than %d axes", e->name, e->rank);
    if (!json_is_whole(axis)) return refuse(reason, "%s has an axis that is no length", e->name);
    e->shape[e->rank++] = (int64_t)axis->valuedouble;
  }
  return true;
}

static bool read_dtype(const cJSON *dtype, SafetensorsEntry *e, size_t *bytes, Reason *reason) {
  if (!cJSON_IsString(dtype)) return refuse(reason, "%s has no dtype", e->name);
  for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++)
    if (!strcmp(dtype->valuestring, dtypes[i].name)) {
      e->dtype = dtypes[i].name;
      *bytes = dtypes[i].bytes;
      return true;
    }
  return refuse(reason, "%s has the unknown dtype %.32s", e->name, dtype->valuestring);
}

// `data` is where the values begin, `size` the file's.
static bool read_place(const cJSON *offsets, size_t data, size_t size, SafetensorsEntry *e, Reason *reason) {
  const cJSON *first = cJSON_GetArrayItem(offsets, 0), *last = cJSON_GetArrayItem(offsets, 1);
  if (!cJSON_IsArray(offsets) || cJSON_GetArraySize(offsets) != 2 || !json_is_whole(first) ||
      !json_is_whole(last) || first->valuedouble > last->valuedouble)
    return refuse(reason, "%s has no data_offsets", e->name);
  if (last->valuedouble > (double)(size - data))
    return refuse(reason, "%s ends at byte %.0f of the data, and the file has %zu: it is cut short", e->name,
                  last->valuedouble, size - data);
  e->offset = data + (size_t)first->valuedouble;
  e->bytes = (size_t)last->valuedouble - (size_t)first->valuedouble;
  return true;
}

static bool read_entry(const cJSON *item, size_t data, size_t size, SafetensorsEntry *e, Reason *reason) {
  size_t bytes = 0;
  if (strlen(e->name) >= SAFETENSORS_NAME)
    return refuse(reason, "a tensor's name is too long: %.40s...", e->name);
  if (!cJSON_IsObject(item)) return refuse(reason, "%s is not described", e->name);
  if (!read_dtype(json_member(item, "dtype"), e, &bytes, reason)) return false;
  if (!read_shape(json_member(item, "shape"), e, reason)) return false;
  if (!read_place(json_member(item, "data_offsets"), data, size, e, reason)) return false;
  bool fits = true;
  for (int i = 0; i < e->rank; i++)
    fits = fits && !__builtin_mul_overflow(bytes, (size_t)e->shape[i], &bytes);
  if (!fits || bytes != e->bytes)
    return refuse(reason, "%s, %s %s, has %zu bytes", e->name, e->dtype, safetensors_shape(e).text, e->bytes);
  return true;
}

static int by_offset(const void *a, const void *b) {
  const SafetensorsEntry *x = a, *y = b;
  if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
  return (x->bytes > y->bytes) - (x->bytes < y->bytes); // empty tensors come before the one that follows them
}

static int by_name(const void *a, const void *b) {
  return strcmp((*(SafetensorsEntry *const *)a)->name, (*(SafetensorsEntry *const *)b)->name);
}

static bool check_names(const SafetensorsHeader *h, Reason *reason) {
  SafetensorsEntry **sorted = host_alloc(h->count, sizeof *sorted, "the names of tensors");
  for (int64_t i = 0; i < h->count; i++) sorted[i] = &h->entries[i];
  qsort(sorted, (size_t)h->count, sizeof *sorted, by_name);
  bool distinct = true;
  for (int64_t i = 1; i < h->count && distinct; i++)
    if (!strcmp(sorted[i - 1]->name, sorted[i]->name))
      distinct = refuse(reason, "%s is listed twice", sorted[i]->name);
  free(sorted);
  return distinct;
}

static bool check_places(const SafetensorsHeader *h, size_t data, size_t size, Reason *reason) {
  size_t end = data;
  for (int64_t i = 0; i < h->count; i++) {
    const SafetensorsEntry *e = &h->entries[i];
    if (e->offset != end)
      return refuse(reason, "%s begins at byte %zu of the data, where %zu should be: tensors %s", e->name,
                    e->offset - data, end - data, e->offset < end ? "overlap" : "have gaps between them");
    end = e->offset + e->bytes;
  }
  if (end != size) return refuse(reason, "%zu bytes behind the last tensor belong to none", size - end);
  return true;
}

static bool read_entries(const cJSON *json, size_t data, size_t size, SafetensorsHeader *h, Reason *reason) {
  h->entries = host_alloc(cJSON_GetArraySize(json), sizeof *h->entries, "the header of a safetensors file");
  const cJSON *item;
  cJSON_ArrayForEach(item, json) {
    if (!strcmp(item->string, "__metadata__")) continue;
    SafetensorsEntry *e = &h->entries[h->count++];
    e->name = text_format("%s", item->string);
    if (!read_entry(item, data, size, e, reason)) return false;
  }
  qsort(h->entries, (size_t)h->count, sizeof *h->entries, by_offset);
  return check_names(h, reason) && check_places(h, data, size, reason);
}

bool safetensors_parse(const char *bytes, size_t size, SafetensorsHeader *h, Reason *reason) {
  *h = (SafetensorsHeader){0};
  uint64_t length;
  if (size < LENGTH_BYTES) return refuse(reason, "it has %zu bytes, too few for a safetensors file", size);
  memcpy(&length, bytes, sizeof length);
  if (!length || length > MAX_HEADER || length > size - LENGTH_BYTES)
    return refuse(reason, "its header would have %llu bytes: it is cut short or no safetensors file",
                  (unsigned long long)length);
  if (memmem(bytes + LENGTH_BYTES, (size_t)length, "\\u0000", 6))
    return refuse(reason, "its header has the character \\u0000, which no name has");
  cJSON *json = bytes[LENGTH_BYTES] == '{' ? json_parse(bytes + LENGTH_BYTES, (size_t)length, reason) : NULL;
  if (!json) return refuse(reason, "its header is no JSON object: it is damaged or no safetensors file");
  bool valid = read_entries(json, LENGTH_BYTES + (size_t)length, size, h, reason);
  cJSON_Delete(json);
  if (!valid) safetensors_free(h);
  return valid;
}

void safetensors_free(SafetensorsHeader *h) {
  for (int64_t i = 0; i < h->count; i++) free(h->entries[i].name);
  free(h->entries);
  *h = (SafetensorsHeader){0};
}

// --- writing -----------------------------------------------------------------------------------------------

char *safetensors_compose(const SafetensorsEntry *entries, int64_t count, size_t *length) {
  cJSON *json = cJSON_CreateObject();
  cJSON_AddStringToObject(cJSON_AddObjectToObject(json, "__metadata__"), "format", "pt");
  size_t end = 0;
  for (int64_t i = 0; i < count; i++) {
    cJSON *item = cJSON_AddObjectToObject(json, entries[i].name);
    cJSON_AddStringToObject(item, "dtype", entries[i].dtype);
    cJSON *shape = cJSON_AddArrayToObject(item, "shape"),
          *place = cJSON_AddArrayToObject(item, "data_offsets");
    for (int k = 0; k < entries[i].rank; k++)
      cJSON_AddItemToArray(shape, cJSON_CreateNumber((double)entries[i].shape[k]));
    cJSON_AddItemToArray(place, cJSON_CreateNumber((double)end));
    end += entries[i].bytes;
    cJSON_AddItemToArray(place, cJSON_CreateNumber((double)end));
  }
  char *text = json_print(json, false);
  cJSON_Delete(json);
  size_t written = strlen(text), padded = (written + 7) / 8 * 8;
  char *out = host_alloc((int64_t)(LENGTH_BYTES + padded), 1, "the header of a safetensors file");
  uint64_t header_bytes = padded;
  memcpy(out, &header_bytes, sizeof header_bytes);
  memset(out + LENGTH_BYTES, ' ', padded);
  memcpy(out + LENGTH_BYTES, text, written);
  free(text);
  *length = LENGTH_BYTES + padded;
  return out;
}

// --- values ------------------------------------------------------------------------------------------------

static inline float from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// A multiplication shifts the exponent, which also normalizes subnormals; infinities and NaN get theirs.
static inline float widen_f16(uint16_t half) {
  uint32_t sign = (uint32_t)(half & 0x8000u) << 16, rest = (uint32_t)(half & 0x7FFFu) << 13;
  uint32_t special = rest >= 0x7C00u << 13 ? 0x7F800000u : 0;
  float magnitude = from_bits(rest) * 0x1p112f;
  uint32_t bits;
  memcpy(&bits, &magnitude, sizeof bits);
  return from_bits(sign | bits | special);
}

bool safetensors_widen(const char *dtype, const char *from, int64_t count, float *to) {
  bool f32 = !strcmp(dtype, "F32"), bf16 = !strcmp(dtype, "BF16"), f16 = !strcmp(dtype, "F16");
  if (!f32 && !bf16 && !f16) return false;
  if (f32) {
    copy_bytes(to, from, (size_t)count * sizeof *to);
    return true;
  }
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < count; i++) {
    uint16_t half;
    memcpy(&half, from + 2 * i, sizeof half);
    to[i] = bf16 ? from_bits((uint32_t)half << 16) : widen_f16(half);
  }
  return true;
}
