#include "base/fail.h"

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

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

void fail(const char *format, ...) {
  char sentence[2048];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(sentence, sizeof sentence, format, arguments);
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
  va_list arguments;
  va_start(arguments, format);
  fflush(stdout);
  fputs("lce: ", stderr);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  va_end(arguments);
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
