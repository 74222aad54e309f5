// The memory that a cgroup, v1 or v2, and `ulimit -v` leave to a process, from files of a machine made up here.
#include "kernels/limits.h"

#include <sys/resource.h>

#include "tests/data_files.h"

static size_t limit(const char *machine) {
  return cgroup_memory_limit(temp_path(machine));
}

TEST(no_limit_where_none_is_set) {
  make_directory("bare");
  WRITE_TEXTS({"free/proc/self/cgroup", "0::/user.slice\n"},
              {"free/proc/self/mountinfo", "21 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
                                           "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"},
              {"free/sys/fs/cgroup/user.slice/memory.max", "max\n"});
  assert_true(limit("bare") == SIZE_MAX && limit("free") == SIZE_MAX);
}

// Nested groups, of which an outer one has the lowest limit; a container, which sees its own as "/".
TEST(the_lowest_of_nested_groups_counts) {
  WRITE_TEXTS(
      {"v2/proc/self/cgroup", "0::/job/step/task\n"},
      {"v2/proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 none rw\n"},
      {"v2/sys/fs/cgroup/job/memory.max", "2000000\n"}, {"v2/sys/fs/cgroup/job/step/memory.max", "1000000\n"},
      {"v2/sys/fs/cgroup/job/step/task/memory.max", "max\n"}, {"v2/sys/fs/cgroup/other/memory.max", "5\n"});
  WRITE_TEXTS({"inside/proc/self/cgroup", "0::/\n"},
              {"inside/proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n"},
              {"inside/sys/fs/cgroup/memory.max", "536870912\n"});
  assert_true(limit("v2") == 1000000 && limit("inside") == 536870912);
}

// The memory controller has a hierarchy of its own, beside others and an empty one of v2. A container without
// a namespace for cgroups: its group is the top of what is mounted.
TEST(version_1) {
  WRITE_TEXTS(
      {"v1/proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/slurm/uid_0/job_7\n1:name=systemd:/x\n0::/y\n"},
      {"v1/proc/self/mountinfo", "34 31 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
                                 "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
                                 "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"},
      {"v1/sys/fs/cgroup/cpu/x/memory.limit_in_bytes", "7\n"},
      {"v1/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"},
      {"v1/sys/fs/cgroup/memory/slurm/uid_0/memory.limit_in_bytes", "3000000\n"},
      {"v1/sys/fs/cgroup/memory/slurm/uid_0/job_7/memory.limit_in_bytes", "4000000\n"});
  WRITE_TEXTS({"docker/proc/self/cgroup", "4:memory:/docker/abc/inner\n"},
              {"docker/proc/self/mountinfo",
               "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"},
              {"docker/sys/fs/cgroup/memory/memory.limit_in_bytes", "800\n"},
              {"docker/sys/fs/cgroup/memory/inner/memory.limit_in_bytes", "900\n"});
  assert_true(limit("v1") == 3000000 && limit("docker") == 800);
}

TEST(address_space_is_limited) {
  struct rlimit before, low;
  getrlimit(RLIMIT_AS, &before);
  low = before;
  low.rlim_cur = (rlim_t)1 << 40;
  setrlimit(RLIMIT_AS, &low);
  size_t left = address_space_left();
  setrlimit(RLIMIT_AS, &before);
  assert_true(left > 0 && left < low.rlim_cur);
  assert_true(before.rlim_cur != RLIM_INFINITY || address_space_left() == SIZE_MAX);
}

int main(void) {
  return tests_run("limits", make_temp_dir, remove_temp_dir);
}
