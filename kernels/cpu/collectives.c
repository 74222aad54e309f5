// Collectives over the processes that mpirun started.
//
// MPI's own reductions may add in a different order from call to call. Here a sum over R ranks is an
// all-to-all and a loop: rank r receives slice r of every rank, adds the slices in the order of the ranks, in
// double, and rounds once; an all-gather returns the result. So all ranks get the same bits; 2 (R - 1) / R of
// the tensor leaves each rank, as in a ring.
#include <stdlib.h>
#include <string.h>

#include "kernels/base/alloc.h"
#include "kernels/base/fail.h"
#include "kernels/base/system.h"
#include "kernels/cpu/cpu.h"
#include "kernels/ranks/ranks.h"

// With one rank every collective is a copy, or an addition to `out`.
static void copy_or_add(const Collective *a) {
  const float *x = a->x.data;
  float *out = a->out.data;
  if (a->accumulate)
    for (int64_t i = 0; i < tensor_count(a->x); i++) out[i] += x[i];
  else if (out != x)
    copy_bytes(out, x, tensor_bytes(a->x));
}

#ifdef HAVE_MPI
#include <mpi.h>

enum { SLICE = 1 << 16 }; // elements that a rank sums at a time: what it receives stays in the cache

static void check(int error, const char *operation) {
  if (error == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length;
  MPI_Error_string(error, text, &length);
  fail("MPI failed in %s: %s", operation, text);
}

static void require_words(const Collective *a) {
  if (dtype_bytes(a->x.dtype) != 4 || tensor_count(a->x) > INT32_MAX || tensor_count(a->out) > INT32_MAX)
    fail("internal: a collective on the CPU takes up to 2^31 elements of 32 bits, and x is %s",
         tensor_text(a->x).text);
}

// NULL with one rank, and if the caller has collectives of its own.
static float *received(const Backend *backend) {
  return ((const CpuState *)backend->state)->received;
}

// out [count] (+)= the sum over r of received[r], in that order.
static void sum(const Backend *backend, int count, bool accumulate, float *out) {
  const float *parts = received(backend);
  EACH_PARALLEL (i, count) {
    double total = accumulate ? out[i] : 0.0;
    for (int r = 0; r < backend->ranks; r++) total += parts[r * count + i];
    out[i] = (float)total;
  }
}

// out [slice] (+)= the sum over all ranks of this rank's slice of x [ranks, slice].
static void sum_of_slices(const Backend *backend, const float *x, int64_t slice, bool accumulate,
                          float *out) {
  int ranks = backend->ranks, counts[ranks], offsets[ranks], received_offsets[ranks];
  for (int64_t first = 0; first < slice; first += SLICE) {
    int count = (int)min_i64(SLICE, slice - first);
    for (int r = 0; r < ranks; r++)
      counts[r] = count, offsets[r] = (int)(r * slice + first), received_offsets[r] = r * count;
    check(MPI_Alltoallv(x, counts, offsets, MPI_FLOAT, received(backend), counts, received_offsets, MPI_FLOAT,
                        MPI_COMM_WORLD),
          "MPI_Alltoallv");
    sum(backend, count, accumulate, out + first);
    ranks_alive();
  }
}

static void gather_in_place(float *out, int64_t count) {
  check(MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, out, (int)count, MPI_FLOAT, MPI_COMM_WORLD),
        "MPI_Allgather");
}

// Works by whole slices. Fewer elements than ranks are left over, and every rank sums these itself.
static void all_reduce_ranks(Backend *backend, const Deferred *d) {
  const float *x = d->collective.x.data;
  float *out = d->collective.out.data;
  int64_t total = tensor_count(d->collective.x), slice = total / backend->ranks;
  int64_t whole = slice * backend->ranks;
  sum_of_slices(backend, x, slice, false, out + backend->rank * slice);
  gather_in_place(out, slice);
  int rest = (int)(total - whole);
  check(MPI_Allgather(x + whole, rest, MPI_FLOAT, received(backend), rest, MPI_FLOAT, MPI_COMM_WORLD),
        "MPI_Allgather");
  sum(backend, rest, false, out + whole);
}

static void reduce_scatter_ranks(Backend *backend, const Deferred *d) {
  const Collective *a = &d->collective;
  sum_of_slices(backend, a->x.data, tensor_count(a->out), a->accumulate, a->out.data);
}

static void all_gather_ranks(Backend *backend, const Deferred *d) {
  const Collective *a = &d->collective;
  float *local = (float *)a->out.data + backend->rank * tensor_count(a->x);
  if (local != a->x.data) memcpy(local, a->x.data, tensor_bytes(a->x));
  gather_in_place(a->out.data, tensor_count(a->x));
}

static void broadcast_rank_0_ranks(Backend *backend, const Deferred *d) {
  const Collective *a = &d->collective;
  if (backend->rank == 0) copy_or_add(a);
  check(MPI_Bcast(a->out.data, (int)tensor_count(a->x), MPI_FLOAT, 0, MPI_COMM_WORLD), "MPI_Bcast");
}

static void run_or_defer(Backend *backend, const Collective *a, void (*run)(Backend *, const Deferred *),
                         const char *name) {
  if (!received(backend)) {
    copy_or_add(a);
    return;
  }
  require_words(a);
  cpu_defer(backend, (Deferred){name, STREAM_COLLECTIVES, run, .collective = *a});
  if (!a->async) cpu_collectives_join(backend, 0);
}

void cpu_collectives_end(Backend *backend) {
  if (!received(backend)) return;
  ranks_enter("MPI_Barrier"); // no rank exits, maybe with an error that ends the job, before all are done
  MPI_Barrier(MPI_COMM_WORLD);
  ranks_leave();
  free(received(backend));
}

void cpu_join_ranks(Backend *backend) {
  const Launch *l = ranks_self();
  if (!ranks_have_mpi())
    fail("%d ranks on the CPU need MPI, and %s does not start it: use mpirun -n %d ./train ...; ranks on "
         "GPUs need --device cuda",
         l->ranks, l->launcher, l->ranks);
  ((CpuState *)backend->state)->received =
      host_alloc((int64_t)l->ranks * SLICE, sizeof(float), "collectives");
}

#else // one rank only: the calls of the operations below are not compiled

#define run_or_defer(backend, a, run, name) copy_or_add(a)

void cpu_collectives_end(Backend *backend) {}

void cpu_join_ranks(Backend *backend) {
  fail("%d ranks on the CPU need MPI, and this program was built without it: `make deps` installs it, then "
       "`make` and mpirun -n %d ./train ...",
       backend->ranks, backend->ranks);
}

#endif

#define COLLECTIVE(name)                                                                                     \
  void cpu_##name(Backend *backend, const Collective *a) {                                                   \
    run_or_defer(backend, a, name##_ranks, #name);                                                           \
  }
COLLECTIVE(all_reduce)
COLLECTIVE(reduce_scatter)
COLLECTIVE(all_gather)
COLLECTIVE(broadcast_rank_0)

void cpu_collectives_join(Backend *backend, int64_t behind) {
  cpu_join(backend, STREAM_COLLECTIVES, behind, STREAM_COLLECTIVES, behind);
}
