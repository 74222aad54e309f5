// Collectives over the processes that mpirun started.
//
// MPI's own reductions may add in any order, and in another one from call to call. Here a sum over R ranks is
// an exchange and a loop: rank r receives everyone's slice r, adds the slices in the order of the ranks, in
// double, rounds once, and hands the result back. Each number is summed at one place, so all ranks get the
// same bits, every time; 2 (R - 1) / R of the tensor leaves each rank, as in a ring.
//
// Nothing is gained here by running beside other operations. Collectives that may do so run as late as they
// may: when they are joined. A caller that touches their tensors too early then gets wrong numbers on the
// CPU, every time, and not only now and then on a GPU.
#include <stdlib.h>
#include <string.h>

#include "base/fail.h"
#include "base/system.h"
#include "kernels/cpu/cpu.h"
#include "kernels/ranks/mpi.h"
#include "kernels/ranks/ranks.h"

// Of one rank every collective is a copy, or a sum with what is there.
static void alone(const Collective *a) {
  const float *x = a->x.data;
  float *out = a->out.data;
  if (a->accumulate)
    for (int64_t i = 0; i < tensor_count(a->x); i++) out[i] += x[i];
  else if (out != x)
    copy_bytes(out, x, tensor_bytes(a->x));
}

#ifdef HAVE_MPI
#include <mpi.h>

enum { SLICE = 1 << 16 }; // numbers that a rank sums at a time: what arrives for it stays in the cache

typedef void (*Work)(struct CpuCollectives *, const Collective *);

typedef struct {
  Work work;
  const char *name;
  Collective operands;
} Waiting;

struct CpuCollectives {
  int rank, ranks;
  Waiting *waiting; // to be joined, oldest first
  int64_t count, capacity;
  int *counts, *places, *arrived_counts, *arrived_places; // [ranks], for one exchange
  char *arrived;                                          // [ranks * SLICE] numbers
};

// NULL while there is one rank.
static struct CpuCollectives *joined(const Backend *backend) {
  return ((const CpuState *)backend->state)->collectives;
}

static void check(int error, const char *operation) {
  if (error == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length;
  MPI_Error_string(error, text, &length);
  fail("MPI failed in %s: %s", operation, text);
}

static void whole_numbers(const Collective *a) {
  if (dtype_bytes(a->x.dtype) != 4 || tensor_count(a->x) > INT32_MAX || tensor_count(a->out) > INT32_MAX)
    fail("internal: a collective on the CPU takes up to 2^31 numbers of 32 bits, and x is %s",
         tensor_text(a->x).text);
}

static void sum(const struct CpuCollectives *c, Dtype dtype, int count, bool accumulate, void *out) {
  if (dtype == DTYPE_I32) {
    const int32_t *arrived = (const int32_t *)(void *)c->arrived;
    int32_t *to = out;
    for (int i = 0; i < count; i++) {
      int32_t total = accumulate ? to[i] : 0;
      for (int r = 0; r < c->ranks; r++) total += arrived[r * count + i];
      to[i] = total;
    }
    return;
  }
  const float *arrived = (const float *)(void *)c->arrived;
  float *to = out;
#pragma omp parallel for schedule(static)
  for (int i = 0; i < count; i++) {
    double total = accumulate ? to[i] : 0.0;
    for (int r = 0; r < c->ranks; r++) total += arrived[r * count + i];
    to[i] = (float)total;
  }
}

// Everyone's counts[r] numbers from x + places[r] go to rank r, which adds up what has come into `out`.
static void exchange_and_sum(struct CpuCollectives *c, const Collective *a, const void *x, void *out) {
  int mine = c->counts[c->rank];
  for (int r = 0; r < c->ranks; r++) {
    c->arrived_counts[r] = mine;
    c->arrived_places[r] = r * mine;
  }
  check(MPI_Alltoallv(x, c->counts, c->places, MPI_FLOAT, c->arrived, c->arrived_counts, c->arrived_places,
                      MPI_FLOAT, MPI_COMM_WORLD),
        "exchanging what is to be summed");
  sum(c, a->x.dtype, mine, a->accumulate, out);
}

// All that wait but the last `behind`.
static void run_waiting(struct CpuCollectives *c, int64_t behind) {
  int64_t ready = c->count - behind;
  if (ready <= 0) return;
  for (int64_t i = 0; i < ready; i++) {
    ranks_enter(c->waiting[i].name, false);
    c->waiting[i].work(c, &c->waiting[i].operands);
    ranks_leave();
  }
  c->count = behind;
  memmove(c->waiting, c->waiting + ready, (size_t)behind * sizeof *c->waiting);
}

static void run(Backend *backend, const Collective *a, Work work, const char *name) {
  struct CpuCollectives *c = joined(backend);
  if (!c) {
    alone(a);
    return;
  }
  whole_numbers(a);
  if (!a->async) {
    run_waiting(c, 0);
    work(c, a);
    return;
  }
  if (c->count == c->capacity) {
    c->capacity = c->capacity ? 2 * c->capacity : 64;
    c->waiting = realloc(c->waiting, (size_t)c->capacity * sizeof *c->waiting);
    if (!c->waiting) fail("out of memory for %lld collectives", (long long)c->capacity);
  }
  c->waiting[c->count++] = (Waiting){work, name, *a};
}

void cpu_collectives_join(Backend *backend, int64_t behind) {
  if (joined(backend)) run_waiting(joined(backend), behind);
}

static void sum_everywhere(struct CpuCollectives *c, const Collective *a) {
  int64_t total = tensor_count(a->x), block = (int64_t)c->ranks * SLICE;
  for (int64_t first = 0; first < total; first += block) {
    int count = (int)min_i64(block, total - first), slice = (int)ceil_div(count, c->ranks);
    for (int r = 0; r < c->ranks; r++) {
      c->places[r] = (int)min_i64((int64_t)r * slice, count);
      c->counts[r] = (int)min_i64(slice, count - c->places[r]);
    }
    float *out = (float *)a->out.data + first;
    exchange_and_sum(c, a, (const float *)a->x.data + first, out + c->places[c->rank]);
    check(MPI_Allgatherv(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, out, c->counts, c->places, MPI_FLOAT,
                         MPI_COMM_WORLD),
          "gathering sums");
    ranks_alive();
  }
}

static void sum_slices(struct CpuCollectives *c, const Collective *a) {
  int64_t share = tensor_count(a->out);
  for (int64_t first = 0; first < share; first += SLICE) {
    for (int r = 0; r < c->ranks; r++) {
      c->counts[r] = (int)min_i64(SLICE, share - first);
      c->places[r] = (int)(r * share + first);
    }
    exchange_and_sum(c, a, a->x.data, (float *)a->out.data + first);
    ranks_alive();
  }
}

static void gather(struct CpuCollectives *c, const Collective *a) {
  int count = (int)tensor_count(a->x);
  float *mine = (float *)a->out.data + (int64_t)c->rank * count;
  if (mine != a->x.data) memcpy(mine, a->x.data, tensor_bytes(a->x));
  check(MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, a->out.data, count, MPI_FLOAT, MPI_COMM_WORLD),
        "gathering from all ranks");
}

