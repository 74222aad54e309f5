#include "trainer/stop.h"

volatile sig_atomic_t stop_requested;

static void request_stop(int signal_number) {
  stop_requested = 1;
  // A second one ends the program at once; but a closed terminal sends several, and a CPU limit one a second.
  if (signal_number != SIGHUP && signal_number != SIGXCPU) signal(signal_number, SIG_DFL);
}

// A run whose terminal or pipe is closed still saves its weights.
void stop_on_signals(void) {
  signal(SIGINT, request_stop);
  signal(SIGTERM, request_stop);
  signal(SIGXCPU, request_stop);
  if (signal(SIGHUP, request_stop) == SIG_IGN) signal(SIGHUP, SIG_IGN); // nohup
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN); // a file that may not grow then fails with a sentence, like a full disk
}
