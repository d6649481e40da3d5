#!/bin/sh
# Unpacks Debian's libonnxruntime-dev (suite experimental) to a folder. Nothing is installed, no root is needed, and the
# machine's own apt state is left alone: the mirror is the one in its apt sources, with only the suite changed.
# The last line printed says why it failed.
set -u
out=$1
fail() {
  echo "$1"
  exit 1
}
for tool in apt-get dpkg; do
  command -v "$tool" >/dev/null 2>&1 || fail "$tool is not there"
done

# The first mirror of Debian's main archive: from apt itself, else read from the sources (one-line or deb822 form).
mirror=$(apt-get indextargets --format '$(ORIGIN) $(LABEL) $(REPO_URI)' 'Created-By: Packages' 2>/dev/null |
  sed -n 's/^Debian Debian //p' | head -n 1)
if [ -z "$mirror" ]; then
  mirror=$(cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list /etc/apt/sources.list.d/*.sources 2>/dev/null |
    sed -n -e 's/^URIs: *\([^ ]*\).*/\1/p' -e 's/^deb \(\[[^]]*\] \)\{0,1\}\([^ ]*\).*/\2/p' |
    grep '/debian/*$' | head -n 1)
fi
[ -n "$mirror" ] || fail "the apt sources name no mirror of Debian's archive"

keyring=/usr/share/keyrings/debian-archive-keyring.gpg
signed=""
[ -f "$keyring" ] && signed="[signed-by=$keyring] "

state=$out/apt
mkdir -p "$state/lists/partial" "$state/archives/partial" || fail "$state cannot be made"
echo "deb $signed$mirror experimental main" >"$state/sources.list"
state=$(cd "$state" && pwd)
private="-o Dir::Etc::sourcelist=$state/sources.list -o Dir::Etc::sourceparts=/dev/null \
-o Dir::State::Lists=$state/lists -o Dir::Cache=$state -o Dir::Cache::archives=$state/archives \
-o Debug::NoLocking=1 -o APT::Sandbox::User= -o Acquire::Retries=2 -o Acquire::http::Timeout=30 \
-o Acquire::https::Timeout=30"
# shellcheck disable=SC2086 # the options are words
apt-get $private -qq update >"$state/log" 2>&1 || fail "apt-get update failed for the suite experimental"
# shellcheck disable=SC2086
(cd "$state" && apt-get $private -qq download libonnxruntime-dev >>"$state/log" 2>&1) ||
  fail "apt-get download libonnxruntime-dev failed"
for package in "$state"/libonnxruntime-dev_*.deb; do
  dpkg -x "$package" "$out/root" || fail "dpkg could not unpack libonnxruntime-dev"
done
rm -rf "$state"
