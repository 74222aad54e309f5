#!/bin/bash
# Installs Debian packages. Each argument is PACKAGE=what_it_is_for; `make deps` passes those that are
# missing. Without a way to install it says so and carries on when the build can do without them.
set -euo pipefail

[ $# -gt 0 ] || exit 0

packages=()
echo "Missing on this machine:"
for pair in "$@"; do
  packages+=("${pair%%=*}")
  reason=${pair#*=}
  printf '  %-24s %s\n' "${pair%%=*}" "${reason//_/ }"
done

# Without these there is no program, or no test.
needed() {
  for package in "${packages[@]}"; do
    case $package in gcc | libc6-dev | libcjson-dev | libstb-dev | zlib1g-dev | libcmocka-dev) return 0 ;; esac
  done
  return 1
}

give_up() {
  echo "$1" >&2
  if needed; then exit 1; fi
  echo "Carrying on without them."
  exit 0
}

command -v apt-get >/dev/null || give_up "This machine has no apt-get: install them in its own way, or unpack them and set DEPS_ROOT."

as_root=()
if [ "$(id -u)" != 0 ]; then
  command -v sudo >/dev/null || give_up "Neither root nor sudo is available. Have an administrator run: apt-get install ${packages[*]}"
  as_root=(sudo)
fi

echo "Installing them: ${as_root[*]:+sudo }apt-get install ${packages[*]}"
apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq
  -o DPkg::Lock::Timeout=120 -o Acquire::Retries=1 -o Acquire::http::Timeout=20)
install() { "${apt[@]}" install --yes --no-install-recommends "${packages[@]}" </dev/null >/dev/null; }
# The package lists may be old or absent: fetch them when the first try fails.
install 2>/dev/null || { "${apt[@]}" update && install; } ||
  give_up "apt-get could not install them: its words are above. Is this machine offline?"
echo "Installed."
