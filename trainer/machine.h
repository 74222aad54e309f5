// Which machine a run computes on.
#pragma once

#include "trainer/options.h"

// The backend and dtypes that the options select; without a GPU --device cuda fails, and auto prints why there is none.
// The caller destroys it.
Backend *machine_open(Options *options);

// Makes it this rank's part of the job; nothing without a launcher. Call it on all ranks at once.
void machine_join_ranks(Backend *backend);

// Rank 0's bytes (a multiple of 4) to all ranks, by way of the backend's stack. Call it on all ranks at once.
void machine_broadcast(Backend *backend, void *bytes, size_t count);

// Bytes that the ledger may use: the device's memory less what the backend itself takes; 0 when unknown.
size_t machine_usable_bytes(const Backend *backend);
