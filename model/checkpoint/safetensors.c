#include "model/checkpoint/safetensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/base/alloc.h"

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

// `data` is where the values begin, `size` the file's.
static bool read_entry(const cJSON *item, size_t data, size_t size, SafetensorsEntry *e, Reason *reason) {
  const char *dtype = json_text(item, "dtype");
  const cJSON *shape = json_member(item, "shape"), *offsets = json_member(item, "data_offsets"), *axis;
  const cJSON *first = cJSON_GetArrayItem(offsets, 0), *last = cJSON_GetArrayItem(offsets, 1);
  if (strlen(e->name) >= SAFETENSORS_NAME)
    return refuse(reason, "a tensor's name is too long: %.40s...", e->name);
  if (!dtype || !cJSON_IsArray(shape) || !cJSON_IsArray(offsets) || cJSON_GetArraySize(offsets) != 2 ||
      !json_is_whole(first) || !json_is_whole(last) || first->valuedouble > last->valuedouble)
    return refuse(reason, "%s lacks a dtype, a shape or data_offsets", e->name);
  size_t bytes = 0;
  for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++)
    if (!strcmp(dtype, dtypes[i].name)) e->dtype = dtypes[i].name, bytes = dtypes[i].bytes;
  if (!bytes) return refuse(reason, "%s has the unknown dtype %.32s", e->name, dtype);
  if (last->valuedouble > (double)(size - data))
    return refuse(reason, "%s ends at byte %.0f of the data, and the file has %zu: it is cut short", e->name,
                  last->valuedouble, size - data);
  e->offset = data + (size_t)first->valuedouble;
  e->bytes = (size_t)last->valuedouble - (size_t)first->valuedouble;
  bool fits = true;
  cJSON_ArrayForEach(axis, shape) {
    if (e->rank == SAFETENSORS_RANK) return refuse(reason, "%s has more than %d axes", e->name, e->rank);
    if (!json_is_whole(axis)) return refuse(reason, "%s has an axis that is no length", e->name);
    e->shape[e->rank++] = (int64_t)axis->valuedouble;
    fits = fits && !__builtin_mul_overflow(bytes, (size_t)axis->valuedouble, &bytes);
  }
  return (fits && bytes == e->bytes) ||
         refuse(reason, "%s, %s %s, has %zu bytes", e->name, e->dtype, safetensors_shape(e).text, e->bytes);
}

static int by_offset(const void *a, const void *b) {
  const SafetensorsEntry *x = a, *y = b;
  if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
  return (x->bytes > y->bytes) - (x->bytes < y->bytes); // empty tensors come before the one that follows them
}

static bool read_entries(const cJSON *json, size_t data, size_t size, SafetensorsHeader *h, Reason *reason) {
  h->entries = host_alloc(cJSON_GetArraySize(json), sizeof *h->entries, "the header of a safetensors file");
  const cJSON *item;
  cJSON_ArrayForEach(item, json) {
    if (!strcmp(item->string, "__metadata__")) continue;
    SafetensorsEntry *e = &h->entries[h->count++];
    e->name = item->string;
    if (!read_entry(item, data, size, e, reason)) return false;
  }
  qsort(h->entries, (size_t)h->count, sizeof *h->entries, by_offset);
  size_t end = data;
  for (const SafetensorsEntry *e = h->entries; e < h->entries + h->count; end = e->offset + e->bytes, e++)
    if (e->offset != end)
      return refuse(reason, "%s begins at byte %zu of the data, where %zu should be: tensors %s", e->name,
                    e->offset - data, end - data, e->offset < end ? "overlap" : "have gaps between them");
  return end == size || refuse(reason, "%zu bytes behind the last tensor belong to none", size - end);
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
  if (bytes[LENGTH_BYTES] != '{')
    return refuse(reason, "its header is no JSON object: it is damaged or no safetensors file");
  h->json = json_parse(bytes + LENGTH_BYTES, (size_t)length, reason);
  if (!h->json) return refuse(reason, "its header is damaged: %s", reason->text);
  bool valid = read_entries(h->json, LENGTH_BYTES + (size_t)length, size, h, reason);
  if (!valid) safetensors_free(h);
  return valid;
}

void safetensors_free(SafetensorsHeader *h) {
  cJSON_Delete(h->json);
  free(h->entries);
  *h = (SafetensorsHeader){0};
}

char *safetensors_compose(const SafetensorsEntry *entries, int64_t count) {
  cJSON *json = cJSON_CreateObject();
  cJSON_AddStringToObject(cJSON_AddObjectToObject(json, "__metadata__"), "format", "pt");
  double end = 0;
  for (const SafetensorsEntry *e = entries; e < entries + count; e++) {
    double shape[SAFETENSORS_RANK], offsets[] = {end, end + (double)e->bytes};
    for (int k = 0; k < e->rank; k++) shape[k] = (double)e->shape[k];
    cJSON *item = cJSON_AddObjectToObject(json, e->name);
    cJSON_AddStringToObject(item, "dtype", e->dtype);
    cJSON_AddItemToObject(item, "shape", cJSON_CreateDoubleArray(shape, e->rank));
    cJSON_AddItemToObject(item, "data_offsets", cJSON_CreateDoubleArray(offsets, 2));
    end = offsets[1];
  }
  char *text = json_print(json, false), *padded = text_format("%s%*s", text, (int)(-strlen(text) & 7), "");
  cJSON_Delete(json);
  free(text);
  return padded;
}

static inline float from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// A multiplication shifts the exponent, which also normalizes subnormals; infinities and NaN get theirs.
static inline float widen_f16(uint32_t half) {
  uint32_t sign = (half & 0x8000u) << 16, rest = (half & 0x7FFFu) << 13;
  uint32_t special = rest >= 0x7C00u << 13 ? 0x7F800000u : 0;
  float magnitude = from_bits(rest) * 0x1p112f;
  uint32_t bits;
  memcpy(&bits, &magnitude, sizeof bits);
  return from_bits(sign | bits | special);
}

bool safetensors_convert(const char *stored, const char *from, int64_t count, Dtype dtype, void *to) {
  bool f32 = !strcmp(stored, "F32"), bf16 = !strcmp(stored, "BF16");
  if (!f32 && !bf16 && strcmp(stored, "F16")) return false;
  size_t width = f32 ? 4 : 2;
  float *exact = to;
  uint16_t *rounded = to;
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < count; i++) {
    uint32_t bits = 0;
    memcpy(&bits, from + (size_t)i * width, width);
    float value = f32 ? from_bits(bits) : bf16 ? from_bits(bits << 16) : widen_f16(bits);
    if (dtype == DTYPE_F32)
      exact[i] = value;
    else
      rounded[i] = bf16_from_f32(value);
  }
  return true;
}
