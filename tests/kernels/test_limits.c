// The memory that cgroups, here of made-up machines, and `ulimit -v` leave to a process.
#include "kernels/base/system.h"

#include <sys/resource.h>

#include "tests/data_files.h"

static void check(const char *machine, size_t want) {
  assert_true(cgroup_memory_limit(temp_path(machine)) == want);
}

// Nested groups, of which an outer one has the lowest limit; v1's memory controller beside others and v2;
// containers, which see their group as "/", or its path on the host.
TEST(the_lowest_limit_of_nested_cgroups_counts) {
  WRITE_TEXTS(
      {"free/proc/self/cgroup", "0::/a\n"}, {"free/sys/fs/cgroup/a/memory.max", "max\n"},
      {"v2/proc/self/cgroup", "0::/job/step/task\n"}, {"v2/sys/fs/cgroup/job/memory.max", "2000000\n"},
      {"v2/sys/fs/cgroup/job/step/memory.max", "1000000\n"},
      {"v2/sys/fs/cgroup/job/step/task/memory.max", "max\n"}, {"v2/sys/fs/cgroup/other/memory.max", "5\n"},
      {"inside/proc/self/cgroup", "0::/\n"}, {"inside/sys/fs/cgroup/memory.max", "536870912\n"});
  WRITE_TEXTS({"v1/proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/uid_0/job_7\n1:name=systemd:/x\n0::/y\n"},
              {"v1/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"},
              {"v1/sys/fs/cgroup/memory/uid_0/memory.limit_in_bytes", "3000000\n"},
              {"v1/sys/fs/cgroup/memory/uid_0/job_7/memory.limit_in_bytes", "4000000\n"},
              {"v1/sys/fs/cgroup/memory/x/memory.limit_in_bytes", "7\n"},
              {"docker/proc/self/cgroup", "4:memory:/docker/abc\n"},
              {"docker/sys/fs/cgroup/memory/memory.limit_in_bytes", "800\n"});
  check("nowhere", SIZE_MAX);
  check("free", SIZE_MAX);
  check("v2", 1000000);
  check("inside", 536870912);
  check("v1", 3000000);
  check("docker", 800);
}

TEST(address_space_is_limited) {
  for (int i = 0; i < 2; i++) {
    int resource = i ? RLIMIT_DATA : RLIMIT_AS;
    struct rlimit before, low;
    getrlimit(resource, &before);
    low = (struct rlimit){.rlim_cur = (rlim_t)1 << 45, .rlim_max = before.rlim_max};
    setrlimit(resource, &low);
    size_t left = address_space_left();
    setrlimit(resource, &before);
    assert_true(left > 0 && left < low.rlim_cur);
    low.rlim_cur = 1 << 16; // less than it has
    setrlimit(resource, &low);
    left = address_space_left();
    setrlimit(resource, &before);
    assert_true(left == 0);
  }
}

int main(void) {
  return tests_run("limits", make_temp_dir, remove_temp_dir);
}
