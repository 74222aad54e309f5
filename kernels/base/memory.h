// Memory with names.
//
// Memory that lives as long as the program (weights, gradients, optimizer state, tables) is reserved once.
// Memory within a step (activations, logits chunks, workspaces) is pushed on and popped off one stack, a
// single allocation whose size the plan finds. Every reservation and push has a name and a category, so the
// ledger knows who holds how many bytes, the high-water mark, and the timeline of a step. It counts memory
// offloaded to the host separately.
//
// On a GPU kernels run behind the host, in the order of one stream. Popping returns bytes to later pushes of
// the same stream order, so nothing has to wait.
#pragma once

#include "kernels/base/tensor.h"

__BEGIN_DECLS

typedef enum {
  MEMORY_WEIGHTS,              // what the GEMMs read
  MEMORY_MASTER_WEIGHTS,       // the fp32 copy that the optimizer updates, if the GEMMs read bf16
  MEMORY_GRADIENTS,            // of the weights
  MEMORY_MOMENTS,              // of the optimizer
  MEMORY_TABLES,               // rotary angles, the batch, scalars
  MEMORY_ACTIVATIONS,          // saved by the forward pass for the backward pass
  MEMORY_ACTIVATION_GRADIENTS, // gradients flowing back through the layers
  MEMORY_HEAD,                 // LM head + loss: logits or a chunk of them, row statistics
  MEMORY_WORKSPACE,            // scratch inside one operation
  MEMORY_CATEGORY_COUNT
} MemoryCategory;

const char *memory_category_name(MemoryCategory category);

// "weights 1.20 GiB, gradients 1.20 GiB": the categories that hold `min` bytes or more, written to `text`.
const char *memory_holders(const size_t bytes[MEMORY_CATEGORY_COUNT], size_t min, char text[512]);

// Every block starts on a multiple of this many bytes, and the ledger counts the padding.
enum { MEMORY_ALIGNMENT = 256 };
size_t memory_padded(size_t bytes);

// A source of bytes. A plan has none.
typedef struct {
  void *(*allocate)(void *context, size_t bytes); // zeroed; NULL if it has not that many
  void (*release)(void *context, void *data, size_t bytes);
  // As allocate, within reach of other ranks' devices; NULL: use allocate.
  void *(*allocate_shared)(void *context, size_t bytes);
  // As allocate, in the host's memory, at addresses that the device can access too.
  void *(*allocate_host)(void *context, size_t bytes);
  void (*release_host)(void *context, void *data, size_t bytes);
  void (*poison)(void *context, void *data, size_t bytes); // fills with bytes 0xFF (NaN in fp32 and bf16)
  void *context;
} MemorySource;

extern const MemorySource memory_pages; // pages.c: the host's memory

// The bytes in use after one reservation, push or pop, by category.
typedef struct {
  const char *name; // of the block that came or went
  int step;         // the ledger's
  double seconds;   // by the ledger's clock; 0 without one
  size_t bytes[MEMORY_CATEGORY_COUNT];
} LedgerEvent;

typedef struct {
  size_t now[MEMORY_CATEGORY_COUNT];     // bytes in use by category
  size_t highest[MEMORY_CATEGORY_COUNT]; // each category's high-water mark
  size_t total, peak;                    // bytes in use now, and at most
  size_t at_peak[MEMORY_CATEGORY_COUNT]; // who held them at the peak
  size_t stack, stack_peak;              // the part of both that lies on the stack
  size_t host[MEMORY_CATEGORY_COUNT];    // offloaded bytes, in none of the others
  // The timeline, kept only while `recording` is set.
  bool recording;
  int step;                       // the following events'
  double (*clock)(void *context); // dates the events; NULL: they have no dates
  void *clock_context;
  LedgerEvent *events;
  int64_t event_count, event_capacity;
} Ledger;

typedef struct {
  const char *name;
  MemoryCategory category;
  size_t bytes; // padded
  void *data;   // a reservation's
  bool on_host;
} MemoryBlock;

typedef struct Memory {
  MemorySource source;
  bool planning; // no source: addresses are made up
  bool poison;   // fill every push with NaN first (tests)
  size_t limit;  // bytes that may be in use, as on a smaller device; 0: all that the source has
  Ledger ledger;
  MemoryBlock *reserved;
  int64_t reserved_count, reserved_capacity;
  void *stack_base;
  size_t stack_capacity;
  MemoryBlock *pushed; // from the bottom of the stack up
  int64_t pushed_count, pushed_capacity;
} Memory;

// Sets the advice that ends the sentence when any memory runs out: "a smaller chunk needs less".
void memory_set_advice(const char *advice);

// A memory over a source, or one that only counts (source NULL). The stack has no bytes yet.
Memory memory_create(const MemorySource *source);
void memory_destroy(Memory *memory);

// Zeroed bytes that stay until memory_destroy, on the device or the host. Names must outlive the memory. If
// the source has no more, fails with a sentence that says who holds what.
void *memory_reserve(Memory *memory, const char *name, MemoryCategory category, size_t bytes);
void *memory_reserve_host(Memory *memory, const char *name, MemoryCategory category, size_t bytes);
bool memory_plans_on_host(Tensor tensor); // true for a plan's tensor that was reserved on the host
Tensor memory_reserve_1d(Memory *memory, const char *name, MemoryCategory category, Dtype dtype, int64_t d0);

// Creates (or replaces) the empty stack, which keeps its size on failure. Without this a plan's is boundless.
void memory_set_stack(Memory *memory, size_t capacity);

// A dense tensor on top of the stack, uninitialised. Fails with a sentence when the stack is full.
Tensor memory_push_1d(Memory *memory, const char *name, MemoryCategory category, Dtype dtype, int64_t d0);
Tensor memory_push_2d(Memory *memory, const char *name, MemoryCategory category, Dtype dtype, int64_t d0,
                      int64_t d1);

// Pops everything pushed after the mark was taken.
typedef int64_t MemoryMark;
MemoryMark memory_mark(const Memory *memory);
void memory_pop_to(Memory *memory, MemoryMark mark);

size_t ledger_host_bytes(const Ledger *ledger); // offloaded bytes of all categories

// The high-water marks (total, stack, categories) start again from what is in use now.
void ledger_reset_peak(Ledger *ledger);

__END_DECLS
