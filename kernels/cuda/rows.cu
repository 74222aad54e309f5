// Gather and scatter of rows: one block per row, 16 bytes at a time where the rows allow it. They move bits,
// so two element sizes serve every dtype.
#include "kernels/cuda/cuda_common.cuh"

template <typename Unit, bool GATHER>
static __global__ void move_rows(Unit *out, const Unit *x, const int32_t *positions, int64_t units) {
  int64_t row = blockIdx.x, indexed = positions[blockIdx.x];
  out += (GATHER ? row : indexed) * units;
  x += (GATHER ? indexed : row) * units;
  for (int64_t i = threadIdx.x; i < units; i += blockDim.x) out[i] = x[i];
}

template <bool GATHER> static void move(Backend *backend, const MoveRows *a) {
  int64_t count = a->indices.shape[0];
  size_t row_bytes = (size_t)(a->x.rank == 1 ? 1 : a->x.shape[1]) * dtype_bytes(a->x.dtype);
  uintptr_t bits = (uintptr_t)a->out.data | (uintptr_t)a->x.data | row_bytes;
  auto launch = [&](auto unit) {
    using Unit = decltype(unit);
    int64_t units = (int64_t)(row_bytes / sizeof(Unit));
    launch_kernel(per_row(backend, GATHER ? "gather_rows" : "scatter_rows", count, units),
                  move_rows<Unit, GATHER>, data_of<Unit>(a->out), data_of<Unit>(a->x),
                  data_of<int32_t>(a->indices), units);
  };
  if (bits % sizeof(uint4) == 0)
    launch(uint4());
  else if (bits % sizeof(uint32_t) == 0)
    launch(uint32_t());
  else
    launch(uint16_t());
}

void cuda_gather_rows(Backend *backend, const MoveRows *a) {
  move<true>(backend, a);
}

void cuda_scatter_rows(Backend *backend, const MoveRows *a) {
  move<false>(backend, a);
}
