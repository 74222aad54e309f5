#include "kernels/base/memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/base/alloc.h"
#include "kernels/base/fail.h"
#include "kernels/base/text.h"

// Planned addresses start here: never NULL, never handed to anything that would follow them.
static const uintptr_t PLANNED_BASE = (uintptr_t)1 << 44, PLANNED_HOST_BASE = (uintptr_t)1 << 46;

const char *memory_category_name(MemoryCategory category) {
  static const char *const names[MEMORY_CATEGORY_COUNT] = {
      "weights",     "master weights",       "gradients",     "optimizer moments", "tables and batch",
      "activations", "activation gradients", "lm_head, loss", "workspace"};
  return names[category];
}

size_t memory_padded(size_t bytes) {
  return (bytes + MEMORY_ALIGNMENT - 1) / MEMORY_ALIGNMENT * MEMORY_ALIGNMENT;
}

// No ledger counts beyond this, so that sums of absurd sizes do not wrap around.
static const size_t COUNTABLE = (size_t)1 << 62;

static size_t bytes_of(Dtype dtype, int64_t d0, int64_t d1) {
  size_t bytes;
  bool wraps = __builtin_mul_overflow((size_t)d0, (size_t)d1, &bytes) ||
               __builtin_mul_overflow(bytes, dtype_bytes(dtype), &bytes);
  return wraps || bytes > COUNTABLE ? COUNTABLE : bytes;
}

// --- the ledger --------------------------------------------------------------------------------------------

static void ledger_event(Ledger *ledger, const char *name) {
  if (!ledger->recording) return;
  ledger->events = host_grow(ledger->events, ledger->event_count, &ledger->event_capacity,
                             sizeof *ledger->events, "the memory ledger");
  LedgerEvent *event = &ledger->events[ledger->event_count++];
  event->name = name;
  event->step = ledger->step;
  event->seconds = ledger->clock ? ledger->clock(ledger->clock_context) : 0;
  memcpy(event->bytes, ledger->now, sizeof event->bytes);
}

static void ledger_add(Ledger *ledger, const MemoryBlock *block, bool on_stack) {
  ledger->now[block->category] += block->bytes;
  ledger->total += block->bytes;
  if (on_stack) ledger->stack += block->bytes;
  if (ledger->now[block->category] > ledger->highest[block->category])
    ledger->highest[block->category] = ledger->now[block->category];
  if (ledger->stack > ledger->stack_peak) ledger->stack_peak = ledger->stack;
  if (ledger->total > ledger->peak) {
    ledger->peak = ledger->total;
    memcpy(ledger->at_peak, ledger->now, sizeof ledger->at_peak);
  }
  ledger_event(ledger, block->name);
}

static void ledger_remove(Ledger *ledger, const MemoryBlock *block) {
  ledger->now[block->category] -= block->bytes;
  ledger->total -= block->bytes;
  ledger->stack -= block->bytes;
  ledger_event(ledger, block->name);
}

void ledger_reset_peak(Ledger *ledger) {
  memcpy(ledger->highest, ledger->now, sizeof ledger->highest);
  memcpy(ledger->at_peak, ledger->now, sizeof ledger->at_peak);
  ledger->peak = ledger->total;
  ledger->stack_peak = ledger->stack;
}

// --- the memory --------------------------------------------------------------------------------------------

Memory memory_create(const MemorySource *source) {
  Memory memory = {.planning = source == NULL};
  if (source) memory.source = *source;
  return memory;
}

static void *source_allocate(const Memory *memory, size_t bytes, bool shared) {
  const MemorySource *source = &memory->source;
  size_t used = memory->ledger.total - memory->ledger.stack + memory->stack_capacity;
  if (memory->limit && (used > memory->limit || bytes > memory->limit - used)) return NULL;
  if (shared && source->allocate_shared) return source->allocate_shared(source->context, bytes);
  return source->allocate(source->context, bytes);
}

static void source_release(Memory *memory, void *data, size_t bytes) {
  if (!memory->planning && data) memory->source.release(memory->source.context, data, bytes);
}

void memory_destroy(Memory *memory) {
  const MemorySource *source = &memory->source;
  for (int64_t i = 0; i < memory->reserved_count && !memory->planning; i++) {
    const MemoryBlock *block = &memory->reserved[i];
    (block->on_host ? source->release_host : source->release)(source->context, block->data, block->bytes);
  }
  source_release(memory, memory->stack_base, memory->stack_capacity);
  free(memory->reserved);
  free(memory->pushed);
  free(memory->ledger.events);
  *memory = (Memory){0};
}

static _Atomic(const char *) advice;

void memory_set_advice(const char *text) {
  advice = text;
}

const char *memory_holders(const size_t bytes[MEMORY_CATEGORY_COUNT], size_t min, char text[512]) {
  size_t length = 0;
  *text = 0;
  for (int c = 0; c < MEMORY_CATEGORY_COUNT; c++)
    if (bytes[c] >= min)
      length += (size_t)snprintf(text + length, 512 - length, "%s%s %s", length ? ", " : "",
                                 memory_category_name((MemoryCategory)c), text_bytes(bytes[c]).text);
  return text;
}

static _Noreturn void out_of_memory(const Memory *memory, const char *name, size_t bytes) {
  char holders[512];
  const Ledger *ledger = &memory->ledger;
  const char *hint = advice;
  memory_holders(ledger->now, 1, holders);
  fail("out of memory: %s needs %s more, and %s are in use (%s)%s%s", name, text_bytes(bytes).text,
       text_bytes(ledger->total).text, *holders ? holders : "nothing yet", hint ? "; " : "",
       hint ? hint : "");
}