static void send_from_0(struct CpuCollectives *c, const Collective *a) {
  if (c->rank == 0) alone(a);
  check(MPI_Bcast(a->out.data, (int)tensor_count(a->x), MPI_FLOAT, 0, MPI_COMM_WORLD), "broadcasting");
}

void cpu_all_reduce(Backend *backend, const Collective *a) {
  run(backend, a, sum_everywhere, "all_reduce");
}

void cpu_reduce_scatter(Backend *backend, const Collective *a) {
  run(backend, a, sum_slices, "reduce_scatter");
}

void cpu_all_gather(Backend *backend, const Collective *a) {
  run(backend, a, gather, "all_gather");
}

void cpu_broadcast(Backend *backend, const Collective *a) {
  run(backend, a, send_from_0, "broadcast");
}

static int *ints(int count) {
  int *array = calloc((size_t)count, sizeof *array);
  if (!array) fail("out of memory for %d ranks", count);
  return array;
}

void cpu_backend_join_ranks(Backend *backend) {
  const Launch *l = ranks_self();
  if (l->ranks == 1) return;
  if (!mpi_is_there())
    fail("%d ranks on the CPU talk through MPI, and %s does not start it: start them with mpirun", l->ranks,
         l->launcher);
  struct CpuCollectives *c = calloc(1, sizeof *c);
  if (!c) fail("out of memory for %d ranks", l->ranks);
  *c = (struct CpuCollectives){.rank = l->rank,
                               .ranks = l->ranks,
                               .counts = ints(l->ranks),
                               .places = ints(l->ranks),
                               .arrived_counts = ints(l->ranks),
                               .arrived_places = ints(l->ranks),
                               .arrived = malloc((size_t)l->ranks * SLICE * sizeof(float))};
  if (!c->arrived) fail("out of memory for %d ranks", l->ranks);
  ((CpuState *)backend->state)->collectives = c;
  backend->rank = l->rank;
  backend->ranks = l->ranks;
}

void cpu_collectives_end(Backend *backend) {
  struct CpuCollectives *c = joined(backend);
  if (!c) return;
  free(c->counts);
  free(c->places);
  free(c->arrived_counts);
  free(c->arrived_places);
  free(c->arrived);
  free(c->waiting);
  free(c);
}

#else

void cpu_all_reduce(Backend *backend, const Collective *a) {
  (void)backend;
  alone(a);
}

void cpu_reduce_scatter(Backend *backend, const Collective *a) {
  (void)backend;
  alone(a);
}

void cpu_all_gather(Backend *backend, const Collective *a) {
  (void)backend;
  alone(a);
}

void cpu_broadcast(Backend *backend, const Collective *a) {
  (void)backend;
  alone(a);
}

void cpu_collectives_join(Backend *backend, int64_t behind) {
  (void)backend;
  (void)behind;
}

void cpu_backend_join_ranks(Backend *backend) {
  (void)backend;
  int ranks = ranks_self()->ranks;
  if (ranks > 1) fail("%d ranks on the CPU talk through MPI, and this program was built without it", ranks);
}

void cpu_collectives_end(Backend *backend) {
  (void)backend;
}

#endif
