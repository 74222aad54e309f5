// Signals that ask a run to stop. It then saves its weights.
#pragma once

#include <signal.h>

extern volatile sig_atomic_t stop_requested;

void stop_on_signals(void);