size_t ledger_host_bytes(const Ledger *ledger) {
  size_t bytes = 0;
  for (int c = 0; c < MEMORY_CATEGORY_COUNT; c++) bytes += ledger->host[c];
  return bytes;
}

static void require_countable(const Memory *memory, const char *name, size_t bytes) {
  if (bytes >= COUNTABLE - memory->ledger.total) out_of_memory(memory, name, bytes);
}

static void keep_reserved(Memory *memory, MemoryBlock block) {
  memory->reserved = host_grow(memory->reserved, memory->reserved_count, &memory->reserved_capacity,
                               sizeof *memory->reserved, "the memory ledger");
  memory->reserved[memory->reserved_count++] = block;
}

void *memory_reserve(Memory *memory, const char *name, MemoryCategory category, size_t bytes) {
  bytes = memory_padded(bytes);
  require_countable(memory, name, bytes);
  void *data = (void *)(PLANNED_BASE + memory->ledger.total);
  bool shared = category == MEMORY_WEIGHTS || category == MEMORY_GRADIENTS; // what ranks exchange most of
  if (!memory->planning) data = source_allocate(memory, bytes, shared);
  if (!data) out_of_memory(memory, name, bytes);
  MemoryBlock block = {.name = name, .category = category, .bytes = bytes, .data = data};
  keep_reserved(memory, block);
  ledger_add(&memory->ledger, &block, false);
  return data;
}

Tensor memory_reserve_1d(Memory *memory, const char *name, MemoryCategory category, Dtype dtype, int64_t d0) {
  return tensor_1d(memory_reserve(memory, name, category, bytes_of(dtype, d0, 1)), dtype, d0);
}

void *memory_reserve_host(Memory *memory, const char *name, MemoryCategory category, size_t bytes) {
  const MemorySource *source = &memory->source;
  size_t others = ledger_host_bytes(&memory->ledger);
  bytes = memory_padded(bytes);
  void *data = NULL;
  if (memory->planning && bytes < COUNTABLE - others)
    data = (void *)(PLANNED_HOST_BASE + others);
  else if (!memory->planning)
    data = source->allocate_host(source->context, bytes);
  if (!data)
    fail("out of host memory: %s needs %s more, and %s are offloaded to it; offload less (--offload)", name,
         text_bytes(bytes).text, text_bytes(others).text);
  keep_reserved(memory, (MemoryBlock){name, category, bytes, data, .on_host = true});
  memory->ledger.host[category] += bytes;
  return data;
}

bool memory_plans_on_host(Tensor tensor) {
  return (uintptr_t)tensor.data >= PLANNED_HOST_BASE;
}

// The old stack goes first, so that both need not fit.
static bool try_stack(Memory *memory, size_t capacity) {
  source_release(memory, memory->stack_base, memory->stack_capacity);
  memory->stack_base = NULL;
  memory->stack_capacity = 0;
  if (memory->planning || !capacity) return true;
  memory->stack_base = source_allocate(memory, capacity, false);
  if (memory->stack_base) memory->stack_capacity = capacity;
  return memory->stack_base;
}

void memory_set_stack(Memory *memory, size_t capacity) {
  if (memory->pushed_count)
    fail("internal: the memory stack is remade while %s lies on it", memory->pushed[0].name);
  size_t before = memory->stack_capacity;
  if (try_stack(memory, capacity)) return;
  try_stack(memory, before); // its memory was there a moment ago
  out_of_memory(memory, "the step's stack", capacity);
}

static void *push(Memory *memory, const char *name, MemoryCategory category, size_t bytes) {
  bytes = memory_padded(bytes);
  require_countable(memory, name, bytes);
  size_t offset = memory->ledger.stack;
  if (!memory->planning && offset + bytes > memory->stack_capacity) out_of_memory(memory, name, bytes);
  memory->pushed = host_grow(memory->pushed, memory->pushed_count, &memory->pushed_capacity,
                             sizeof *memory->pushed, "the memory ledger");
  MemoryBlock *block = &memory->pushed[memory->pushed_count++];
  *block = (MemoryBlock){.name = name, .category = category, .bytes = bytes};
  ledger_add(&memory->ledger, block, true);
  uintptr_t base = memory->planning ? PLANNED_BASE : (uintptr_t)memory->stack_base;
  void *data = (void *)(base + offset);
  if (memory->poison && bytes) memory->source.poison(memory->source.context, data, bytes);
  return data;
}

Tensor memory_push_1d(Memory *memory, const char *name, MemoryCategory category, Dtype dtype, int64_t d0) {
  return tensor_1d(push(memory, name, category, bytes_of(dtype, d0, 1)), dtype, d0);
}

Tensor memory_push_2d(Memory *memory, const char *name, MemoryCategory category, Dtype dtype, int64_t d0,
                      int64_t d1) {
  return tensor_2d(push(memory, name, category, bytes_of(dtype, d0, d1)), dtype, d0, d1);
}

MemoryMark memory_mark(const Memory *memory) {
  return memory->pushed_count;
}

void memory_pop_to(Memory *memory, MemoryMark mark) {
  while (memory->pushed_count > mark) ledger_remove(&memory->ledger, &memory->pushed[--memory->pushed_count]);
}
