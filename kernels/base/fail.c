#include "kernels/base/fail.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/base/text.h"

static FailHandler fail_handler;
static _Thread_local FailHandler thread_handler;

void fail_set_handler(FailHandler handler) {
  fail_handler = handler;
}

FailHandler fail_set_thread_handler(FailHandler handler) {
  FailHandler before = thread_handler;
  thread_handler = handler;
  return before;
}

enum { SENTENCE = 2048 };

static void write_sentence(char out[SENTENCE], const char *format, va_list arguments) {
  char raw[SENTENCE];
  vsnprintf(raw, sizeof raw, format, arguments);
  text_escape(out, SENTENCE, raw, strlen(raw));
}

void fail(const char *format, ...) {
  char sentence[SENTENCE];
  va_list arguments;
  va_start(arguments, format);
  write_sentence(sentence, format, arguments);
  va_end(arguments);
  if (thread_handler) thread_handler(sentence);
  if (fail_handler) fail_handler(sentence);
  fflush(stdout);
  fprintf(stderr, "lce: %s\n", sentence);
  exit(1);
}

static bool muted;

void warn_mute(void) {
  muted = true;
}

void warn(const char *format, ...) {
  if (muted) return;
  char sentence[SENTENCE];
  va_list arguments;
  va_start(arguments, format);
  write_sentence(sentence, format, arguments);
  va_end(arguments);
  fflush(stdout);
  fprintf(stderr, "lce: %s\n", sentence);
}

bool stdout_ok(void) {
  static bool lost;
  bool flushed = !fflush(stdout),
       busy = !flushed && errno == EAGAIN; // a pipe that does not block: not lost for good
  const char *why = flushed ? "it is closed or full" : strerror(errno); // an earlier error has no errno left
  if (busy) clearerr(stdout);
  if (lost || busy || (flushed && !ferror(stdout))) return !lost;
  lost = true;
  warn("cannot write to standard output: %s", why);
  return false;
}

static void check_output(void) {
  if (!stdout_ok()) _exit(1);
}

void output_check_at_exit(void) {
  static bool checked;
  if (checked) return;
  checked = true;
  static char whole_help[1 << 16]; // a write that fails inside of it would leave no reason behind
  if (!isatty(STDOUT_FILENO)) setvbuf(stdout, whole_help, _IOFBF, sizeof whole_help);
  int unused;
  while ((unused = open("/dev/null", O_RDWR)) >= 0 && unused <= STDERR_FILENO) continue;
  if (unused >= 0) close(unused);
  atexit(check_output);
}

bool refuse(Reason *reason, const char *format, ...) {
  Reason written;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(written.text, sizeof written.text, format, arguments);
  va_end(arguments);
  *reason = written;
  return false;
}
