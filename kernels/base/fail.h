// Errors: one sentence that says what is wrong, where, and what to do. Quotes from files are escaped.
#pragma once

#include <stdbool.h>
#include <sys/cdefs.h>

__BEGIN_DECLS

// Prints "lce: <sentence>" to stderr and exits with status 1.
void fail(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));

// Prints "lce: <sentence>" to stderr and continues: for what the user should know but need not fix.
void warn(const char *format, ...) __attribute__((format(printf, 1, 2)));
// From here on warn() prints nothing: another process prints the same.
void warn_mute(void);

// Flushes standard output; false if some output was lost, with a warning the first time.
bool stdout_ok(void);
// Makes the exit status 1 if output was lost, so that a full disk is no success. Opens closed standard
// streams as /dev/null, so that no other file takes their place.
void output_check_at_exit(void);

// Replaces what fail() does with the sentence; it must not return (tests longjmp). NULL restores the default.
typedef void (*FailHandler)(const char *sentence);
void fail_set_handler(FailHandler handler);

// The same for the calling thread, called before the handler above. Returns the thread's handler so far.
FailHandler fail_set_thread_handler(FailHandler handler);

// The reason for a refusal, for callers that carry on.
typedef struct {
  char text[640]; // a sentence without its full stop
} Reason;

// Writes the sentence (whose arguments may be reason->text) and returns false: `return refuse(reason, ...)`.
bool refuse(Reason *reason, const char *format, ...) __attribute__((format(printf, 2, 3)));

__END_DECLS
