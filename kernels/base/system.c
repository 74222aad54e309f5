#include "kernels/base/system.h"

#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

double now_seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

size_t system_bytes(const char *path, const char *field) {
  FILE *file = fopen(path, "r");
  if (!file) return 0;
  char line[256];
  size_t kib = 0, length = strlen(field);
  while (fgets(line, sizeof line, file))
    if (!strncmp(line, field, length) && line[length] == ':') kib = strtoull(line + length + 1, NULL, 10);
  fclose(file);
  return kib * 1024;
}

void copy_bytes(void *to, const void *from, size_t bytes) {
  const size_t block = (size_t)256 << 10;
#pragma omp parallel for schedule(static) if (bytes > 4 * block)
  for (size_t first = 0; first < bytes; first += block)
    memcpy((char *)to + first, (const char *)from + first, bytes - first < block ? bytes - first : block);
}

// The lowest limit of a hierarchy's group `path` and of the groups above it.
static size_t lowest_limit(const char *hierarchy, char *path, const char *file) {
  for (size_t lowest = SIZE_MAX;;) {
    char name[3 * PATH_MAX];
    unsigned long long bytes;
    snprintf(name, sizeof name, "%s%s/%s", hierarchy, path, file);
    FILE *limit = fopen(name, "r");
    if (limit && fscanf(limit, "%llu", &bytes) == 1 && bytes < lowest) lowest = bytes; // "max" is no number
    if (limit) fclose(limit);
    char *parent = strrchr(path, '/');
    if (!parent) return lowest;
    *parent = 0;
  }
}

size_t cgroup_memory_limit(const char *root) {
  char line[PATH_MAX + 256], path[PATH_MAX], name[PATH_MAX];
  size_t lowest = SIZE_MAX, limit = SIZE_MAX;
  snprintf(name, sizeof name, "%s/proc/self/cgroup", root);
  FILE *groups = fopen(name, "r");
  while (groups && fgets(line, sizeof line, groups)) {
    if (sscanf(line, "%*d:memory:%4095[^\n]", path) == 1) {
      snprintf(name, sizeof name, "%s/sys/fs/cgroup/memory", root);
      limit = lowest_limit(name, path, "memory.limit_in_bytes");
    } else if (sscanf(line, "0::%4095[^\n]", path) == 1) {
      snprintf(name, sizeof name, "%s/sys/fs/cgroup", root);
      limit = lowest_limit(name, path, "memory.max");
    }
    if (limit < lowest) lowest = limit;
  }
  if (groups) fclose(groups);
  return lowest;
}

size_t host_memory_left(void) {
  size_t left = system_bytes("/proc/meminfo", "MemAvailable"), limit = cgroup_memory_limit(""),
         held = system_bytes("/proc/self/status", "VmRSS"), allowed = limit > held ? limit - held : 1;
  return left && allowed < left ? allowed : left;
}

size_t address_space_left(void) {
  static const struct {
    int resource;
    const char *taken;
  } limits[] = {{RLIMIT_AS, "VmSize"}, {RLIMIT_DATA, "VmData"}};
  size_t left = SIZE_MAX;
  for (int i = 0; i < 2; i++) {
    struct rlimit limit;
    if (getrlimit(limits[i].resource, &limit) || limit.rlim_cur == RLIM_INFINITY) continue;
    size_t taken = system_bytes("/proc/self/status", limits[i].taken);
    size_t here = limit.rlim_cur > taken ? limit.rlim_cur - taken : 0;
    if (here < left) left = here;
  }
  return left;
}
