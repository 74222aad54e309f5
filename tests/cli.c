#include "tests/cli.h"

#include <string.h>

void assert_refused(const char *arguments, const char *part) {
  Output o = train("%s", arguments);
  size_t length = strlen(o.err);
  bool one_line = length > 1 && strchr(o.err, '\n') == o.err + length - 1;
  if (o.status != 1 || !one_line || strncmp(o.err, "lce: ", 5) != 0 || !strstr(o.err, part))
    fail_msg("train %s: should exit 1 with one sentence that holds \"%s\", not %d with: %s", arguments, part,
             o.status, o.err);
  output_free(&o);
}
