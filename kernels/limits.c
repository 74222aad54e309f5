#include "kernels/limits.h"

#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

#include "kernels/system.h"

// Of the group `path` below the mount point and of those above it, up to the mount point itself.
static size_t lowest_limit(const char *mount, char *path, const char *file) {
  for (size_t lowest = SIZE_MAX;;) {
    char name[3 * PATH_MAX];
    unsigned long long bytes;
    snprintf(name, sizeof name, "%s%s/%s", mount, path, file);
    FILE *limit = fopen(name, "r");
    if (limit && fscanf(limit, "%llu", &bytes) == 1 && bytes < lowest) lowest = bytes; // "max" is no number
    if (limit) fclose(limit);
    char *parent = strrchr(path, '/');
    if (!parent) return lowest;
    *parent = 0;
  }
}

// This process's group in the hierarchy of v2 ("0::/a/b") or in that of v1's memory controller ("4:memory:/a/b").
static bool find_group(const char *root, bool v2, char group[PATH_MAX]) {
  char name[PATH_MAX + 32], line[PATH_MAX + 256], controllers[256];
  bool found = false;
  snprintf(name, sizeof name, "%s/proc/self/cgroup", root);
  FILE *file = fopen(name, "r");
  while (file && !found && fgets(line, sizeof line, file))
    found = v2 ? sscanf(line, "0::%4095[^\n]", group) == 1
               : sscanf(line, "%*d:%255[^:]:%4095[^\n]", controllers, group) == 2 &&
                     strstr(controllers, "memory");
  if (file) fclose(file);
  return found;
}

size_t cgroup_memory_limit(const char *root) {
  char name[PATH_MAX + 32], line[3 * PATH_MAX], top[PATH_MAX], point[PATH_MAX], group[PATH_MAX];
  size_t lowest = SIZE_MAX;
  snprintf(name, sizeof name, "%s/proc/self/mountinfo", root);
  FILE *mounts = fopen(name, "r");
  // "32 31 0:29 /TOP /POINT rw,relatime shared:9 - cgroup2 cgroup2 rw": /TOP of the hierarchy is at /POINT.
  while (mounts && fgets(line, sizeof line, mounts)) {
    const char *type = strstr(line, " - cgroup");
    bool v2 = type && !strncmp(type, " - cgroup2 ", 11), v1 = type && !v2 && strstr(type, "memory");
    if ((!v1 && !v2) || sscanf(line, "%*s %*s %*s %4095s %4095s", top, point) != 2) continue;
    if (!find_group(root, v2, group)) continue;
    // A container may see its own group as the whole hierarchy.
    size_t length = strcmp(top, "/") ? strlen(top) : 0;
    char *below = strncmp(group, top, length) ? group + strlen(group) : group + length, mount[2 * PATH_MAX];
    snprintf(mount, sizeof mount, "%s%s", root, point);
    size_t limit = lowest_limit(mount, below, v2 ? "memory.max" : "memory.limit_in_bytes");
    if (limit < lowest) lowest = limit;
  }
  if (mounts) fclose(mounts);
  return lowest;
}

size_t address_space_left(void) {
  struct rlimit limit;
  if (getrlimit(RLIMIT_AS, &limit) || limit.rlim_cur == RLIM_INFINITY) return SIZE_MAX;
  size_t taken = system_bytes("/proc/self/status", "VmSize");
  return limit.rlim_cur > taken ? limit.rlim_cur - taken : 0;
}

size_t host_memory_left(void) {
  size_t left = system_bytes("/proc/meminfo", "MemAvailable"), limit = cgroup_memory_limit(""),
         held = system_bytes("/proc/self/status", "VmRSS"), allowed = limit > held ? limit - held : 1;
  return left && allowed < left ? allowed : left;
}
